"""The CPU share of other programs, measured while another program uses the CPU."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
from pdserve_bench.measure.foreign_cpu import ForeignLoad

from tests.conditions import until

CORES = psutil.cpu_count() or 1
SPIN = "import time\nwhile time.process_time() < 1.0: pass\n"
DETACHED = f"import os, sys\nif os.fork(): os._exit(0)\n{SPIN}open(sys.argv[1], 'w')\n"
"""A program whose parent ends at once, so that process 1 or another ancestor adopts it."""


def busy() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.steal)


def own() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


async def test_only_work_of_other_programs_is_foreign(tmp_path: Path) -> None:
    began, machine, ours, measured, done = time.monotonic(), busy(), own(), ForeignLoad(), tmp_path / "done"
    subprocess.run([sys.executable, "-c", DETACHED, str(done)], check=True)  # noqa: ASYNC221
    subprocess.run([sys.executable, "-c", SPIN], check=True)  # noqa: ASYNC221
    while own() - ours < 2.0:
        pass
    await until(done.exists)
    share, elapsed = measured.share(), time.monotonic() - began
    assert share is not None
    assert 0.8 < share * CORES * elapsed < (busy() - machine) - (own() - ours) + 0.5
