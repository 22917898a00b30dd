"""Prompts for the identity tests: lengths around every threshold, and shared prefixes."""

import random
from dataclasses import dataclass

import httpx

BLOCK = 32
"""KV block size of the graph under test, in tokens."""
LOCAL_LIMIT = 128
"""`max-local-prefill-length` of the graph under test, in tokens."""

# one token; around a KV block; around the local/remote threshold; several blocks; several prefill chunks
LENGTHS = (1, 2, 31, 32, 33, 64, 127, 128, 129, 160, 161, 300, 512, 1000, 1501, 2048, 3000)


@dataclass(frozen=True)
class Case:
    name: str
    prompt: list[int]
    max_tokens: int = 24

    def body(self, **more: object) -> dict[str, object]:
        return {
            "model": "demo",
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }


async def tokens_of(client: httpx.AsyncClient, case: Case, **more: object) -> list[int]:
    answer = await client.post("/v1/completions", json=case.body(**more))
    found: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
    return found


def identity_cases() -> list[Case]:
    chance = random.Random(20)
    plain = [Case(f"length-{n}", _tokens(chance, n)) for n in LENGTHS]
    return plain + _shared_prefixes(chance)


def _shared_prefixes(chance: random.Random) -> list[Case]:
    """Three prompts that share 640 leading tokens. After the prefix hit, the second has 60 tokens left to compute
    (local prefill) and the third 700 (remote prefill that transfers the KV of these 700 only)."""
    prefix = _tokens(chance, 640)
    return [
        Case("prefix-first", prefix + _tokens(chance, 10)),
        Case("prefix-short-rest", prefix + _tokens(chance, 60)),
        Case("prefix-long-rest", prefix + _tokens(chance, 700)),
    ]


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(20, 600) for _ in range(count)]
