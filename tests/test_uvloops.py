import asyncio
import os
import signal
import threading

import pytest

from tests.uvloops import Loop


def test_a_test_that_hangs_is_ended_by_its_timeout(caplog: pytest.LogCaptureFixture) -> None:
    async def hangs() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        await asyncio.sleep(60)

    # as pytest-timeout's handler of SIGALRM
    before = signal.signal(signal.SIGUSR2, lambda *_: pytest.fail("too long"))
    try:
        with asyncio.Runner(loop_factory=Loop) as runner, pytest.raises(asyncio.CancelledError):
            runner.run(hangs())
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert "too long" in caplog.text
