"""Hostile requests get only errors that one vLLM server also gives, and leave nothing behind. Longer runs are `make
fuzz` and, with simulated engines, tests/soak/test_soak.py."""

from dataclasses import replace
from pathlib import Path

import pytest
from pdserve_bench.fuzz.corpus import hostile_requests, streamed, unfinished
from pdserve_bench.fuzz.fuzzer import Fuzzer, FuzzFinding, send

from pdserve.supervisor import state
from tests.e2e.graph import RealGraph
from tests.real import KEY, Reference


async def fails_there_too(finding: FuzzFinding, vllm: str) -> bool:
    """Whether this vLLM server also responds with a 5xx."""
    if finding.request is None or finding.status < 500:
        return False
    headers = {**finding.request.headers, "authorization": f"Bearer {KEY}"}
    return (await send(vllm, replace(finding.request, headers=headers))).status >= 500


@pytest.mark.engines
@pytest.mark.timeout(600)
async def test_hostile_requests_do_not_break_real_engines(
    graph: RealGraph, vllm_server: Reference, tmp_path: Path
) -> None:
    record = state.read(graph.state_dir)
    assert record is not None
    fuzzer = Fuzzer(record, graph.state_dir / "logs")
    async with fuzzer.watching():
        await fuzzer.run(hostile_requests("demo"), 4)
        await fuzzer.run(streamed(hostile_requests("demo")), 4)
        await fuzzer.run(unfinished(hostile_requests("demo"), seed=5), 16)
    told = [
        f"{finding.what}\n{finding.request and finding.request.curl(graph.url, tmp_path)}"
        for finding in fuzzer.report.findings
        if not await fails_there_too(finding, vllm_server.url)
    ]
    assert not told, "\n".join(told)
    assert fuzzer.report.canaries > 5
