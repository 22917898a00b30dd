"""A generation: one sequence of a request, as AsyncLLM adds it to the engine core, and its attempts at workers."""

import time
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.contract.messages import Placed, ToDecode
from pdserve.frontend.admission.granted import SequencePermit
from pdserve.frontend.edge.request_state import RequestState, SequenceHops
from pdserve.frontend.sequence.pacing import Reserve
from pdserve.frontend.vllm.api_server import EngineCoreOutput, EngineCoreRequest
from pdserve.observe.tracing import TracedSpan


class WorkerLink(Protocol):
    """The part of `frontend/workers/link.py` that a generation uses."""

    instance: str

    def add(self, generation: "Generation") -> None: ...

    def remove(self, generation: "Generation") -> None: ...

    def notify_changed(self) -> None: ...

    def post(self, message: ToDecode) -> None: ...


@dataclass(eq=False)
class Generation:
    request: EngineCoreRequest
    state: RequestState
    permit: SequencePermit | None = None
    """None before it begins and after its end"""
    kv_tokens: float = 0.0
    """estimated KV that it needs, prompt included"""
    tokens: list[int] = field(default_factory=list)
    """generated so far, at all workers together"""
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    """monotonic seconds; 0 before the first token"""
    reserve: Reserve[EngineCoreOutput] | None = None
    """outputs held back (`pacing.py`); None: outputs are never held back"""
    last_passed: float = 0.0
    """monotonic seconds when the last output was passed to the client; 0 before"""
    hops: SequenceHops = field(init=False)

    # the current attempt

    attempt: int = 0
    """number of attempts so far, this one included"""
    attempt_id: str = ""
    """request id at the worker; differs for each attempt, because a worker may still know an earlier one"""
    link: WorkerLink | None = None
    """to the worker of this attempt"""
    sent_at: float = 0.0
    """monotonic seconds"""
    span: TracedSpan | None = None
    """None: the request is not traced"""
    placed: Placed | None = None
    """the worker's last report on the prefill; None until it accepts the request"""
    recorded_placed: Placed | None = None
    """the `placed` that was last copied into the request state"""

    # earlier attempts, for the rules of `migration`

    must_replay: bool = False
    """another worker cannot continue after its tokens and has to generate them again from the prompt"""
    replay_left: int = 0
    """tokens that the worker has yet to generate again"""
    losses: int = 0
    """workers that accepted and lost it"""
    stalls: int = 0
    """stalled workers that it was moved away from"""
    lost_by: set[str] = field(default_factory=set)
    """instance ids of the workers that lost it or that it was moved away from"""
    last_loss: str = ""
    engines_died: int = 0
    """engines in a row that died while they computed its next token, as their workers report"""

    def __post_init__(self) -> None:
        self.hops = self.state.sequence_hops()

    @property
    def adapter(self) -> int:
        """Id of its LoRA adapter; 0: none."""
        lora = self.request.lora_request
        return lora.lora_int_id if lora is not None else 0

    @property
    def id(self) -> str:
        request_id: str = self.request.request_id
        return request_id

    @property
    def is_beam(self) -> bool:
        """Whether it is one step of a beam search, which adds new engine-core requests for each token."""
        return not self.request.sampling_params.detokenize

    @property
    def prompt_key(self) -> str:
        """Key of the prompt: equal for all outputs of n > 1, and for beams (ids: `<key>-<step>-beam-<number>`)."""
        key: str = self.request.external_req_id or self.request.request_id
        return key.rsplit("-", 3)[0] if self.is_beam else key

    @property
    def prompt(self) -> list[int]:
        prompt: list[int] = self.request.prompt_token_ids
        return prompt

    @property
    def max_tokens(self) -> int:
        max_tokens: int = self.request.sampling_params.max_tokens
        return max_tokens

    @property
    def timing(self) -> tuple[int, float, float]:
        """Tokens; seconds from submit to first token; seconds from first to last token. Valid only for one attempt."""
        return len(self.tokens), self.first_token_at - self.sent_at, self.last_token_at - self.first_token_at

    def is_complete(self, max_model_len: int) -> bool:
        return len(self.tokens) >= min(self.max_tokens, max_model_len - len(self.prompt))

    def begin_span(self, instance: str) -> None:
        """Begin the tracing span of an attempt at this worker, if the request is traced."""
        if self.state.span is not None:
            self.span = self.state.span.begin("attempt", time.monotonic(), {"pdserve.instance": instance})

    def attach(self, link: WorkerLink, attempt_id: str) -> None:
        """Begin an attempt at the link's worker."""
        self.attempt += 1
        self.attempt_id = attempt_id
        self.link = link
        self.sent_at = time.monotonic()
        self.placed = None
        self.replay_left = len(self.tokens) if self.must_replay else 0
        self.hops.sent(link.instance)
        link.add(self)

    def detach(self, error: str = "") -> WorkerLink | None:
        """End the attempt, so that late outputs are ignored. Returns the attempt's link; None without one."""
        link, self.link = self.link, None
        hops = self.hops.left(self.last_token_at) if link is not None else []
        span, self.span = self.span, None
        if span is not None:
            span.add_hops((hop for hop in hops if hop.name == "decode"), self.state.started)
            span.end(time.monotonic(), {"pdserve.prefill": self.placed.prefill if self.placed else ""}, error)
        if link is not None:
            link.remove(self)
        return link

    def add_tokens(self, tokens: list[int]) -> None:
        """Record tokens that have arrived."""
        if not tokens:
            return
        self.last_token_at = time.monotonic()
        if not self.first_token_at:
            self.first_token_at = self.last_token_at
            if self.link is not None:
                self.link.notify_changed()  # `Link.starting` depends on it
        self.engines_died = 0
        self.tokens += tokens

    def count_passed(self, tokens: int) -> float | None:
        """Count tokens passed to the client. Returns their mean gap in seconds; None for the first output."""
        if not tokens:
            return None
        before, self.last_passed = self.last_passed, time.monotonic()
        gap = self.last_passed - before if before else None
        self.state.add_tokens(tokens, gap)
        return None if gap is None else gap / tokens
