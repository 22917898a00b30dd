"""The screen of `pdserve status --watch`: what is wrong, what clients get, what each process and link does, the last
detours. `screen` is pure. Where there is no room for all, it shows what is broken, then what is busy."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve.observe.graph_state import (
    GraphState,
    Moment,
    decode_workers,
    detours,
    settings_changed,
    slot_name,
)
from pdserve.observe.problems import (
    DRAINING,
    NOW,
    READY,
    STARTING,
    Node,
    Problem,
    count,
    duration,
    nodes,
    problems,
)
from pdserve.records import Role
from pdserve.watch import MAX_TICKS, TICK, LinkState, Receipt

_LEVELS = {"bad": ("✗", "bold red"), "warn": ("!", "yellow"), "info": ("·", "cyan")}
_BARS = "▁▂▃▄▅▆▇█"
_TICKS_EACH = 4
"""in a column of a chart, at most: in a narrow terminal a chart goes back less far"""

Cell = str | Text


@dataclass(frozen=True)
class ListRow:
    cells: tuple[Cell, ...]
    rank: tuple[float, ...] = ()
    """where there is no room for all rows, those of the smallest rank are shown"""


@dataclass(frozen=True)
class ListPart:
    columns: tuple[str, ...]
    """the first names the rows; `>` before a name: aligned to the right; `*`: gets the room that is left"""
    rows: list[ListRow]

    def table(self, lines: int) -> Table:
        """At most `lines` high."""
        left_out = max(0, len(self.rows) - (lines - 1))
        rows = self.rows
        if left_out:
            left_out += 1
            rows = sorted(rows, key=lambda row: row.rank)[: len(rows) - left_out]
        made = Table(
            box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True, header_style="bold underline"
        )
        for name in self.columns:
            right, wide = name.startswith(">"), name.startswith("*")
            made.add_column(
                name.lstrip(">*"),
                justify="right" if right else "left",
                ratio=1 if wide else None,
                no_wrap=True,
                overflow="ellipsis",
            )
        for row in rows:
            made.add_row(*row.cells)
        if left_out:
            made.add_row(Text(f"and {left_out} more", "dim"))
        return made


def screen(state: GraphState, title: str, width: int, height: int, now: float) -> RenderableType:
    """`now`: Unix seconds. Pure."""
    found = nodes(state, now)
    wrong = problems(state, found)
    top = [_title(title, wrong, width), *_problems(wrong, max(1, height // 6))]
    charts = [*_charts(state.moments, width), _queue(state, found, width)]
    foot = _foot(state)
    sections = [_processes(found, width), _links(found, width), _detours(state, width)]
    if height >= 40:
        sections.append(requests(state.receipts, width))
    sections = [section for section in sections if section.rows]
    gap = [Text()] if height > 30 else []
    room = height - len(top) - len(charts) - 1 - len(gap) * (2 + len(sections))
    lines = share(room, [1 + len(section.rows) for section in sections])
    body = list[RenderableType]()
    for section, given in zip(sections, lines, strict=True):
        if given > 1:
            body += [section.table(given), *gap]
    return Group(*top, *gap, *charts, *gap, *body, foot)


def share(room: int, wanted: Sequence[int]) -> list[int]:
    """Divide the lines among sections: each gets what it wants, or else an equal share, the first section a double one.
    Pure."""
    given = [0] * len(wanted)
    turns = [*range(len(wanted))[:1], *range(len(wanted))]
    while short := [index for index in turns if given[index] < wanted[index]]:
        for index in short:
            if sum(given) >= room:
                return given
            given[index] += given[index] < wanted[index]
    return given


def spark(values: Sequence[float | None], width: int) -> str:
    """A chart one line high, from 0 to the highest value, blank for None. A column shows the highest of its values.
    Pure."""
    each = min(_TICKS_EACH, -(-MAX_TICKS // max(1, width)))
    starts = range(len(values) % each - each if len(values) % each else 0, len(values), each)
    columns = [
        max((value for value in values[max(0, start) : start + each] if value is not None), default=None)
        for start in starts
    ]
    highest = max((value for value in columns if value is not None), default=0.0)
    drawn = [
        " " if value is None else _BARS[int(value / highest * (len(_BARS) - 1)) if highest else 0]
        for value in columns
    ]
    return "".join(drawn).rjust(width)[max(0, len(drawn) - width) :]


def bar(part: float, width: int) -> Text:
    full = min(width, max(0, round(part * width)))
    style = "red" if part > 0.9 else "yellow" if part > 0.7 else "green"
    return Text.assemble(("█" * full, style), ("░" * (width - full), "dim"))


def _title(title: str, wrong: Sequence[Problem], width: int) -> Text:
    bad = sum(problem.level == "bad" for problem in wrong)
    word = Text(f"{len(wrong)} to look at", "bold red" if bad else "yellow")
    if not wrong:
        word = Text("all is well", "green")
    left = Text(f"pdserve  {title}", "bold", overflow="ellipsis", no_wrap=True)
    left.truncate(width - len(word) - 2, overflow="ellipsis", pad=True)
    return Text.assemble(left, "  ", word)


def _problems(wrong: Sequence[Problem], most: int) -> list[Text]:
    lines = []
    for problem in wrong[: most if len(wrong) <= most else most - 1]:
        line = problem_line(problem)
        line.no_wrap, line.overflow = True, "ellipsis"
        lines.append(line)
    if len(wrong) > most:
        lines.append(Text(f"and {len(wrong) - len(lines)} more", "dim"))
    return lines


def problem_line(problem: Problem) -> Text:
    sign, style = _LEVELS[problem.level]
    since = f" ({duration(problem.seconds)})" if problem.seconds is not None else ""
    return Text(f"{sign} {problem.text}{since}", style)


def state_style(node: Node) -> str:
    if node.state == READY:
        return ""
    return "yellow" if node.state in (DRAINING, STARTING) else "bold red"


def _charts(moments: Sequence[Moment], width: int) -> list[Text]:
    half = (width - 2) // 2

    def chart(name: str, values: Sequence[float | None], now: str) -> Text:
        return Text.assemble((f"{name:<11}", "bold"), (spark(values, half - 21), "cyan"), f"{now:>9} ")

    def latency(name: str, value: Callable[[Moment], float | None]) -> Text:
        """With the newest value of the last `NOW` ticks."""
        values = list(map(value, moments))
        known = [each for each in values[-NOW:] if each is not None]
        return chart(name, values, duration(known[-1]) if known else "-")

    def rate(name: str, value: Callable[[Moment], float]) -> Text:
        """With the mean of the last `NOW` ticks."""
        values = list(map(value, moments))
        now = fmean(values[-NOW:]) if values else None
        return chart(name, values, "-" if now is None else f"{now:,.0f}" if now >= 100 else f"{now:.1f}")

    pairs = [
        (latency("TTFT p50", lambda each: each.ttft_p50), latency("p95", lambda each: each.ttft_p95)),
        (latency("ITL  p50", lambda each: each.itl_p50), latency("p95", lambda each: each.itl_p95)),
        (rate("requests/s", lambda each: each.requests), rate("tokens/s", lambda each: each.tokens)),
    ]
    return [Text.assemble(left, "  ", right, no_wrap=True, overflow="crop") for left, right in pairs]


def _queue(state: GraphState, found: Iterable[Node], width: int) -> Text:
    line = sum(node.load.waiting for node in found if node.load and node.role is Role.FRONTEND)
    depth, limit = state.queue_depth, state.queue_limit
    parts = [Text("prefill queue ", "bold")]
    if limit:
        parts += [bar(depth / limit, min(20, width // 10)), Text(f" {depth} of {limit}")]
    else:
        parts.append(Text(f"{depth} (no limit)"))
    parts += [Text("   in line at frontends ", "bold"), Text(str(line))]
    for code, name, gap in (("429", "refused", "   "), ("5xx", "failed", "  ")):
        rates = [getattr(moment, name) for moment in state.moments]
        style = "red" if any(rates[-NOW:]) else ""
        parts += [Text(f"{gap}{code} ", "bold"), Text(f"{sum(rates) * TICK:.0f}", style)]
    if state.moments:
        parts.append(Text(f" in {duration(len(state.moments) * TICK)}", "dim"))
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _foot(state: GraphState) -> Text:
    models = [f"{name} ({count(number, 'decode worker')})" for name, number in decode_workers(state).items()]
    return Text(
        " · ".join(["q ends", *models, *settings_changed(state)]), "dim", overflow="ellipsis", no_wrap=True
    )


def _processes(found: Sequence[Node], width: int) -> ListPart:
    wide = width >= 120
    columns = ("process", "state", ">for", ">run", ">wait", "KV", "*")
    rows = []
    for node in found:
        style, load, about = state_style(node), node.load, _about(node)
        kv = Text()
        if load and node.role is not Role.FRONTEND:
            kv = Text.assemble(bar(load.kv_usage, 20 if wide else 8), f"{load.kv_usage:>5.0%}")
        counts = (str(load.running), str(load.waiting)) if load else ("?", "?") if node.instance else ("", "")
        since = duration(node.seconds) if node.seconds is not None else ""
        busy = (load.running + load.waiting if load else 0, load.kv_usage if load else 0.0)
        broken = style or about.style == "red"
        rank = (not broken, *(-each for each in busy))
        rows.append(
            ListRow((Text(node.name, style), Text(node.state, style), since, *counts, kv, about), rank)
        )
    return ListPart(columns, rows)


def _about(node: Node) -> Text:
    """What matters most beside the numbers."""
    if not node.up and node.why:
        return Text(node.why, "red")
    if down := [slot_name(link.to) for link in node.links if not link.up]:
        return Text(f"cannot reach {', '.join(down)}", "red")
    if node.restarts:
        return Text(f"restarted {count(node.restarts, 'time')}, last end: {node.why}")
    return Text(node.instance.model if node.instance else "", "dim")


def _links(found: Sequence[Node], width: int) -> ListPart:
    names = {node.instance.id: node.name for node in found if node.instance}
    rows = [
        _link(node, link, names.get(link.to, slot_name(link.to)), width)
        for node in found
        for link in sorted(node.links, key=lambda link: link.to)
    ]
    pulls = (">pulls",) if width >= 100 else ()
    return ListPart(("link", ">requests", ">round trip", ">KV pull", ">speed", *pulls, "*failures"), rows)


def _link(node: Node, link: LinkState, to: str, width: int) -> ListRow:
    style = "" if link.up else "bold red"
    parts = ["" if link.up else "down", str(link.failures or ""), link.failure]
    cells = (
        Text(f"{node.name} {'←' if link.kind == 'kv' else '→'} {to}", style),
        str(link.requests),
        duration(link.round_trip) if link.round_trip is not None else "",
        duration(link.pull_seconds) if link.pull_seconds is not None else "",
        f"{link.bytes_per_second / 1e6:,.3g} MB/s" if link.bytes_per_second else "",
        *((str(link.pulls) if link.kind == "kv" else "",) if width >= 100 else ()),
        Text(": ".join(filter(None, parts)), style or "yellow"),
    )
    return ListRow(
        cells, (link.up, -link.failures, -link.requests, -(link.pull_seconds or link.round_trip or 0.0))
    )


def _detours(state: GraphState, width: int) -> ListPart:
    """One row for all that are alike."""
    alike = defaultdict[tuple[str, str, str], list[tuple[float, Receipt]]](list)
    for age, hop, receipt in detours(state.receipts):
        alike[hop.name, slot_name(hop.instance), hop.why].append((age, receipt))
    rows = []
    for (name, where, why), found in alike.items():
        age, receipt = found[0]
        last, request = f"{duration(age)} ago", _short_id(receipt, width)
        rows.append(ListRow((Text(name, "yellow"), str(len(found)), last, where, why, request), (age,)))
    return ListPart(("detour", ">times", ">last", "where", "*why", "request"), rows)


def requests(receipts: Iterable[Receipt], width: int) -> ListPart:
    """The newest first."""
    times, tokens = ("status", ">took", ">TTFT"), (">prompt", ">cached", ">tokens")
    columns = ("request", ">came", *times, *tokens, "key", "prefill", "*at")
    rows = []
    for receipt in receipts:
        bad = receipt.status >= 500 or receipt.status == 429
        cells = (
            _short_id(receipt, width),
            f"{duration(receipt.age)} ago",
            Text("running", "cyan") if receipt.running else Text(str(receipt.status), "red" if bad else ""),
            duration(receipt.seconds),
            duration(receipt.ttft) if receipt.ttft is not None else "",
            str(receipt.prompt_tokens),
            str(receipt.cached_tokens),
            str(receipt.output_tokens),
            receipt.key,
            receipt.way if width >= 100 else receipt.prefill,
            " → ".join(map(slot_name, _places(receipt))),
        )
        rows.append(ListRow(cells, (receipt.age,)))
    return ListPart(columns, rows)


def _short_id(receipt: Receipt, width: int) -> str:
    """As much of the id as there is room for; `pdserve trace` takes the first characters, too."""
    return receipt.request_id if width >= 120 else receipt.request_id[:8]


def _places(receipt: Receipt) -> Iterable[str]:
    """The workers that had it, in order."""
    places = [hop.instance for hop in receipt.hops if hop.name in ("prefill", "decode") and hop.instance]
    return dict.fromkeys([*places, *receipt.instances])
