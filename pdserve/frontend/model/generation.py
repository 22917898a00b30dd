"""One sequence being generated: an engine-core request of AsyncLLM and where it stands."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.frontend.admission.control import SequencePermit
from pdserve.frontend.model import migration
from pdserve.frontend.model.link import Link
from pdserve.frontend.model.vllm_api import EngineCoreRequest
from pdserve.frontend.trace import RequestTrace
from pdserve.messages import Submit

_BOOT = secrets.token_hex(4)
_serial = itertools.count(1)


@dataclass(eq=False)
class Generation:
    request: EngineCoreRequest
    trace: RequestTrace | None
    deadline: float
    """monotonic seconds"""
    size: float = 0.0
    """tokens of KV that it will probably need"""
    tokens: list[int] = field(default_factory=list)
    """generated so far, by whichever workers"""
    ahead: int = 0
    """how many of these tokens the worker has still to say again, in a replay"""
    attempt: int = 0
    """how often it was sent to a worker"""
    losses: int = 0
    """how often a worker that had taken it up lost it"""
    avoid: set[str] = field(default_factory=set)
    """the workers that lost it"""
    last_loss: str = ""
    engines_died: int = 0
    """in a row, each while it computed the next token, as their workers reported"""
    link: Link | None = None
    wire_id: str = ""
    permit: SequencePermit | None = None
    placed: bool = False
    """the worker has taken it up"""
    prefill: str = ""
    """`local` or `remote`, as the worker said last"""
    cached: int = 0
    """prompt tokens that were a prefix hit at the prefill worker"""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    """only while there is no worker for it"""
    sent: float = field(default_factory=time.monotonic)
    """monotonic; to the first worker, or when it began to wait for one"""
    first_token: float = 0.0
    last_token: float = 0.0
    """monotonic; 0 before the first"""

    @property
    def id(self) -> str:
        request_id: str = self.request.request_id
        return request_id

    @property
    def prompt(self) -> list[int]:
        prompt: list[int] = self.request.prompt_token_ids
        return prompt

    @property
    def begun(self) -> bool:
        """Its turn has come."""
        return self.permit is None or self.permit.granted

    @property
    def replays(self) -> bool:
        """Whether another worker starts it again from its prompt, instead of going on from its tokens."""
        return migration.looks_back(self.request.sampling_params) is not None

    @property
    def max_tokens(self) -> int:
        most: int = self.request.sampling_params.max_tokens
        return most

    def is_complete(self, max_model_len: int) -> bool:
        return len(self.tokens) >= min(self.max_tokens, max_model_len - len(self.prompt))

    def submit(self) -> Submit:
        """The next attempt, under an id never used before. Raises Unencodable."""
        wire_id = f"{self.id}#{self.attempt + 1}-{_BOOT}{next(_serial):x}"
        said = [] if self.replays else self.tokens
        return Submit(
            wire_id,
            self.prompt + said,
            max(0.0, self.deadline - time.monotonic()),
            migration.body(self.request, wire_id, self.tokens),
            migrated=self.losses > 0,
            engines_died=self.engines_died,
        )

    def attach(self, link: Link, wire_id: str) -> None:
        """A new attempt, under an id never used before: a worker may still know the one before."""
        self.attempt += 1
        self.wire_id = wire_id
        self.link = link
        self.placed = False
        self.ahead = len(self.tokens) if self.replays else 0
        link.generations[self.wire_id] = self
        link.tokens += self.size

    def detach(self) -> Link | None:
        """No longer anybody's: late outputs of this attempt find nothing. Returns the link it was on."""
        link, self.link = self.link, None
        if link is not None:
            link.generations.pop(self.wire_id, None)
            link.tokens -= self.size
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
        return link

    def later(self, delay: float, action: Callable[["Generation"], None]) -> None:
        """Do this with it, unless it finds a worker before."""
        self.timers.append(asyncio.get_running_loop().call_later(delay, action, self))

    def heard_again(self, tokens: list[int]) -> int | None:
        """How many of these tokens, just come, are among those that came before; None where they are others."""
        again = min(self.ahead, len(tokens))
        start = len(self.tokens) - self.ahead
        if tokens[:again] != self.tokens[start : start + again]:
            return None
        self.ahead -= again
        return again

    def take(self, tokens: list[int]) -> float | None:
        """Count these tokens; returns the seconds since the one before, None for the first."""
        if not tokens:
            return None
        now = time.monotonic()
        gap = (now - self.last_token) / len(tokens) if self.last_token else None
        self.first_token = self.first_token or now
        self.last_token = now
        self.engines_died = 0
        self.tokens += tokens
        if self.trace is not None:
            self.trace.add_tokens(len(tokens))
        return gap


def unsupported(request: EngineCoreRequest) -> str | None:
    """Why it cannot be generated here; None where it can."""
    if request.mm_features or request.prompt_embeds is not None:
        return "only text prompts are served: images, audio, video and prompt embeddings are not"
    if request.sampling_params is None:
        return "this model generates text: pooling and embedding requests are not served"
    if request.lora_request is not None or request.resumable:
        return "LoRA adapters and streaming input are not served"
    return None
