"""`python -m pdserve_bench.fuzz`: send hostile requests to every route."""
