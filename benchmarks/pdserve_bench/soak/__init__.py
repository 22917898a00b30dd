"""Whether a graph is where it was after thousands of requests that ended badly."""
