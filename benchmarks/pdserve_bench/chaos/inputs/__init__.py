"""Faults in what the graph is given: requests, files, weights, bytes on its ports."""
