"""The whole graph on a disk that runs full, and has space again."""

from pathlib import Path

from pdserve.ports import free_port
from tests.full_disk import MIB, small_disk
from tests.serving import FRONTEND, LONG, WORKERS, Serve, kv_ports, until


def test_a_graph_serves_on_a_full_disk_and_comes_back(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 256 * MIB) as disk:
        port = free_port("127.0.0.1")
        yaml = WORKERS.format(kv_port=kv_ports(), workers=1) + FRONTEND.format(port=port)
        serve = Serve(tmp_path, yaml, port=port)
        serve.env["PDSERVE_STATE_DIR"] = str(disk.path / "state")
        serve.start()
        try:
            until(lambda: "Try it:" in serve.text, serve)
            assert prefill(serve, "a") == "remote"
            disk.fill()
            assert {prefill(serve, f"full {number}") for number in range(5)} == {"remote"}
            disk.free()
            until(lambda: prefill(serve, "b") == "remote", serve)
            assert serve.process.poll() is None
            assert "Traceback" not in serve.text
        finally:
            serve.process.terminate()
            serve.process.wait(60)
    assert serve.process.returncode == 0


def prefill(serve: Serve, start: str) -> str:
    response, words = serve.chat(f"{start} {LONG}")
    assert response.status_code == 200
    assert words
    return str(response.headers["x-pdserve-prefill"])
