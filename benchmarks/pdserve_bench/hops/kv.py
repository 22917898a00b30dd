"""The KV hop: blocks out of one process's memory into another's, as engines move them, without engines.

On one host the baseline is a copy of as many bytes in as many pieces inside one process; over a link between two
network namespaces it is the rate of the line, and a plain TCP connection over the same link. Beside the speed: the
smallest transfer, the handshake of a fresh pair, the CPU time of both sides, many transfers at once, as under load."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from pdserve.kv.pool import PoolShape
from pdserve_bench.hops.kv_ends import CopyBlocks, Load, PullBlocks, ReceiveBytes
from pdserve_bench.hops.kv_pair import kv_pair
from pdserve_bench.hops.kv_report import Kind, KvCase, KvFigures, section
from pdserve_bench.hops.link import NetNamespace, NoNamespaces, bits_per_second, shaped_link
from pdserve_bench.hops.section import HopOptions, alternate
from pdserve_bench.progress import Schedule
from pdserve_bench.report import Report


@dataclass(frozen=True)
class KvLayout:
    name: str
    layers: int
    block_bytes: int
    """of one block in one layer"""

    def blocks(self, size: float) -> int:
        """Number of blocks that have about so many bytes."""
        return max(1, round(size / (self.layers * self.block_bytes)))

    def pool(self, blocks: int) -> PoolShape:
        """A pool with room for more than that, so that the blocks of a transfer lie apart."""
        return PoolShape(self.layers, round(1.25 * blocks) + 8, self.block_bytes)


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


async def measure(options: HopOptions, schedule: Schedule, plan: KvPlan = PLAN) -> AsyncIterator[Report]:
    """Raises EndLost, with the reason, where a process ended or the wrong bytes arrived."""
    figures = KvFigures(options.link, bits_per_second(options.link))
    for number in range(options.rounds):
        for layout in plan.layouts:
            with schedule.phase(_local(number, layout)):
                await _round(options, plan, layout, number, figures)
            yield section(figures)
    for number in range(options.rounds):
        if figures.no_link:
            schedule.cancel(_linked(number, options))
            continue
        with schedule.phase(_linked(number, options)):
            try:
                async with shaped_link(figures.rate) as link:
                    await _round(options, plan, plan.link_layout, number, figures, link)
            except NoNamespaces as error:
                figures.no_link = str(error)
        yield section(figures)


def _local(number: int, layout: KvLayout) -> str:
    return f"KV of {layout.name} between two processes, round {number + 1}"


def _linked(number: int, options: HopOptions) -> str:
    return f"KV over a link of {options.link}, round {number + 1}"


async def _round(
    options: HopOptions,
    plan: KvPlan,
    layout: KvLayout,
    number: int,
    figures: KvFigures,
    link: tuple[NetNamespace, NetNamespace] | None = None,
) -> None:
    """Measure one layout, on this host or over the link."""
    seconds, sizes, flight = options.seconds * _LOCAL, plan.sizes, plan.flight
    if link:
        line = figures.rate / 8
        seconds, sizes = options.seconds * _LINK, tuple(min(size, line) for size in plan.link_sizes)
        flight = min(plan.link_flight, line / 8)

    def case(blocks: int, in_flight: int = 1, smallest: bool = False) -> KvCase:
        pieces = layout.layers * blocks
        size = pieces * layout.block_bytes
        return KvCase(link is not None, layout.name, size, pieces, blocks, in_flight, smallest)

    single, each = list(dict.fromkeys(map(layout.blocks, sizes))), layout.blocks(flight)
    room = max(*single, max(plan.in_flight) * each)
    async with kv_pair(layout.pool(room), options.seed + number, link) as pair:
        figures.handshakes.setdefault((link is not None, layout.name), []).append(pair.handshake)
        alone = PullBlocks(1, seconds, look_every=0.0)
        figures.add(case(1, smallest=True), "KV", await pair.measure(alone))
        for blocks in single:
            baseline: Kind = "TCP" if link else "copy"
            commands: dict[Kind, Load] = {
                "KV": PullBlocks(blocks, seconds),
                "copy": CopyBlocks(blocks, seconds),
                "TCP": ReceiveBytes(case(blocks).size, seconds),
            }
            for kind in alternate("KV", baseline, number):
                figures.add(case(blocks), kind, await pair.measure(commands[kind]))
        for count in plan.in_flight:
            figures.add(case(each, count), "KV", await pair.measure(PullBlocks(each, seconds, count)))
