"""A simulated engine: same contract as the real one, timing from a small model, no vLLM and no torch."""
