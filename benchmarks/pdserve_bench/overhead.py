"""What the graph costs over one bare engine, at concurrency 1: TTFT, resident memory, idle CPU.

    python -m pdserve_bench.overhead [--rounds 15] [--prompt-words 300] [--json FILE]

Both servers run side by side on this machine: a plain vLLM API server (the baseline) and `pdserve serve` with one
decode and one prefill worker, same model, same engine arguments. Requests alternate between them, never two at a time,
with a pause longer than vLLM's one-second spin after each message, so that neither pays for the other. Ratios are
taken pair by pair and the median is reported.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil

from pdserve.demo import MODEL_DIR
from pdserve.ports import free_port

_YAML = """
Graph: {{kv-port: {kv_port}}}
Common: {{model: demo, block-size: 32, max-model-len: 4096}}
Frontend: {{served_model_name: demo, port: {port}}}
VllmWorker:
  remote-prefill: true
  max-local-prefill-length: 64
  common-configs: [model, block-size, max-model-len]
PrefillWorker:
  common-configs: [model, block-size, max-model-len]
"""
_ENGINE = ["--block-size", "32", "--max-model-len", "4096", "--enforce-eager", "--served-model-name", "demo"]
_SPIN = 1.2  # seconds; vLLM's workers spin for one second after a message


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompt-words", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-overhead-")))
        bare, _ = stack.enter_context(_bare_engine(folder))
        graph, pid = stack.enter_context(_graph(folder))
        report = {
            "ttft": _compare(bare, graph, args.rounds, args.prompt_words),
            "processes": _processes(pid, seconds=20.0),
        }
    _print(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2))


@contextmanager
def _bare_engine(folder: Path) -> Iterator[tuple[str, int]]:
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    port = free_port("127.0.0.1")
    command = [
        "vllm.entrypoints.launchers.api_server.entry",
        "--model",
        str(MODEL_DIR),
        "--port",
        str(port),
        *_ENGINE,
    ]
    with _running([sys.executable, "-m", *command], env, folder / "bare.log", port) as pid:
        yield f"http://127.0.0.1:{port}", pid


@contextmanager
def _graph(folder: Path) -> Iterator[tuple[str, int]]:
    port, yaml = free_port("127.0.0.1"), folder / "graph.yaml"
    yaml.write_text(_YAML.format(port=port, kv_port=free_port("127.0.0.1")))
    env = {"PDSERVE_STATE_DIR": str(folder / "state")}
    command = [sys.executable, "-m", "pdserve", "serve", "-f", str(yaml)]
    with _running(command, env, folder / "graph.log", port) as pid:
        yield f"http://127.0.0.1:{port}", pid


@contextmanager
def _running(command: list[str], env: dict[str, str], log: Path, port: int) -> Iterator[int]:
    """The process `command`, once a completion was answered on `port`; interrupted at the end."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT, process_group=0
        )
    try:
        until = time.monotonic() + 300
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{command[2:4]} did not come up:\n{log.read_text()[-3000:]}")
            time.sleep(1)
        yield process.pid
    finally:
        process.send_signal(2)
        process.wait(timeout=90)


def _answers(port: int) -> bool:
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 1}
    try:
        return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def _compare(bare: str, graph: str, rounds: int, words: int) -> dict[str, object]:
    """TTFT in seconds: medians of the bare engine, of local and of remote prefill, and the median ratios."""
    short, long = "word " * 20, "word " * words
    samples: dict[str, list[float]] = {"bare short": [], "local": [], "bare long": [], "remote": []}
    for number in range(rounds + 2):  # the first two warm up
        for name, url, text in (
            ("bare short", bare, short),
            ("local", graph, short),
            ("bare long", bare, long),
            ("remote", graph, long),
        ):
            ttft, prefill = _ttft(url, f"{number} {text}")
            if prefill and prefill != name:
                raise SystemExit(f"a prompt meant for {name} prefill went {prefill}")
            if number >= 2:
                samples[name].append(ttft)
            time.sleep(_SPIN)
    ratio = {
        "local / bare": _median_ratio(samples["local"], samples["bare short"]),
        "remote / bare": _median_ratio(samples["remote"], samples["bare long"]),
    }
    return {"seconds": {name: statistics.median(times) for name, times in samples.items()}, "ratio": ratio}


def _median_ratio(ours: list[float], baseline: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, baseline, strict=True))


def _ttft(url: str, prompt: str) -> tuple[float, str]:
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    first = None
    begin = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if first is None and line.startswith("data: {"):
                first = time.perf_counter() - begin
    if first is None:
        raise SystemExit(f"{url} answered without a token")
    return first, response.headers.get("x-pdserve-prefill", "")


def _processes(root: int, seconds: float) -> list[dict[str, object]]:
    """Resident memory and CPU share over `seconds` of idleness of every process of the graph."""
    parent = psutil.Process(root)
    family = [parent, *parent.children(recursive=True)]
    time.sleep(_SPIN)
    before = {p.pid: sum(p.cpu_times()[:2]) for p in family}
    time.sleep(seconds)
    rows: list[dict[str, object]] = []
    for process in family:
        spent = sum(process.cpu_times()[:2]) - before[process.pid]
        rss = process.memory_info().rss
        rows.append({"process": _label(process), "rss_mb": rss / 2**20, "cpu_percent": 100 * spent / seconds})
    return rows


def _label(process: psutil.Process) -> str:
    command = process.cmdline()
    words = command[command.index("pdserve") + 1 :] if "pdserve" in command else command
    return " ".join(Path(word).name if "/" in word else word for word in words)[:60] or process.name()


def _print(report: Mapping[str, object]) -> None:
    ttft, processes = report["ttft"], report["processes"]
    assert isinstance(ttft, dict)
    assert isinstance(processes, list)
    print(f"\n{'TTFT, concurrency 1':<28}{'median ms':>10}")
    for name, value in ttft["seconds"].items():
        print(f"  {name:<26}{1000 * value:>10.1f}")
    for name, value in ttft["ratio"].items():
        print(f"  {name:<26}{value:>10.2f}x")
    print(f"\n{'process':<62}{'RSS MiB':>9}{'idle CPU %':>12}")
    for row in processes:
        print(f"{row['process']:<62}{row['rss_mb']:>9.0f}{row['cpu_percent']:>12.1f}")


if __name__ == "__main__":
    main()
