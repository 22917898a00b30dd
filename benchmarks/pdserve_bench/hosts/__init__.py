"""Simulate hosts on one machine with Linux namespaces, a bridge, and links that can be cut, slow or lossy."""
