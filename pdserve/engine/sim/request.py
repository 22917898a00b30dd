"""One request inside the simulated engine."""

from dataclasses import dataclass, field

from pdserve.engine.base import Output
from pdserve.engine.sim import wire
from pdserve.messages import KvHandle


@dataclass(eq=False)
class SimRequest:
    request_id: str
    prompt: list[int]
    max_tokens: int
    kv: KvHandle | None = None
    """pull the prompt's KV from there"""
    keep: bool = False
    """a prefill: its blocks stay for the lease"""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """prompt tokens whose KV is here"""
    cached: int = 0
    pulled: int = 0
    tokens: list[int] = field(default_factory=list)
    salt: int = 0
    gone: bool = False
    """cancelled: the step that it is part of brings nothing for it"""

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.prompt)

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.max_tokens

    def output(self, handle: KvHandle | None) -> Output:
        """For the newest token."""
        raw = wire.CoreOutput(
            self.request_id,
            self.tokens[-1:],
            finish_reason=wire.LENGTH if self.finished else None,
            prefill_stats=self._stats() if len(self.tokens) == 1 else None,
        )
        recomputed = self.kv is not None and not self.pulled and len(self.tokens) == 1
        return Output(
            self.request_id, self.tokens[-1:], self.finished, handle, recomputed=recomputed, raw=raw
        )

    def _stats(self) -> wire.PrefillStats:
        reused = self.cached + self.pulled
        computed = len(self.prompt) - reused
        return wire.PrefillStats(len(self.prompt), computed, reused, self.cached, self.pulled, computed)
