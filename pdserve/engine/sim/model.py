"""The speed and size of the simulated engine, the tokens that it generates, and its faults."""

import asyncio
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from pdserve.kv.prefill_chunk import MAX_SHORT_STEPS
from pdserve.util.errors import ConfigError


def seed_of(tokens: Sequence[int], before: int = 0) -> int:
    """A hash of tokens; `before`: the seed of the tokens before these."""
    return zlib.crc32(array("q", tokens), before)


@dataclass(frozen=True)
class SimModel:
    """Sizes come from vLLM's own arguments, speeds from `additional-config: {sim: {…}}`, which vLLM ignores."""

    kv_blocks: int = 2048
    block_size: int = 16
    max_model_len: int = 8192
    max_num_seqs: int = 64
    max_batched_tokens: int = 2048
    prompt_chunk: int = 0
    """Tokens of one prompt in a step that it shares with other requests; 0: as many as fit."""
    prefill_rate: float = 20_000.0
    """Prompt tokens per second, without attention."""
    attention_seconds: float = 0.0
    """Seconds for each million pairs of a prompt token and an earlier token; they make long prompts slower."""
    step_seconds: float = 0.005
    """Fixed seconds of each step."""
    sequence_seconds: float = 0.0
    """Seconds for each sequence in a step."""
    context_seconds: float = 0.0
    """Seconds for each 1,000 tokens of context of all decoding sequences in a step."""
    bytes_per_token: int = 4096
    """Bytes of a token's KV."""
    bandwidth: float = 1e9
    """Bytes per second between two engines."""
    transfer_seconds: float = 0.0
    """Fixed seconds of each transfer between two engines."""
    transfer_timeout: float = 3.0
    """Seconds to wait for another engine's answer; equals `FLOOR` in `pdserve/kv/connector.py`."""
    lease: float = 30.0
    """Seconds that a prefill engine keeps blocks for the decode engine."""
    fatal_token: int = 0
    """A prompt with this token id kills the engine that computes it; 0: no token does."""
    stop_signal: int = 0
    """Number of the signal that makes the engine hang or, if it hangs, continue; 0: none."""
    load_seconds: float = 0.0
    """Seconds until the engine is ready, in a thread that cannot be stopped, like vLLM's imports."""
    first_token: int = 300
    tokens: int = 700
    """The token ids it generates: `tokens` of them from `first_token`; in the demo tokenizer these are whole words."""

    def step_time(self, decoding: int, context: int, chunks: Iterable[tuple[int, int]] = ()) -> float:
        """Seconds of a step. `decoding`: number of sequences that get their next token; `context`: all tokens of these
        sequences together; `chunks`: for each chunk of a prompt, the tokens computed before it and its own tokens."""
        seconds = self.step_seconds + decoding * self.sequence_seconds + context / 1000 * self.context_seconds
        for before, tokens in chunks:
            pairs = tokens * (before + tokens / 2) / 1e6
            seconds += self.sequence_seconds + tokens / self.prefill_rate + pairs * self.attention_seconds
        return seconds

    def chunk(self, limit: int, prompts: int, with_kv: int) -> int:
        """Tokens of each of `prompts` prompts in a step with other requests, as in vLLM (`kv/prefill_chunk.py`).
        `with_kv`: number of successive steps, including this one, with a request whose KV was read."""
        if not limit:
            return self.max_batched_tokens
        least = min(self.block_size, self.prompt_chunk or limit)
        if with_kv % (MAX_SHORT_STEPS + 1):
            return least
        return max(least, limit if limit == self.prompt_chunk else limit // max(1, prompts))

    def next_token(self, seed: int, salt: int = 0) -> int:
        """A pure function of `seed`, the hash of all tokens before it, so that a request continues with the same tokens
        on another worker. A `salt` other than 0 stands for wrong KV."""
        return self.first_token + seed_of([salt], seed) % self.tokens

    def answer(self, prompt: Sequence[int], count: int, salt: int = 0) -> list[int]:
        """The tokens that any healthy engine generates for the prompt."""
        seed, tokens = seed_of(prompt), list[int]()
        for _ in range(count):
            tokens.append(self.next_token(seed, salt))
            seed = seed_of(tokens[-1:], seed)
        return tokens

    def likely(self, token: int, count: int) -> list[int]:
        """`count` tokens, -1 for all, the likeliest first: `token`, then others in an arbitrary order."""
        others = self.tokens if count < 0 else min(count, self.tokens)
        first = token - self.first_token
        return [token, *(self.first_token + (first + i) % self.tokens for i in range(1, others))][:others]


class Faults:
    """Faults that tests switch on and off while the engine runs."""

    def __init__(self) -> None:
        self.going = asyncio.Event()
        """Cleared while the engine hangs: no step ends, and no request for KV is answered."""
        self.going.set()
        self.dead = False
        """Whether methods that ask the engine raise EngineDead; set by `SimEngine.die`."""
        self.killed = False
        """Whether the engine is dead because it was killed from outside."""
        self.slow = 1.0
        """Factor on the time of each step."""
        self.drop_transfers = False
        """The prefill engine accepts requests for KV but never answers, as if the network dropped packets."""
        self.no_grammars = False
        """No structured output can be compiled."""
        self.fatal_pulls = False
        """A read of KV kills the decode engine."""
        self.deaf = False
        """The prefill engine's side channel closes every connection without an answer."""

    def kills(self, prompt: list[int], pulled: int, fatal_token: int) -> bool:
        """Whether this request kills the engine. `pulled`: tokens whose KV it read; `fatal_token`: 0 for none."""
        return (self.fatal_pulls and pulled > 0) or (fatal_token > 0 and fatal_token in prompt)

    @property
    def cause(self) -> dict[str, bool]:
        """Why the engine is dead, as arguments of EngineDead."""
        return {"crashed": not self.killed, "killed": self.killed}

    def toggle_hang(self) -> None:
        (self.going.clear if self.going.is_set() else self.going.set)()

    def is_silent(self) -> bool:
        return self.dead or self.drop_transfers or not self.going.is_set()


_ARGUMENTS = {
    "num-gpu-blocks-override": "kv_blocks",
    "block-size": "block_size",
    "max-model-len": "max_model_len",
    "max-num-seqs": "max_num_seqs",
    "max-num-batched-tokens": "max_batched_tokens",
    "long-prefill-token-threshold": "prompt_chunk",
}


def sim_model(engine_args: Mapping[str, object]) -> SimModel:
    """Raises ConfigError, which names every key that is unknown or has an impossible value."""
    extra = engine_args.get("additional-config")
    speeds = extra.get("sim", {}) if isinstance(extra, Mapping) else {}
    if not isinstance(speeds, Mapping):
        raise ConfigError([f"sim: a mapping of speeds is expected, not {speeds!r}"])
    values = {
        field: engine_args[name] for name, field in _ARGUMENTS.items() if engine_args.get(name) is not None
    }
    values |= {str(name).replace("-", "_"): value for name, value in speeds.items()}
    defaults = {field.name: field.default for field in fields(SimModel)}
    problems = [f"sim: unknown key {name}" for name in values if name not in defaults]
    for name in defaults.keys() & values.keys():
        value, default = values[name], defaults[name]
        number = type(value) is int or (type(value) is float and type(default) is float)
        if not number or not (value > 0 or value == default):  # type: ignore[operator]
            kind = "a whole number" if type(default) is int else "a number"
            problems.append(
                f"sim: {name} must be {kind} {'at least' if default == 0 else 'above'} 0, not {value!r}"
            )
    if problems:
        raise ConfigError(problems)
    return SimModel(**values)  # type: ignore[arg-type]
