"""Simulated engines for tests: small, fast, and used through the engine contract only."""

import json
from pathlib import Path

import msgspec

from pdserve.config.engine_args.installed import VLLM_VERSION
from pdserve.contract.records import Role
from pdserve.engine.base import Output
from pdserve.engine.fingerprint import fingerprint
from pdserve.engine.sim.engine import SimEngine
from pdserve.engine.sim.model import SimModel
from pdserve.engine.sim.wire import CoreOutputs, Sampling, write_request
from pdserve.engine.spec import EngineSpec

LOADED = fingerprint("demo", {"block-size": 16}, VLLM_VERSION)
"""Fingerprint of all engines of `spec`, unless their arguments change the model."""
FAST = {"prefill-rate": 1e6, "step-seconds": 0.001, "bandwidth": 1e12, "transfer-timeout": 5.0}


def expected(prompt: list[int], count: int) -> list[int]:
    """The tokens that any healthy engine generates."""
    return SimModel().answer(prompt, count)


def body(max_tokens: int = 4, **sampling: object) -> list[bytes]:
    return write_request(Sampling(max_tokens, **sampling))  # type: ignore[arg-type]


def decode_outputs(frames: list[bytes]) -> CoreOutputs:
    return msgspec.msgpack.decode(frames[0], type=CoreOutputs)


def spec(role: Role, name: str, **arguments: object) -> EngineSpec:
    simulated = {"lease", "bytes-per-token", "transfer-seconds", *FAST}
    speeds = FAST | {key: arguments.pop(key) for key in list(arguments) if key in simulated}
    return EngineSpec(
        role,
        name,
        "demo",
        engine_args={"block-size": 16, "additional-config": {"sim": speeds}}
        | {key.replace("_", "-"): value for key, value in arguments.items()},
    )


def sim(role: Role, name: str, **arguments: object) -> SimEngine:
    return SimEngine(spec(role, name, **arguments))


async def collect(engine: SimEngine, request_id: str) -> list[Output]:
    """All outputs of one request. Outputs of other requests are dropped."""
    outputs: list[Output] = []
    while not outputs or not outputs[-1].finished:
        outputs += [output for output in (await engine.step()).outputs if output.request_id == request_id]
    return outputs


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def generated(prompt: list[int], count: int, adapter: int) -> list[int]:
    """The tokens that a simulated engine generates with this LoRA adapter; 0: without one."""
    return SimModel().answer(prompt, count, adapter)


def adapter_in(at: Path, name: str) -> Path:
    """Write an adapter for simulated engines, and return its folder."""
    (at / name).mkdir(exist_ok=True)
    (at / name / "adapter_config.json").write_text(json.dumps({"name": name}))
    return at / name
