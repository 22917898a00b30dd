"""Run the tests that failed beside others once more, each alone on the machine: `python -m tools.failed_alone`.

Many tests bound a time, and two of them at once, beside a dozen starting engines, can starve one for seconds. What
fails for that reason passes alone, each of `TIMES` times in its own process; what is broken does not. A test that only
passes here is named at the end, for it wants a bound that does not depend on the machine. After more than `MOST`
failures nothing is run: that is no accident.
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
