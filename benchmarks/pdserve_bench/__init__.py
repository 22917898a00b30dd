"""Chaos, soak, fuzz and performance benchmarks for pdserve. They ship beside the server, which never imports them.

Commands: `pdserve chaos`, `pdserve bench`, `pdserve compare`. Programs: `python -m pdserve_bench.soak` and `.fuzz`.
`client` and `endpoint` send requests, `graphs/` starts and watches graphs, `measure/` has loads, statistics and
reports, and `progress` logs what a benchmark does.
"""
