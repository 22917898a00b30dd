"""`pdserve compare --clients`: latency and throughput by the number of clients, beside plain vLLM."""
