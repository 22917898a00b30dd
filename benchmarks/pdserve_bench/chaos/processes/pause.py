"""Pause a host with its clock, like a virtual machine during a snapshot or migration: a frontend and a decode worker
stop, and see no time pass. When they continue, other processes have freed and reused what was held for these two.

Every process of the graph preloads a library that subtracts the nanoseconds in the process's file from CLOCK_MONOTONIC,
and adds them to absolute times passed to the kernel.
"""

import asyncio
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from pdserve_bench.chaos.processes.faults import Harm, Target, Victim, find, injected
from pdserve_bench.chaos.processes.network_cut import Cannot
from pdserve_bench.chaos.questions import simulated
from pdserve_bench.chaos.scene import Fault, Scene

FOLDER = "PDSERVE_STOPPED_CLOCKS"
"""Environment variable: the folder of the processes' files, named by process id."""
PAUSE_SECONDS, SIMULATED_PAUSE_SECONDS = 40.0, 16.0
"""Seconds of the pause: longer than the KV leases of real and of simulated engines."""
BURST = 16
BURST_LEAD = 0.25
"""Seconds from the burst to the pause, so that prefill results arrive during the pause."""
_LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static volatile long long *stood;
static void begin(void) {  /* a forked process continues its parent's clock */
    char path[4096];
    long long before = stood ? *stood : 0;
    const char *folder = getenv("PDSERVE_STOPPED_CLOCKS");
    if (!folder) return;
    snprintf(path, sizeof path, "%s/%d", folder, getpid());
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (pwrite(file, &before, sizeof before, 0) == sizeof before) {
        void *at = mmap(0, sizeof *stood, PROT_READ, MAP_SHARED, file, 0);
        if (at != MAP_FAILED) stood = at;
    }
    close(file);
}
__attribute__((constructor)) static void start(void) {
    begin();
    pthread_atfork(0, 0, begin);
}
static struct timespec moved(clockid_t clock, const struct timespec *when, int sign) {
    int steady = clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_RAW || clock == CLOCK_MONOTONIC_COARSE;
    long long by = steady && stood ? sign * *stood : 0;
    long long at = when->tv_sec * 1000000000LL + when->tv_nsec + by;
    return (struct timespec){at / 1000000000LL, at % 1000000000LL};
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed) *now = moved(clock, now, -1);
    return failed;
}
int sem_clockwait(sem_t *lock, clockid_t clock, const struct timespec *until) {
    int (*real)(sem_t *, clockid_t, const struct timespec *) = dlsym(RTLD_NEXT, "sem_clockwait");
    struct timespec then = moved(clock, until, 1);
    return real(lock, clock, &then);
}
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    int (*real)(clockid_t, int, const struct timespec *, struct timespec *) = dlsym(RTLD_NEXT, "clock_nanosleep");
    struct timespec then = flags & TIMER_ABSTIME ? moved(clock, until, 1) : *until;
    return real(clock, flags, &then, left);
}
"""


def stoppable(folder: Path) -> dict[str, str]:
    """Return the variables of a graph whose clocks can stop; empty without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return {}
    folder.mkdir()
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return {"LD_PRELOAD": str(library), FOLDER: str(folder)}


def stand_still(folder: Path, groups: Sequence[int], nanoseconds: int) -> int:
    """Set back the clocks of all processes of these groups; return the number of processes."""
    files = [file for file in folder.iterdir() if file.name.isdigit() and _group(int(file.name)) in groups]
    for file in files:
        with file.open("r+b") as stood:
            (before,) = struct.unpack("q", stood.read(8))
            stood.seek(0)
            stood.write(struct.pack("q", before + nanoseconds))
    return len(files)


def _group(process: int) -> int:
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return 0


async def pause(scene: Scene, victims: Sequence[Victim], seconds: float) -> None:
    """Pause the victims and their clocks, with requests in flight. Raises Cannot."""
    folder = scene.running.state_dir.parent / "clocks"
    groups = [victim.group for victim in victims]
    if not folder.exists() or not stand_still(folder, groups, 0):
        raise Cannot("the clocks cannot be stopped: name the fault with --only and install a C compiler")
    scene.load.join(BURST)
    await asyncio.sleep(BURST_LEAD)
    async with injected(Harm.HANG, victims, scene.running.graph.pid, scene.running.state_dir):
        began = time.monotonic_ns()
        for _ in range(int(seconds)):
            await asyncio.sleep(1)
            scene.load.join(2)  # half of the earlier clients wait for the paused frontend
        stand_still(folder, groups, time.monotonic_ns() - began)


async def _play(scene: Scene) -> float | None:
    instances, supervisor = await scene.watch.instances(), scene.running.graph.pid
    targets = (Target.FRONTEND, Target.DECODE)
    victims = [find(target, scene.turn, instances, supervisor)[0][0] for target in targets]
    scene.victims += [victim.name for victim in victims]
    scene.say(f"{' and '.join(scene.victims)}, {len(scene.load.running)} requests in flight")
    await pause(scene, victims, SIMULATED_PAUSE_SECONDS if simulated(scene.config) else PAUSE_SECONDS)
    return await scene.recovery()


HOST_PAUSE = Fault(
    "host-pause",
    f"a frontend and a decode worker pause with their clocks for {PAUSE_SECONDS:g} s "
    f"(simulated: {SIMULATED_PAUSE_SECONDS:g} s)",
    _play,
    ("pause",),
    adds={"PrefillWorker": {"num-gpu-blocks-override": 200}},  # freed blocks are soon reused
)
