"""What breaks pdserve on purpose, and what measures it. Ships beside the server, which never needs it.

`pdserve chaos` is its command; `python -m pdserve_bench.soak`, `.fuzz`, `.overhead` and `.overload` are its programs.
`client` and `load` send requests, `launch` starts graphs, `watch` looks what they hold, `figures` computes.
"""
