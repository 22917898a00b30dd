"""Reruns failed tests, each alone on the machine: `python -m tools.failed_alone`.

A test with a time limit can fail because other tests start engines at the same time. Such a test is excused if it
passes `TIMES` times alone. With more than `MAX_FAILED` failures nothing is rerun.
"""

import json
import subprocess
import sys
from pathlib import Path

MAX_FAILED, TIMES = 6, 3
FAILED = Path(".pytest_cache/v/cache/lastfailed")
"""Where pytest saves the failed tests of its last run."""


def main() -> int:
    failed = list(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if not 0 < len(failed) <= MAX_FAILED or not all("::" in test for test in failed):
        print(f"{len(failed)} failed: not run again")
        return 1
    for test in failed:
        print(f"\n{test} failed beside other tests: alone, {TIMES} times", flush=True)
        for _ in range(TIMES):
            if code := subprocess.run(
                [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
            ).returncode:
                print(f"\nFAILED, alone too: {test}")
                return code
    print("\nFAILED BESIDE OTHER TESTS ONLY, passed alone:", *failed, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
