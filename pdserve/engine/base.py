"""The engine contract: what a decode or prefill worker needs of an inference engine.

The `engine` key of a worker's YAML section chooses `vllm`, the real engine, or `sim`, a simulated one."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.contract.messages import KvHandle
from pdserve.contract.prefixes import CachedPrefixes, PrefixKey, PromptNames
from pdserve.engine.lora import AdapterEngine
from pdserve.runtime.tasks import Lifetime


@dataclass(frozen=True)
class EngineFacts:
    """What is known of an engine once it has started."""

    kv_blocks: int
    block_size: int
    """Tokens in a KV block."""
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    max_concurrency: float
    """Requests of max_model_len tokens that fit the KV cache at once."""
    vllm_version: str
    supported_tasks: list[str]
    fingerprint: str = ""
    """Of the loaded model (`engine/fingerprint.py`). The engine cannot use KV of another fingerprint."""
    host_blocks: int = 0
    """KV blocks that fit in host memory (`kv-offload`)"""
    disk_blocks: int = 0
    """KV blocks that fit on disk (`kv-offload-disk`)"""
    side_channel: str = ""
    """host:port at which other engines ask how to read its KV; empty: its KV cannot be read."""

    @property
    def kv_tokens(self) -> int:
        return self.kv_blocks * self.block_size


@dataclass(frozen=True)
class EngineUsage:
    running: int = 0
    waiting: int = 0
    queued: int = 0
    """Waiting requests that lack only a slot or KV blocks."""
    kv_usage: float = 0.0
    """Share of the KV blocks that requests hold, 0 to 1."""


@dataclass(frozen=True)
class Read:
    """A finished KV transfer from another engine: all of a request's KV, or a piece that was read ahead."""

    source: str
    """`engine_id` of the KV handle."""
    seconds: float
    """Duration without the handshake."""
    bytes: int


@dataclass(frozen=True)
class Transfers:
    """KV transfers that ended since the last step, as the receiving engine counts them."""

    reads: list[Read] = field(default_factory=list)
    failures: int = 0

    @property
    def bytes(self) -> int:
        return sum(read.bytes for read in self.reads)


@dataclass
class Output:
    """One request's share of an engine step."""

    request_id: str
    tokens: list[int]
    """New tokens. Of a `prefill`: the first token if another engine can continue after it; else none."""
    finished: bool
    handle: KvHandle | None = None
    """Where the KV lies; on the finishing output of a `prefill`."""
    failed: bool = False
    """Whether an error inside the engine ended the request; no more outputs come."""
    refused: str = ""
    """With `failed`: why every engine would fail the request; empty if the request is not at fault."""
    recomputed: bool = False
    """On the first output of a request with `kv`: whether this engine had to compute the prompt."""
    begun: float | None = None
    """On the first output of a request: monotonic time at which the engine began to compute it; None: unknown."""
    raw: Any = None
    """The engine's own output, for `pack`."""


@dataclass
class Step:
    """The outputs of an engine step; those of one request are in order."""

    outputs: list[Output]
    transfers: Transfers | None = None
    unread: dict[str, str] = field(default_factory=dict)
    """Request id -> why its KV could not be read and is computed instead; once, before the request's first output."""
    released: list[str] = field(default_factory=list)
    """`request_id` of the handles whose KV was freed: it was read, rejected, or past its KV lease. Each
    rank reports it."""
    unreachable: list[str] = field(default_factory=list)
    """`engine_id` of the handles whose prefill engine does not answer on its side channel."""
    complete: list[KvHandle] = field(default_factory=list)
    """Of running prefills: the whole blocks from the start of the prompt that can be read already. Only the handle of
    the finishing output proves that their KV is valid."""
    ended: float = 0.0
    """Monotonic time at which the engine had the outputs."""
    prompt_tokens: int = 0
    """Prompt tokens computed in this step; of a prompt whose KV was read, only the tokens after that KV."""


