"""A dict of bounded size."""

from collections import OrderedDict
from typing import TypeVar

T = TypeVar("T")


class LruDict(OrderedDict[str, T]):
    """Keeps the `bound` keys that were set last; a key that is set again counts as new."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self._bound = bound

    def __setitem__(self, key: str, value: T) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._bound:
            self.popitem(last=False)
