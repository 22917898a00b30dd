"""`python -m pdserve_bench.soak`: does a graph leak after thousands of requests that ended badly?"""