class Engine(Lifetime, AdapterEngine):
    """An inference engine in processes of its own, or simulated in this process. Entering starts it and returns when it
    can serve; leaving stops all of its processes.

    Every request ends with one finishing Output unless it is cancelled. Then no Output comes, except for a prefill that
    was done before the engine saw the cancellation: its Output has the handle. A second use of a request id raises
    ProtocolError, and does nothing. Methods that ask the engine raise EngineDead if it is dead: the worker must exit.
    """

    facts: EngineFacts
    """Set when the engine is entered."""
    prefixes: CachedPrefixes
    """Names of the blocks in the prefix cache, a moment late; empty before the engine is entered."""

    @abstractmethod
    async def generate(
        self,
        request_id: str,
        prompt: list[int],
        body: list[bytes],
        kv: KvHandle | None,
        after: Sequence[int] = (),
    ) -> None:
        """Start generating. With `kv`, first read the prompt's KV from there; if that fails, the engine recomputes it,
        and the tokens are the same. With `after`, continue after these tokens, which were sampled elsewhere and are in
        no Output of this engine. Raises ProtocolError, without starting the request, for a handle that does not fit
        (other block size, too few blocks)."""

    @abstractmethod
    async def prefill(self, request_id: str, prompt: list[int], body: list[bytes]) -> None:
        """Run the prompt for one token. Keep its KV, which the output's handle names, until it is read or the KV lease
        ends."""

    @abstractmethod
    def first_output(
        self, request_id: str, prompt: list[int], body: list[bytes], packed: list[bytes]
    ) -> Output | None:
        """Turn the prefill engine's packed output into one of this engine. Pack the result at once, because its times
        are relative to this engine's last step. None if this engine might have sampled another token, or if `packed`
        cannot be read."""

    @abstractmethod
    async def reject(self, kv: KvHandle) -> None:
        """Let the prefill engine free `kv`, which will not be read. Does not wait."""

    @abstractmethod
    async def read_ahead(self, kv: KvHandle, skip: int) -> None:
        """Start to read the KV of a prompt whose prefill is still running, as far as `kv` goes, except the first `skip`
        tokens. A hint: `generate` with the handle of the finished prefill uses what was read, `reject` frees it."""

    @abstractmethod
    async def drop_ahead(self, kv: KvHandle) -> None:
        """Free this prefill's KV that was read ahead: no `generate` will come for it."""

    @abstractmethod
    async def limit_chunk(self, tokens: int) -> None:
        """From the next step on, each step computes at most `tokens` tokens of all prompts together, but at least a KV
        block of each. The configured limit applies to each prompt separately. An engine's only request has no limit."""

    @abstractmethod
    async def cancel(self, request_ids: list[str]) -> None:
        """Stop these requests and free their blocks. Ids of unknown or finished requests are ignored."""

    @abstractmethod
    async def step(self) -> Step:
        """Wait for the next outputs. One caller at a time."""

    @abstractmethod
    def pack(self, outputs: list[Output]) -> list[bytes]:
        """Encode outputs of one step for one frontend, as vLLM's EngineCoreOutputs."""

    @abstractmethod
    def plain_body(self, max_tokens: int) -> list[bytes]:
        """The body of a request that this process makes itself: greedy, for exactly `max_tokens` tokens."""

    @abstractmethod
    def prefix_key(self, body: list[bytes]) -> PrefixKey | None:
        """What the names of the request's prefixes depend on besides its tokens. None if no other engine may prefill
        the prompt, because the request needs more of it than the KV of its token ids (prompt logprobs, embeddings).
        Raises ProtocolError for a body that cannot be read."""

    def prompt_names(self, prompt: list[int], body: list[bytes]) -> PromptNames | None:
        """The names of the prompt's blocks. For None and errors, see `prefix_key`."""
        key = self.prefix_key(body)
        return None if key is None else PromptNames(prompt, *key)

    def prefix_hit(self, prompt: list[int], body: list[bytes]) -> int | None:
        """How many leading tokens of the prompt have their KV in this engine's prefix cache or in host memory. An
        estimate: it may be stale. For None and errors, see `prefix_key`."""
        names = self.prompt_names(prompt, body)
        return None if names is None else self.prefixes.hit(names)

    @property
    @abstractmethod
    def usage(self) -> EngineUsage: ...

    @abstractmethod
    async def all_blocks_free(self) -> bool:
        """Whether no request holds a KV block. A check for leaks: it empties the prefix cache."""

    @abstractmethod
    async def watch(self) -> None:
        """Raises EngineDead when the engine's processes have ended, even while its other calls hang; never returns."""

    @abstractmethod
    async def probe(self) -> None:
        """Ask the engine a trivial question and wait for the answer. An engine that hangs gives none."""

    @abstractmethod
    async def reach(self) -> None:
        """Ask this prefill engine's side channel as a decode engine would. Raises TimeoutError after a few seconds."""

    @abstractmethod
    def cpu_seconds(self) -> float:
        """CPU time that the engine's processes have used so far. A long step uses some, a hang hardly any."""


class Ranks(Lifetime):
    """A host's part of an engine that spans hosts and has its core on another host. Entering returns when the whole
    engine has loaded the model; raises ConfigError, and EngineDead if it does not start."""

    @abstractmethod
    async def watch(self) -> None:
        """Raises EngineDead when a process of this part has ended; never returns."""
