"""The multi-round question-and-answer workload: users that join over time, each with a chat of several rounds."""
