"""`pdserve bench multi-round`: users that join over time, each with a chat of several rounds."""
