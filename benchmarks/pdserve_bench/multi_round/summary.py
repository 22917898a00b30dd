"""The report of a multi-round QA run."""

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from pdserve.util import clock
from pdserve_bench.client import Outcome
from pdserve_bench.endpoint import Endpoint
from pdserve_bench.measure.report import Cell, Column, Report, Rows
from pdserve_bench.measure.runs import LoadRun, latency_rows
from pdserve_bench.measure.samples import percentile
from pdserve_bench.multi_round.workload import MultiRound, Question

_LATE = 0.05
"""Seconds of this program's own delay (p99) above which the report warns."""
_HELD = 0.01
"""The report mentions questions that waited for a late response (`Question.held`) if their share is above this."""
_SHOWN_ERRORS = 5
_RAW = ("user", "round", "prompt_tokens", "cached_tokens", "output_tokens", "prefill", "error")


@dataclass
class MultiRoundResult:
    load: MultiRound
    endpoint: Endpoint
    run: LoadRun

    @property
    def finished(self) -> list[Question]:
        return [question for question in self.questions if question.outcome is Outcome.FINISHED]

    @property
    def questions(self) -> list[Question]:
        return [exchange for exchange in self.run.exchanges if isinstance(exchange, Question)]

    def lines(self) -> list[tuple[str, str]]:
        """Return names and values as multi-round-qa prints them. Rates count from the first question to the last
        response. Unlike in multi-round-qa, failed requests do not count as in flight."""
        run, finished, figures = self.run, self.finished, self.run.summary()
        none = "" if finished else "none"
        begin = min((question.started for question in finished), default=run.began)
        end = max((question.ended for question in finished), default=run.closes)
        took = max(1e-9, end - begin)
        inputs = sum(question.prompt_tokens for question in finished) / took
        outputs = sum(question.output_tokens for question in finished) / took
        unix = clock.unix() - time.monotonic()
        speed, ttft = figures["tokens/s per request"], figures["TTFT mean"]
        return [
            ("QPS", f"{self.load.qps:.4f} reqs/s"),
            ("Processing speed", f"{len(finished) / took:.4f} reqs/s"),
            ("Requests on-the-fly", f"{figures['unfinished']:.0f}"),
            ("Input tokens per second", f"{inputs:.4f} tokens/s"),
            ("Output tokens per second", f"{outputs:.4f} tokens/s"),
            ("Average generation throughput (per request)", none or f"{speed:.4f} tokens/req/s"),
            ("Average TTFT", none or f"{ttft:.4f}s"),
            ("Time range", f"{unix + begin:.3f} - {unix + end:.3f} ({took:.2f}s)"),
        ]

    def report(self, complete: bool = True) -> Report:
        load, figures = self.load, self.run.summary()
        report = Report(
            f"Multi-round QA: {load.num_users} users of {load.num_rounds} rounds at {self.endpoint.model}, "
            f"{self.endpoint.url}",
            self._lead(figures),
            complete=complete,
        )
        summary: list[list[Cell]] = [[name, value] for name, value in self.lines()]
        report.tables = [Rows("Performance summary", [Column("figure"), Column("value")], summary)]
        report.tables += [latency_rows(figures), self._rounds()] if self.finished else []
        report.notes = self._notes(figures)
        report.data = self._data(figures)
        return report

    def _lead(self, figures: dict[str, float]) -> str:
        if not self.questions:
            return "No question was asked."
        users = len({question.user for question in self.questions})
        return (
            f"{figures['requests']:.0f} requests of {users} users: {figures['finished']:.0f} finished, "
            f"{figures['failed']:.0f} failed, {figures['unfinished']:.0f} unfinished."
        )

    def _rounds(self) -> Rows:
        """Later rounds have prefix hits if the server has a prefix cache."""
        rows: list[list[Cell]] = []
        for number in sorted({question.round for question in self.questions}):
            asked = [question for question in self.questions if question.round == number]
            finished = [question for question in asked if question.outcome is Outcome.FINISHED]
            ttfts = [question.ttft for question in finished if question.ttft is not None]
            prompts = [question.prompt_tokens for question in finished if question.prompt_tokens]
            cached = [question.cached_tokens for question in finished if question.cached_tokens is not None]
            ways = [question.prefill for question in finished if question.prefill]
            rows.append(
                [
                    str(number),
                    len(asked),
                    len(finished),
                    statistics.fmean(prompts) if prompts else None,
                    100 * sum(cached) / sum(prompts) if cached and prompts else None,
                    100 * ways.count("remote") / len(ways) if ways else None,
                    *(1000 * percentile(ttfts, share) if ttfts else None for share in (0.5, 0.9)),
                ]
            )
        names = ("asked", "finished", "prompt tokens", "cached, %", "prefilled remotely, %")
        columns = [Column("round"), *(Column(name, ".0f") for name in names)]
        columns += [Column("TTFT p50, ms", ".1f"), Column("TTFT p90, ms", ".1f")]
        return Rows("Rounds", columns, rows)

    def _notes(self, figures: dict[str, float]) -> list[str]:
        questions, finished, load = self.questions, self.finished, self.load
        if not questions:
            return []
        window = figures["window"]
        notes = [
            f"While questions were asked, for {window:.0f} s: {figures['requests/s']:.2f} requests/s were answered "
            f"of {figures['requests'] / window:.2f} that were asked; {load.rate:.2f} were planned. Seed {load.seed}.",
        ]
        held = [question.held for question in questions if question.held > 0]
        if len(held) > _HELD * len(questions):
            notes.append(
                f"{len(held)} of the questions were asked late, by {statistics.fmean(held):.1f} s on average, because "
                f"the answer before took longer than the {load.interval:g} s between two questions of a user: "
                "the server did not keep up."
            )
        if (own := percentile([question.late for question in questions], 0.99)) > _LATE:
            notes.append(
                f"This program was late itself, by {own:.2f} s (p99): times may be too long. "
                "Give it more of the machine, or a machine of its own."
            )
        if finished and not any(question.prompt_tokens for question in finished):
            notes.append(
                "The server tells no usage: input tokens are not known, and events with text count as output tokens."
            )
        notes += [f"{count} requests failed: {text}" for text, count in self.run.errors()[:_SHOWN_ERRORS]]
        lengths = [question.output_tokens for question in finished]
        if lengths and statistics.fmean(lengths) < 0.95 * load.answer_len:
            notes.append(
                f"Answers had {statistics.fmean(lengths):.0f} tokens on average, not {load.answer_len}: the server "
                "ends them itself (it does not take `ignore_eos`), or sends several tokens in an event."
            )
        return notes

    def _data(self, figures: dict[str, float]) -> dict[str, Any]:
        began = self.run.began
        return {
            "workload": {**asdict(self.load), "planned requests/s": self.load.rate},
            "figures": figures,
            "errors": self.run.errors(),
            "requests": [
                {
                    "id": each.request_id,
                    "asked": round(each.started - began, 4),
                    "ttft": _rounded(each.ttft),
                    "whole": _rounded(each.ended - each.started if each.ended else None),
                    "longest_gap": _rounded(max(each.gaps, default=None)),
                    "outcome": each.outcome.value,
                    **{name: getattr(each, name) for name in _RAW},
                }
                for each in self.questions
            ],
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
