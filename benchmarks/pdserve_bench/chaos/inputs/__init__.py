"""Faults in a graph's inputs: requests, files, model weights, bytes on its ports."""
