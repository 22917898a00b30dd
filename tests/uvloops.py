"""uvloop for tests: a test that hangs on it still ends at its timeout."""

import asyncio
from typing import Any

import pytest
import uvloop


class Loop(uvloop.Loop):
    """pytest-timeout ends a test by an exception in a signal handler. uvloop treats that as a failed callback: it logs
    the exception and goes on waiting. This loop cancels the test."""

    def __init__(self) -> None:
        super().__init__()
        self._test: asyncio.Future[Any] | None = None
        self.set_exception_handler(lambda _, context: self._handle(context))

    def run_until_complete(self, future: Any) -> Any:
        self._test = asyncio.ensure_future(future, loop=self)
        return super().run_until_complete(self._test)

    def _handle(self, context: dict[str, Any]) -> None:
        self.default_exception_handler(context)
        if isinstance(context.get("exception"), pytest.fail.Exception) and self._test is not None:
            self._test.cancel()
