"""Progress lines on stderr, with the time of day."""

import sys
import time

from pdserve.util import clock


def say(text: str) -> None:
    now = time.strftime("%H:%M:%S", time.localtime(clock.unix()))
    print(f"{now}  {text}", file=sys.stderr, flush=True)


def begin(phase: str, seconds: float) -> None:
    """Log that a phase begins and about how long it takes."""
    say(f"{phase}, about " + (f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"))
