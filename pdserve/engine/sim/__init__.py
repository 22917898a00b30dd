"""A simulated engine with the contract of the real one and timing from a small model, without vLLM and torch."""
