"""What breaks pdserve on purpose, and what measures it. Ships beside the server, which never needs it.

`pdserve chaos`, `pdserve bench` and `pdserve compare` are its commands; `python -m pdserve_bench.soak` and `.fuzz` are
its programs. `client`, `endpoint` and `load` send requests, `launch`
start what is measured, `sections` makes one graph's file into another's, `runs`, `slo` and `samples` compute, `report`
and `progress` show, `watch` looks what a graph holds.
"""
