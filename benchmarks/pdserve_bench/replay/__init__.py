"""`pdserve bench replay`: send the requests of a trace when they came, and show the server over time."""
