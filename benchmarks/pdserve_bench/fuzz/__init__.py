"""`python -m pdserve_bench.fuzz`."""
