"""What the processes of the graph have in common: their life, their presence in the registry, and a worker's engine."""
