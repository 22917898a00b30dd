"""What each hop of a request costs, alone: frontend, stream, prefill queue, KV transfer."""
