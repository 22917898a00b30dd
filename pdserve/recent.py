"""A bounded memory of what happened lately."""

from collections import OrderedDict
from typing import TypeVar

T = TypeVar("T")


class RecentKeys(OrderedDict[str, T]):
    """The newest `bound` keys, with values; the oldest are forgotten first. A key that is set again is the newest."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self._bound = bound

    def __setitem__(self, key: str, value: T) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._bound:
            self.popitem(last=False)
