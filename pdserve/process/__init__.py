"""Common parts of the processes of the graph: their life cycle, their registration, and the engine of a worker."""
