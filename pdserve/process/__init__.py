"""What decode and prefill workers have in common: identity, presence in the registry, signals."""
