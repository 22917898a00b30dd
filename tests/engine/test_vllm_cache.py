"""The prefix cache as seen by vLLM's KV events. Events of a real engine: `test_vllm_engine.py`."""

from typing import Any

import pytest

from pdserve.contract.prefixes import PromptImage, PromptNames
from pdserve.contract.records import Role
from pdserve.engine.spec import EngineSpec
from pdserve.engine.vllm import api
from pdserve.engine.vllm.cache import CacheMirror
from pdserve.engine.vllm.process import VllmProcess

PROMPT = list(range(33))


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **more: Any) -> api.BlockStored:
    return api.BlockStored(hashes, parent, tokens, 8, None, "GPU", more.pop("lora_name", None), **more)


def in_host(hashes: list[int]) -> api.BlockStored:
    """The event of blocks stored in host memory: it has no tokens, like OffloadingConnector's."""
    return api.BlockStored(hashes, None, [], 0, None, "CPU", None, group_idx=0)


def mirror(*events: object) -> CacheMirror:
    cache = CacheMirror()
    cache.prefixes.resize(100, 8)
    for event in events:
        cache._apply(event)
    return cache


@pytest.mark.parametrize(
    ("events", "salt", "hit"),
    [
        ([stored([1, 2], PROMPT[:16]), stored([3], PROMPT[16:24], 2)], None, 24),
        ([stored([1], PROMPT[:8]), stored([3], PROMPT[16:24], 2)], None, 8),  # its parent is not known
        ([stored([1, 2], PROMPT[:16]), api.BlockRemoved([2], "GPU")], None, 8),
        ([stored([1, 2], PROMPT[:16]), api.BlockRemoved([1], "GPU")], None, 0),
        ([stored([1], PROMPT[:8]), stored([1], PROMPT[:8]), api.BlockRemoved([1], "GPU")], None, 8),
        ([stored([1], PROMPT[:8]), api.BlockRemoved([1], "GPU", 1)], None, 8),
        ([stored([1], PROMPT[:8]), api.BlockRemoved([7], "GPU")], None, 8),
        ([stored([1], PROMPT[:8]), api.AllBlocksCleared()], None, 0),
        ([stored([1, 2], PROMPT[:16]), in_host([1, 2]), api.BlockRemoved([1, 2], "GPU")], None, 16),
        ([stored([1, 2], PROMPT[:16]), in_host([1]), api.BlockRemoved([1, 2], "GPU")], None, 8),
        ([stored([1], PROMPT[:8]), in_host([1]), api.BlockRemoved([1], "CPU")], None, 8),
        ([stored([1], PROMPT[:8]), api.BlockRemoved([1], "CPU")], None, 8),  # never in host memory
        ([stored([1], PROMPT[:8]), in_host([1]), in_host([1]), api.BlockRemoved([1], "CPU")], None, 8),
        ([in_host([1])], None, 0),  # its tokens are not known
        ([stored([1, 2], PROMPT[:16], extra_keys=[("salt",), None])], None, 0),
        ([stored([1, 2], PROMPT[:16], extra_keys=[("salt",), None])], "salt", 16),
        ([stored([1, 2], PROMPT[:16], extra_keys=[("salt",), None])], "other", 0),
        ([stored([1, 2], PROMPT[:16], extra_keys=[(("image", 0),), None])], None, 0),
        ([stored([1, 2], PROMPT[:16], extra_keys=[None, (("image", 0),)])], None, 8),
        ([stored([1, 2], PROMPT[:16], extra_keys=[None, ("embeddings",)])], None, 0),
        ([stored([1], PROMPT[:8], lora_name="7", extra_keys=[("7",)])], None, 0),
        ([stored([1], PROMPT[:8], group_idx=1)], None, 0),
        ([stored([1], PROMPT[:4])], None, 0),
        ([stored([1, 3], PROMPT[:24])], None, 0),  # some blocks in between are not kept
    ],
)
def test_events_change_the_known_prefixes(events: list[object], salt: str | None, hit: int) -> None:
    assert mirror(*events).prefixes.hit(PromptNames(PROMPT, salt)) == hit


def test_events_of_adapters_count_for_their_adapter() -> None:
    keys = [("7", "salt"), ("7",)]
    cache = mirror(
        stored([1, 2], PROMPT[:16], lora_name="7", extra_keys=keys),
        stored([3], PROMPT[16:24], 2, lora_name="7", extra_keys=[("7",)]),
        stored([4], PROMPT[:8], lora_name="a", extra_keys=[("a",)]),
    )
    hits = [("salt", 7, 24), (None, 7, 0), ("salt", 0, 0), (None, 10, 8), ("salt", 10, 0), (None, 0, 0)]
    for salt, adapter, hit in hits:
        assert cache.prefixes.hit(PromptNames(PROMPT, salt, adapter)) == hit


def test_blocks_only_in_host_memory_are_no_hit_in_the_cache() -> None:
    events = [stored([1, 2], PROMPT[:16]), in_host([1, 2]), api.BlockRemoved([2], "GPU")]
    assert mirror(*events).prefixes.hit(PromptNames(PROMPT, None), host=False) == 8
    cache = mirror(*events, api.BlockRemoved([1], "GPU"), api.BlockRemoved([1, 2], "CPU"))
    assert (cache._blocks, cache.prefixes.known()) == ({}, [])


def test_events_of_images_count_for_prompts_with_them() -> None:
    """`red` has the tokens 4 to 11, `blue` 13 and 14."""
    extra = [[["red", 4], "salt"], [["red", -4], ["blue", 5]], None]
    cache = mirror(stored([1, 2, 3], PROMPT[:24], extra_keys=extra))
    red, blue = PromptImage("red", 4, 8), PromptImage("blue", 13, 2)
    cases = [((red, blue), 24), ((), 0), ((red,), 8), ((blue, red), 8), ((red, blue._replace(start=12)), 8)]
    for images, hit in [*cases, ((red._replace(tokens=4), blue), 8), ((red._replace(start=3), blue), 0)]:
        assert cache.prefixes.hit(PromptNames(PROMPT, "salt", 0, images)) == hit, images
    assert cache.prefixes.hit(PromptNames(PROMPT, None, 0, (red, blue))) == 0


def test_removed_blocks_are_forgotten() -> None:
    cache = mirror(*[stored([1, 2], PROMPT[:16])] * 2, *[api.BlockRemoved([1, 2], "GPU")] * 2)
    assert cache._blocks == {}
    assert cache.prefixes.known() == []


@pytest.mark.parametrize(("role", "publishes"), [(Role.DECODE, 1), (Role.BOTH, 1), (Role.PREFILL, 0)])
def test_engines_of_workers_that_decode_publish_their_events(role: Role, publishes: int) -> None:
    argv = VllmProcess(EngineSpec(role, f"{role.value}-0-test", "demo"))._argv("ipc:///events")
    assert sum("ipc:///events" in word for word in argv) == publishes


@pytest.mark.parametrize(("engine_args", "size"), [({}, 0), ({"mm-processor-cache-gb": 2}, 2)])
def test_an_engine_caches_images_only_if_its_arguments_ask(engine_args: dict[str, object], size: int) -> None:
    argv = VllmProcess(EngineSpec(Role.DECODE, "d", "demo", engine_args=engine_args))._argv("ipc:///events")
    assert [word for word in argv if "mm-processor-cache" in word] == [f"--mm-processor-cache-gb={size}"]
