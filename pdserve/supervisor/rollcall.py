"""Who of our processes has registered itself: that, and nothing else, makes one ready."""

from pdserve.messages import Instance
from pdserve.registry.view import View


class RollCall:
    def __init__(self, view: View, host: str) -> None:
        """`host` is this machine, as its instances call it: other machines have the same pids."""
        self._view = view
        self._host = host

    async def until(self, pid: int) -> Instance:
        """Wait until the process `pid` of this machine is in the registry."""
        async for _ in self._view.changes():
            for instance in self._view.instances():
                if instance.pid == pid and instance.host == self._host:
                    return instance
        raise AssertionError("the registry's changes never end")
