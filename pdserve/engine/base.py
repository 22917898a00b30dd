"""The engine seam: what a decode or prefill worker needs of an inference engine.

`vllm` is the real engine, `sim` a simulated engine with the same contract. Which implementation a worker uses is the
`engine` key of its YAML section."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.messages import KvHandle
from pdserve.prefixes import CachedPrefixes
from pdserve.tasks import Lifetime


@dataclass(frozen=True)
class EngineFacts:
    """What a started engine says of itself."""

    kv_blocks: int
    block_size: int
    """tokens in a KV block"""
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    max_concurrency: float
    """requests of max_model_len tokens that fit the KV cache at once"""
    vllm_version: str
    supported_tasks: list[str]
    fingerprint: str = ""
    """of what it loaded (`engine/fingerprint.py`); KV of another fingerprint means nothing to it"""
    weight_bytes: int = 0
    """of the rank with the most; 0 here and below: not known"""
    consumed_bytes: int = 0
    """on a GPU: weights, and the runtime's own memory"""
    peak_bytes: int = 0
    """on a GPU: reserved for activations and CUDA graphs"""

    @property
    def kv_tokens(self) -> int:
        return self.kv_blocks * self.block_size


@dataclass(frozen=True)
class EngineUsage:
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """share of the KV blocks held by requests, 0 to 1"""


@dataclass(frozen=True)
class Read:
    """KV that came from another engine: of a request, or a piece of it that was read ahead."""

    source: str
    """the `engine_id` of its handle"""
    seconds: float
    """without the handshake"""
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
    """of a `prefill`: its request's first token, where that may be sampled without the tokens after it; else none"""
    finished: bool
    handle: KvHandle | None = None
    """on the finishing output of a `prefill`: where its KV lies"""
    failed: bool = False
    """ended by an error inside the engine; no more outputs come"""
    refused: str = ""
    """with `failed`: why no engine will run it, where the request itself is at fault"""
    recomputed: bool = False
    """on the first output of a request with `kv`: its KV could not be read, and the prompt was computed here"""
    begun: float | None = None
    """on the first output of a request, in monotonic seconds: when the engine began to compute for it, its KV being
    there; None: not known"""
    raw: Any = None
    """the engine's own output, for `pack`"""


@dataclass
class Step:
    """The outputs of an engine step, in order for each request."""

    outputs: list[Output]
    transfers: Transfers | None = None
    unread: dict[str, str] = field(default_factory=dict)
    """requests whose KV could not be read from the prefill engine and is computed here, and why; each is named once,
    before its first output"""
    released: list[str] = field(default_factory=list)
    """prefills whose KV is kept no longer (read, rejected, or past its lease), by the `request_id` of their handles;
    each is named once, after its finishing output"""
    unreachable: list[str] = field(default_factory=list)
    """engines that do not answer when asked how to read their KV, by the `engine_id` of their handles"""
    complete: list[KvHandle] = field(default_factory=list)
    """prefills that are under way: what can be read of them, in whole blocks from the prompt's beginning. Their blocks
    are kept as long as the prefill goes on; only its last handle tells that it did"""


class Engine(Lifetime):
    """An inference engine in processes of its own, or simulated in this process. Entering starts it and returns when it
    can serve; leaving stops all of its processes.

    Every request ends with exactly one finishing Output, unless it was cancelled: then either no Output comes, or, for
    a prefill that was done before the engine heard of the cancellation, the one with its handle.
    Any method raises EngineDead when the engine is gone; it does not come back, and the worker must exit.
    A request id is used once in an engine's life; a second use raises ProtocolError and harms nothing.
    """

    facts: EngineFacts
    """set on entering"""
    prefixes: CachedPrefixes
    """what is in its prefix cache, a moment late; empty before entering"""

    @abstractmethod
    async def generate(
        self,
        request_id: str,
        prompt: list[int],
        body: list[bytes],
        kv: KvHandle | None,
        after: Sequence[int] = (),
    ) -> None:
        """Start generating. With `kv`, pull the prompt's KV from there first; where that fails the engine recomputes
        it, and the caller sees no difference. With `after`, go on after these tokens, which were sampled elsewhere and
        are in no Output of this engine. Raises ProtocolError for a handle that does not fit (other block size, too few
        blocks, past its lease less a margin): the request was then not started."""

    @abstractmethod
    async def prefill(self, request_id: str, prompt: list[int], body: list[bytes]) -> None:
        """Run the prompt for one token and keep its KV blocks for the lease; the finishing output has the handle."""

    @abstractmethod
    def first_output(
        self, request_id: str, prompt: list[int], body: list[bytes], packed: list[bytes]
    ) -> Output | None:
        """The output of the prefill engine, as it packed it, as if this engine had sampled the token: finished where
        the request ends with it. To be packed at once, since its times are those of this engine's last step. None where
        this engine might have sampled another token, or `packed` cannot be read."""

    @abstractmethod
    async def reject(self, kv: KvHandle) -> None:
        """Tell the prefill engine that holds `kv` that it will not be pulled, so that it frees the blocks now. Does not
        wait for that, and does not fail where that engine is gone."""

    async def read_ahead(self, kv: KvHandle, skip: int) -> None:
        """Read the KV of a prompt that is being computed, as far as `kv` goes, except the first `skip` tokens. A hint:
        what comes of it shows in that `generate` with the finished prefill's handle, or `reject`, ends it."""

    async def drop_ahead(self, kv: KvHandle) -> None:
        """No `generate` will come for what was read ahead of this prefill."""

    @abstractmethod
    async def release(self, kv: KvHandle) -> None:
        """Free the KV of a prefill of this engine, which no other engine will read. A step names it as released, like
        every other; an unknown handle is ignored."""

    @abstractmethod
    async def cancel(self, request_ids: list[str]) -> None:
        """Stop these requests and free their blocks; unknown and finished ids are ignored."""

    @abstractmethod
    async def step(self) -> Step:
        """Wait for the next outputs. One caller at a time."""

    @abstractmethod
    def pack(self, outputs: list[Output]) -> list[bytes]:
        """Encode these outputs of one step for one frontend, as vLLM's EngineCoreOutputs."""

    @abstractmethod
    def plain_body(self, max_tokens: int) -> list[bytes]:
        """The body of a request of this process's own: greedy, for exactly so many tokens."""

    @abstractmethod
    def prefix_hit(self, prompt: list[int], body: list[bytes]) -> int | None:
        """How many leading tokens of the prompt have their KV in this engine's prefix cache. An estimate: it may be
        stale, and 0 is always allowed. None where no other engine may prefill this request's prompt, because the KV of
        the token ids is not all that it needs of its prompt (prompt logprobs, images, embeddings): such a request is
        generated with `kv=None`. Raises ProtocolError for a body that cannot be read."""

    @property
    @abstractmethod
    def usage(self) -> EngineUsage: ...

    @abstractmethod
    async def all_blocks_free(self) -> bool:
        """True when no request holds a KV block (a leak probe; it empties the prefix cache)."""

    @abstractmethod
    async def probe(self) -> None:
        """Return when the engine has answered a question that costs it nothing, which it does between two steps; an
        engine that hangs never does."""

    @abstractmethod
    async def reach(self) -> None:
        """Ask this engine for KV as another engine would; for prefill engines. Raises TimeoutError without an answer
        within a few seconds."""

    @abstractmethod
    def cpu_seconds(self) -> float:
        """CPU time that this engine's processes have used so far. During a long step they do not answer, but use CPU
        time."""
