"""Faults of processes, hosts and networks: kill, hang, cut, pause, wrong clocks."""
