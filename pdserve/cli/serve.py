"""`pdserve serve`."""

from pdserve.cli.options import File, LogFormat, Verbose


def serve(file: File, log_format: LogFormat = "text", verbose: Verbose = False) -> int:
    """Run the whole graph of FILE on this machine until Ctrl-C: a NATS and an etcd where the file names none,
    frontends, decode workers and prefill workers. What cannot work is said before anything starts (exit code 2).
    A process that crashes is started again, for ever, and `pdserve status` and /health say which; only where no process
    of its kind was ever ready, everything is stopped with the cause (exit code 1, or 2 for a wrong configuration).

    examples:
      pdserve serve -f configs/local.yaml               on the CPU, with the bundled demo model
      pdserve serve -f configs/disagg.yaml              two workers on two GPUs each
      pdserve serve -f configs/local.yaml --log-format json 2> pdserve.jsonl
    """
    from pdserve.config.load import load
    from pdserve.plan.machine import Machine
    from pdserve.plan.plan import make_plan
    from pdserve.supervisor.serve import serve as run_graph

    return run_graph(make_plan(load(file), Machine.detect()), log_format, verbose)
