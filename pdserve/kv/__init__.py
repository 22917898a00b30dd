"""What pdserve adds to vLLM's NIXL connector. It runs inside vLLM's worker processes, not in ours."""
