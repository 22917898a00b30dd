"""Runs failed tests again, each alone on the machine: `python -m tools.failed_alone`.

Many tests have time limits, and can fail beside starting engines on a busy machine. Such a test passes alone, `TIMES`
times in its own process; a broken one does not. Tests that pass only here are listed at the end, because they need a
limit that does not depend on the machine. With more than `MOST` failures nothing is run again.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST, TIMES = 6, 3
FAILED = Path(".pytest_cache/v/cache/lastfailed")
"""where pytest keeps what failed in its last run"""


def main() -> int:
    failed = list(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if not 0 < len(failed) <= MOST or not all("::" in test for test in failed):
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
