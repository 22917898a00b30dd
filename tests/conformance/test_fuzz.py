"""Requests that no client should send: no error that one vLLM server would not give, and nothing is left of them. The
long forms are `make fuzz` and, with simulated engines, tests/soak/test_soak.py."""

from pathlib import Path

import pytest
from pdserve_bench.fuzz.fuzzer import Fuzzer
from pdserve_bench.fuzz.nasties import nasties, unfinished

from pdserve.supervisor import state
from tests.e2e.graph import RealGraph
from tests.real import KEY, Reference


@pytest.mark.engines
@pytest.mark.timeout(600)
async def test_real_engines_are_hard_to_upset(
    graph: RealGraph, vllm_server: Reference, tmp_path: Path
) -> None:
    record = state.read(graph.state_dir)
    assert record is not None
    fuzzer = Fuzzer(record, graph.state_dir / "logs")
    async with fuzzer.watching():
        await fuzzer.run(nasties("demo"), 4)
        await fuzzer.run(unfinished(nasties("demo"), seed=5), 16)
    await fuzzer.forgive(vllm_server.url, {"authorization": f"Bearer {KEY}"})
    told = [
        f"{finding.what}\n{finding.request and finding.request.curl(graph.url, tmp_path)}"
        for finding in fuzzer.report.findings
    ]
    assert not told, "\n".join(told)
    assert fuzzer.report.canaries > 5
