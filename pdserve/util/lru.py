"""A dict of bounded size."""

from collections import OrderedDict
from typing import TypeVar

T = TypeVar("T")


class LruDict(OrderedDict[str, T]):
    """Keeps the `capacity` keys that were set most recently."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def __setitem__(self, key: str, value: T) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._capacity:
            self.popitem(last=False)
