"""What processes have spent."""

import os
import subprocess
import sys
import time

from pdserve_bench.cpu import CpuMeter


def test_a_meter_reads_what_was_spent_in_between() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            meter = CpuMeter([child.pid, os.getpid()])
            before = meter.read()
            while meter.read() - before < 0.3:
                time.sleep(0.05)
        finally:
            child.kill()
    assert meter.read() - before >= 0.3, "the child has ended, but what it spent stays"
