"""Which requests were cancelled lately."""

from collections import OrderedDict

_BOUND = 20_000


class Cancelled:
    """A bounded memory of ids; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()

    def add(self, request_ids: list[str]) -> None:
        for one in request_ids:
            self._ids[one] = None
            self._ids.move_to_end(one)
        while len(self._ids) > _BOUND:
            self._ids.popitem(last=False)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids
