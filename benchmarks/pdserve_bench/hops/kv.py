"""The KV hop: blocks out of one process's memory into another's, as engines move them, without engines.

On one host the baseline is a copy of as many bytes in as many pieces inside one process; over a link between two
network namespaces it is the rate of the line, and a plain TCP connection over the same link. Beside the speed: the
smallest transfer, the handshake of a fresh pair, the CPU time of both sides, many transfers at once, as under load."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from pdserve.kv.pool import PoolShape
from pdserve_bench.hops.kv_ends import Command, CopyBlocks, PullBlocks, ReceiveBytes
from pdserve_bench.hops.kv_pair import KvPair, kv_pair
from pdserve_bench.hops.kv_report import Kind, KvCase, KvFigures, section
from pdserve_bench.hops.link import NetNamespace, NoNamespaces, bits_per_second, shaped_link
from pdserve_bench.hops.section import HopOptions, HopSection, alternate
from pdserve_bench.progress import Schedule


@dataclass(frozen=True)
class KvLayout:
    name: str
    layers: int
    block_bytes: int
    """of one block in one layer"""

    def blocks(self, size: float) -> int:
        """That have about so many bytes."""
        return max(1, round(size / (self.layers * self.block_bytes)))

    def pool(self, size: float) -> PoolShape:
        """With room for more than that, so that the blocks of a transfer lie apart."""
        return PoolShape(self.layers, self.blocks(1.25 * size) + 8, self.block_bytes)


DEMO = KvLayout("demo", 4, 2 * 2 * 64 * 2 * 32)
"""keys and values x KV heads x head size x bytes x tokens of a block: the demo model with blocks of 32 tokens"""
FOURTEEN_BILLION = KvLayout("14B", 40, 2 * 8 * 128 * 2 * 16)
"""Qwen3-14B with 16"""


@dataclass(frozen=True)
class KvPlan:
    """Sizes in bytes of a transfer."""

    layouts: tuple[KvLayout, ...] = (DEMO, FOURTEEN_BILLION)
    sizes: tuple[float, ...] = (1e6, 16e6, 256e6)
    in_flight: tuple[int, ...] = (4, 16)
    """transfers at once"""
    flight: float = 16e6
    link_layout: KvLayout = DEMO
    """that of the smaller pieces"""
    link_sizes: tuple[float, ...] = (1e6, 16e6)
    """less where the line takes more than a second for it"""
    link_flight: float = 1e6


PLAN = KvPlan()
_LOCAL, _LINK = 1 / 8, 1 / 4
"""of the seconds that a figure is given: these are steady sooner"""
_START = 3.0
"""seconds until a pair has connected"""
_CHECKS = 1.7
"""times the seconds of a figure: comparing before and after it"""


def phases(options: HopOptions, plan: KvPlan = PLAN) -> Mapping[str, float]:
    """Raises ConfigError."""
    bits_per_second(options.link)
    local = 1 + 2 * len(plan.sizes) + len(plan.in_flight)
    linked = 1 + 2 * len(plan.link_sizes) + len(plan.in_flight)
    own = {
        _local(number, layout): _START + _CHECKS * local * options.seconds * _LOCAL
        for number in range(options.rounds)
        for layout in plan.layouts
    }
    over = {
        _linked(number, options): _START + _CHECKS * linked * options.seconds * _LINK
        for number in range(options.rounds)
    }
    return own | over


async def measure(options: HopOptions, schedule: Schedule, plan: KvPlan = PLAN) -> AsyncIterator[HopSection]:
    """Raises EndLost, with the reason, where a process ended or the wrong bytes arrived."""
    figures = KvFigures(options.link, bits_per_second(options.link), options.delay)
    for number in range(options.rounds):
        for layout in plan.layouts:
            with schedule.phase(_local(number, layout)):
                await _on_this_host(options, plan, layout, number, figures)
            yield section(figures)
    for number in range(options.rounds):
        if figures.no_link:
            schedule.cancel(_linked(number, options))
            continue
        with schedule.phase(_linked(number, options)):
            try:
                async with shaped_link(figures.rate, options.delay) as link:
                    await _over_link(options, plan, link, number, figures)
            except NoNamespaces as error:
                figures.no_link = str(error)
        yield section(figures)


def _local(number: int, layout: KvLayout) -> str:
    return f"KV of {layout.name} between two processes, round {number + 1}"


def _linked(number: int, options: HopOptions) -> str:
    return f"KV over a link of {options.link}, round {number + 1}"


async def _on_this_host(
    options: HopOptions, plan: KvPlan, layout: KvLayout, number: int, figures: KvFigures
) -> None:
    seconds = options.seconds * _LOCAL
    largest = max(*plan.sizes, max(plan.in_flight) * plan.flight)
    async with kv_pair(layout.pool(largest), options.seed + number) as pair:
        figures.handshakes.setdefault((False, layout.name), []).append(pair.handshake)
        await _measure(pair, _case(layout, 1, smallest=True), seconds, number, figures)
        for blocks in dict.fromkeys(map(layout.blocks, plan.sizes)):
            await _measure(pair, _case(layout, blocks), seconds, number, figures, "copy")
        for count in plan.in_flight:
            case = _case(layout, layout.blocks(plan.flight), in_flight=count)
            await _measure(pair, case, seconds, number, figures)


async def _over_link(
    options: HopOptions,
    plan: KvPlan,
    link: tuple[NetNamespace, NetNamespace],
    number: int,
    figures: KvFigures,
) -> None:
    seconds = options.seconds * _LINK
    layout = plan.link_layout
    per_second = figures.rate / 8
    sizes = [min(size, per_second) for size in plan.link_sizes]
    flight = min(plan.link_flight, per_second / 8)
    largest = max(*sizes, max(plan.in_flight) * flight)
    async with kv_pair(layout.pool(largest), options.seed + number, link) as pair:
        figures.handshakes.setdefault((True, layout.name), []).append(pair.handshake)
        await _measure(pair, _case(layout, 1, over_link=True, smallest=True), seconds, number, figures)
        for blocks in dict.fromkeys(map(layout.blocks, sizes)):
            await _measure(pair, _case(layout, blocks, over_link=True), seconds, number, figures, "TCP")
        for count in plan.in_flight:
            case = _case(layout, layout.blocks(flight), over_link=True, in_flight=count)
            await _measure(pair, case, seconds, number, figures)


def _case(
    layout: KvLayout, blocks: int, *, over_link: bool = False, in_flight: int = 1, smallest: bool = False
) -> KvCase:
    pieces = layout.layers * blocks
    return KvCase(over_link, layout.name, pieces * layout.block_bytes, pieces, blocks, in_flight, smallest)


async def _measure(
    pair: KvPair, case: KvCase, seconds: float, number: int, figures: KvFigures, baseline: Kind | None = None
) -> None:
    read = PullBlocks(case.blocks, seconds, case.in_flight)
    if case.smallest:
        read = PullBlocks(case.blocks, seconds, look_every=0.0)
    commands: dict[str, Command] = {
        "KV": read,
        "copy": CopyBlocks(case.blocks, seconds),
        "TCP": ReceiveBytes(case.size, seconds),
    }
    order = alternate("KV", baseline, number) if baseline else ("KV",)
    for kind in order:
        figures.add(case, kind, await pair.measure(commands[kind]))
