"""Faults of processes, hosts and networks."""
