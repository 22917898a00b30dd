"""What the promise is worth: one graph, with it and without, in turn."""
