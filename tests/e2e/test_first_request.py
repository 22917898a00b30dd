"""A stranger's first minute: `configs/local.yaml` in the dtype that it has by default, and a long prompt as the very
first request, sent to a prefill worker by a threshold: an idle decode worker would compute it.
(The other end-to-end tests run in float32, for the sake of exact tokens.)"""

from pathlib import Path

import httpx
import pytest

from pdserve.ports import free_port
from tests.e2e.graph import serving
from tests.e2e.test_graph import chat

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

LOCAL = Path(__file__).parents[2] / "configs/local.yaml"


def test_the_very_first_request_is_prefilled_remotely(tmp_path: Path) -> None:
    yaml, kv_port = LOCAL.read_text(), free_port("127.0.0.1", 2)
    assert "port: 8000" in yaml
    assert "dtype" not in yaml
    assert "policy: adaptive" in yaml
    yaml = yaml.replace("policy: adaptive", "max-local-prefill-length: 64")
    yaml = yaml.replace("port: 8000", f"port: {free_port('127.0.0.1')}")
    with serving(f"Graph:\n  kv-port: {kv_port}\n{yaml}", tmp_path) as graph:
        url = f"{graph.url}/v1/chat/completions"
        response = httpx.post(url, json=chat("What is the code of the red box?"), timeout=120)
        assert response.status_code == 200
        assert response.headers["x-pdserve-prefill"] == "remote"
        assert "4711" in response.json()["choices"][0]["message"]["content"]
        metrics = graph.metrics()
        assert metrics("pdserve_warm_ups_total", result="ok") == 1
        assert metrics("pdserve_remote_prefill_failures_total") == 0
        # bfloat16, where attention uses AMX on a CPU that has it: two bytes, in whole blocks
        moved = metrics("pdserve_kv_transfer_bytes_total")
        tokens = response.json()["usage"]["prompt_tokens"]
        blocks = -(-tokens // 32) + 2  # the warm-up's two
        assert moved == blocks * 32 * 2 * 4 * 2 * 64 * 2
