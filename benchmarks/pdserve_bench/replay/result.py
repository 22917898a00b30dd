"""The result of a replay: figures of the whole run, and the server over time."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pdserve_bench.client import Exchange, Outcome
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.measure.report import Cell, Column, Report, Rows
from pdserve_bench.measure.runs import Arrival, LoadRun, OpenLoop, cached_share, latency_rows
from pdserve_bench.measure.samples import percentile
from pdserve_bench.measure.slo import Slo
from pdserve_bench.progress import say
from pdserve_bench.replay.sample import Sample

_PROGRESS = 10.0
_LATE = 0.05
"""Seconds. A note tells if 1 % of the requests were sent with a longer delay."""
_WIDTH = 50
"""Windows of time in the plot, each one character."""
_BARS = " ▁▂▃▄▅▆▇█"
_SHOWN_ERRORS = 5


@dataclass
class ReplayResult:
    endpoint: Endpoint
    arrivals: Sequence[Arrival]
    slo: Slo
    described: str
    """The trace in one line."""
    timeout: float
    """Seconds for each request."""
    samples: list[Sample] = field(default_factory=list)
    """Empty if the server is not a graph of pdserve."""
    run: LoadRun = field(default_factory=LoadRun)

    @property
    def seconds(self) -> float:
        """Seconds until the last request is sent."""
        return self.arrivals[-1][0]

    @property
    def finished(self) -> list[Exchange]:
        return self.run.of(Outcome.FINISHED)

    async def measure(self) -> None:
        """Send the requests and wait for their responses. If cancelled, `run` keeps what was sent."""
        progress = asyncio.create_task(self._progress())
        try:
            await OpenLoop(self.arrivals, self.seconds, self.timeout).run(self.endpoint, self.run)
        finally:
            progress.cancel()

    async def _progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS)
            ttfts = [each.ttft for each in self.run.exchanges if each.ttft is not None]
            failed = len(self.run.of(Outcome.FAILED))
            say(
                f"{self.run.seconds:.0f} of {self.seconds:.0f} s: sent {len(self.run.exchanges):,} of "
                f"{len(self.arrivals):,}, finished {len(self.finished):,}, failed {failed:,}; TTFT p50 "
                f"{1000 * percentile(ttfts, 0.5):.0f} ms, p99 {1000 * percentile(ttfts, 0.99):.0f} ms"
            )

    def report(self, complete: bool = True) -> Report:
        figures = self.run.summary(self.slo)
        return Report(
            f"Replay at {self.endpoint.model}, {self.endpoint.url}",
            f"{figures['requests']:.0f} requests: {figures['finished']:.0f} finished, {figures['failed']:.0f} failed, "
            f"{figures['unfinished']:.0f} unfinished. {100 * figures['kept']:.1f} % kept the SLO ({self.slo}): "
            f"{figures['goodput']:.2f} requests/s.",
            [latency_rows(figures), self._over_time()] if self.finished else [],
            [self.described, *self._notes(figures)],
            complete,
            {
                "figures": {**figures, "cached": cached_share(self.finished)},
                "requests": [self._raw(each) for each in self.run.exchanges],
                "samples": [{**asdict(each), "at": each.at - self.run.began} for each in self.samples],
            },
        )

    def _over_time(self) -> Rows:
        """Return one row per quantity: its largest value, and a bar for each window of time."""
        began, ended = self.run.began, self.run.ended or time.monotonic()
        width = (ended - began) / _WIDTH

        def windows(items: Iterable[Any], moment: Callable[[Any], float]) -> list[list[Any]]:
            found: list[list[Any]] = [[] for _ in range(_WIDTH)]
            for item in items:
                found[min(_WIDTH - 1, int((moment(item) - began) / width))].append(item)
            return found

        sent = windows(self.run.exchanges, lambda each: each.started)
        done = [[each for each in window if each.outcome is Outcome.FINISHED] for window in sent]
        samples = windows(self.samples, lambda each: each.at)
        rows = [
            _row("requests/s", [len(window) / width for window in sent]),
            *(
                _row(f"TTFT p{100 * share:g}, ms", [1000 * _ttft(window, share) for window in done])
                for share in (0.5, 0.99)
            ),
            _row("longest gap p90, ms", [1000 * _gap(window) for window in done]),
        ]
        if cached_share(self.finished) is not None:
            rows.append(_row("prefix hits, %", [100 * (cached_share(window) or 0.0) for window in done]))
        if self.samples:
            rows.append(
                _row(
                    "queued prefills",
                    [max((each.queued for each in window), default=0) for window in samples],
                )
            )
            for role in ("decode", "prefill"):
                usage = [[getattr(each, f"{role}_kv") for each in window] for window in samples]
                shares = [100 * max(window, default=0.0) for window in usage]
                rows.append(_row(f"KV blocks in use, {role}, %", shares))
        return Rows(
            f"Over time, by when a request was sent: a column is {width:.3g} s",
            [Column("figure"), Column("largest", ".4g"), Column(f"0 to {ended - began:.0f} s")],
            rows,
        )

    def _notes(self, figures: dict[str, float]) -> list[str]:
        notes = []
        if (cached := cached_share(self.finished)) is not None:
            notes.append(f"Prefix hits: {100 * cached:.1f} % of the prompt tokens.")
        elif self.finished:
            notes.append(
                "The server does not report prefix hits: set `enable-prompt-tokens-details: true` in `Processor`."
            )
        sent = zip(self.run.exchanges, self.arrivals, strict=False)  # after Ctrl-C some were not sent
        late = [each.started - self.run.began - due for each, (due, _) in sent]
        if (own := percentile(late, 0.99)) > _LATE:
            notes.append(
                f"Requests were sent late, by {own:.2f} s (p99): the load generator needs more CPU, or another machine."
            )
        return notes + [
            f"{count} requests failed: {text}" for text, count in self.run.errors()[:_SHOWN_ERRORS]
        ]

    def _raw(self, each: Exchange) -> dict[str, Any]:
        return {
            "id": each.request_id,
            "sent": round(each.started - self.run.began, 4),
            "ttft": each.ttft,
            "whole": each.ended - each.started if each.ended else None,
            "longest_gap": max(each.gaps, default=None),
            "outcome": each.outcome.value,
            **{
                name: getattr(each, name)
                for name in (
                    "prompt_tokens",
                    "cached_tokens",
                    "output_tokens",
                    "prefill",
                    "instance",
                    "error",
                )
            },
        }


def _ttft(window: Sequence[Exchange], share: float) -> float:
    return percentile([each.ttft for each in window if each.ttft is not None], share)


def _gap(window: Sequence[Exchange]) -> float:
    return percentile([max(each.gaps) for each in window if each.gaps], 0.9)


def _row(name: str, values: Sequence[float]) -> list[Cell]:
    top = max(values)
    bars = (_BARS[math.ceil((len(_BARS) - 1) * value / top) if top else 0] for value in values)
    return [name, top, "".join(bars)]
