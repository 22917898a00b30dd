"""Service level objectives (SLO): bounds that a request must keep to count for goodput."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from pdserve.config.load import load
from pdserve.contract.slo import NO_SLO, parse_duration
from pdserve.util.errors import ConfigError
from pdserve_bench.client import Exchange, Outcome

SHARE = 0.9
"""Share of requests that must keep the SLO, as in DistServe's goodput (OSDI 2024)."""


@dataclass(frozen=True)
class Slo:
    """Bounds of a request, in seconds."""

    ttft: float = 0.5
    gap: float = 0.06

    def __str__(self) -> str:
        return f"TTFT {1000 * self.ttft:g} ms, no gap over {1000 * self.gap:g} ms"

    def kept(self, exchange: Exchange) -> bool:
        """False for a failed or unfinished request."""
        finished = exchange.outcome is Outcome.FINISHED and exchange.ttft is not None
        return finished and not self.broke_ttft(exchange) and not self.broke_gap(exchange)

    def broke_ttft(self, exchange: Exchange, now: float | None = None) -> bool:
        """Whether the first token came too late, or is late at `now` (monotonic)."""
        if exchange.ttft is not None:
            return exchange.ttft > self.ttft
        return (exchange.ended or now or time.monotonic()) - exchange.started > self.ttft

    def broke_gap(self, exchange: Exchange) -> bool:
        """Whether two received tokens are too far apart; the current wait does not count."""
        return max(exchange.gaps, default=0.0) > self.gap


def read_slo(ttft: str | None, gap: str | None, file: Path | None = None) -> Slo:
    """Parse `--ttft` and `--gap`; defaults come from the graph's file. Raises ConfigError."""
    promised = load(file).slo if file is not None and None in (ttft, gap) else NO_SLO
    bounds, problems = [], []
    given = (("--ttft", ttft, promised.ttft or Slo.ttft), ("--gap", gap, promised.gap or Slo.gap))
    for option, text, default in given:
        try:
            bounds.append(default if text is None else parse_duration(text))
        except ValueError as error:
            problems.append(f"{option} {text}: {error}.")
    if problems:
        raise ConfigError(problems)
    return Slo(*bounds)


@dataclass(frozen=True)
class Tally:
    """Counts of requests by how they met an SLO; each request is counted once."""

    kept: int = 0
    ttft: int = 0
    """Broke only the bound of the TTFT."""
    gap: int = 0
    """Broke only the bound of the gaps."""
    both: int = 0
    failed: int = 0
    unfinished: int = 0
    """Interrupted before it had broken a bound."""

    @classmethod
    def of(cls, slo: Slo, exchanges: Iterable[Exchange], now: float) -> "Tally":
        """`now` (monotonic) is when unfinished requests were interrupted."""
        found = [_fate(slo, exchange, now) for exchange in exchanges]
        return cls(**{fate: found.count(fate) for fate in set(found)})

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def requests(self) -> int:
        return self.kept + self.missed + self.unfinished

    @property
    def missed(self) -> int:
        return self.ttft + self.gap + self.both + self.failed

    def describe(self) -> str:
        """Return what was broken, the most frequent first; empty if nothing was."""
        counts = {"TTFT": self.ttft + self.both, "gap": self.gap + self.both, "failed": self.failed}
        return ", ".join(
            f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]) if count
        )


def _fate(slo: Slo, exchange: Exchange, now: float) -> str:
    if exchange.outcome is Outcome.FAILED:
        return "failed"
    late = slo.broke_ttft(exchange, now) or (exchange.ttft is None and exchange.outcome is Outcome.FINISHED)
    waits = exchange.outcome is Outcome.UNFINISHED and bool(exchange.arrivals)
    gap = slo.broke_gap(exchange) or (waits and now - exchange.arrivals[-1] > slo.gap)
    if late or gap:
        return "both" if late and gap else "ttft" if late else "gap"
    return "kept" if exchange.outcome is Outcome.FINISHED else "unfinished"
