"""What a client asks for and what it gets back, as plain dataclasses.

Knows no array library and no transport: gRPC, HTTP, `batch` and the offline API all build a `GenerateRequest`
and read `GenerateUpdate`s.  `SamplingParams` is what was asked (None means unset); `Sampling` is what it resolved to.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class Code(enum.Enum):
    """Error codes, named as gRPC's statuses."""

    CANCELLED = "CANCELLED"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    UNAUTHENTICATED = "UNAUTHENTICATED"


class RequestError(Exception):
    """One request cannot be served.  The message names the field and the value; every front end maps it unchanged."""

    def __init__(self, code: Code, message: str, *, field: str | None = None, retry_after_s: float | None = None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        """Path of the offending field in the proto, for example `sampling_params.top_p`."""
        self.retry_after_s = retry_after_s
        """Seconds after which trying again makes sense (RESOURCE_EXHAUSTED, UNAVAILABLE)."""


def invalid(field_path: str, value: object, why: str) -> RequestError:
    """INVALID_ARGUMENT that names field and value, e.g. `sampling_params.top_p = 1.5: must be in (0, 1]`."""
    if isinstance(value, enum.Enum):
        value = value.name  # as the proto spells it
    shown = repr(list(value) if isinstance(value, tuple) else value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return RequestError(Code.INVALID_ARGUMENT, f"{field_path} = {shown}: {why}", field=field_path)


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class Pooling(enum.Enum):
    """What an embedding is made of."""

    MEAN = "mean"
    """The mean of the hidden states of all tokens."""
    LAST = "last"
    """The last token's hidden state."""


class EarlyStopping(enum.Enum):
    HEURISTIC = "heuristic"
    FIRST = "first"
    NEVER = "never"


@dataclass(frozen=True)
class SamplingParams:
    """What the client asked for, field for field as in API.md.  None means unset: the model's default, then ours.

    An empty list or map asks for nothing, so it is unset too where nothing can be had; an empty list of what may come
    (`allowed_token_ids`, `choice`) cannot be served and is refused.
    """

    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    json_schema: str | None = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None


@dataclass(frozen=True)
class Message:
    """One turn of a chat; `content` is ordinary text, also where it spells a control token."""

    role: str
    content: str
    name: str | None = None
    """Who speaks, or the tool that answers, where the template tells them apart."""
    tool_call_id: str | None = None
    """Which call a tool's message answers."""
    tool_calls: Sequence[Mapping] | None = None
    """Calls of tools that an assistant's message made, as OpenAI's objects with parsed arguments."""


@dataclass(frozen=True)
class GenerateRequest:
    """One request as a front end hands it over.  Exactly one of prompt, prompt_token_ids, messages is set."""

    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[Message] | None = None
    tools: Sequence[Mapping] | None = None
    """Tools that the chat template shows to the model, as OpenAI's objects; only with messages."""
    sampling_params: SamplingParams = SamplingParams()
    request_id: str | None = None
    """Unset: the engine makes one.  An id that is running already is refused (ALREADY_EXISTS)."""
    lora_name: str | None = None
    priority: int | None = None
    """Lower runs first; unset is 0."""
    cache_salt: str | None = None
    bypass_prefix_cache: bool | None = None
    pooling: Pooling | None = None
    """Set: the answer is an embedding of the prompt.  Only with max_tokens = 0."""
    deadline: float | None = None
    """`time.monotonic()` after which the client no longer waits."""
    tenant: str | None = None
    """The authenticated tenant, set by the server and never by the client."""


@dataclass(frozen=True)
class StructuredOutput:
    """The one of json_schema, json_object, regex, grammar and choice that was asked for."""

    field: str
    value: str | bool | tuple[str, ...]


@dataclass(frozen=True)
class Sampling:
    """`SamplingParams` after defaults and validation: every field has its final value and is supported."""

    temperature: float
    """0 is greedy."""
    top_p: float
    top_k: int
    """0 is off."""
    min_p: float
    seed: int
    """int64; drawn from the system where the client gave none."""
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    """The client's own; EOS ids are in `eos_token_ids`."""
    eos_token_ids: frozenset[int]
    """Ids that end the output as EOS; empty under ignore_eos."""
    banned_below_min_tokens: tuple[int, ...]
    """EOS and stop ids, masked while fewer than min_tokens have been generated."""
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int | None
    prompt_logprobs: int | None
    pooling: Pooling | None = None
    """Set by the engine: final hidden states of the prompt are wanted."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: every token."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed in the output."""
    structured: StructuredOutput | None = None
    grammar: Any = None
    """`structured`, compiled: a jserve.grammar.Grammar, set by the engine."""
    n: int = 1
    """Outputs that are sent."""
    best_of: int = 1
    """Outputs that are generated; where they are more than n, the best by mean logprob are sent, at the end."""
    beam_width: int = 1
    """Above 1: beam search, whose n best are sent at the end."""
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC

    @property
    def is_shaped(self) -> bool:
        """Whether it changes logits before temperature, beyond the ban of min_tokens."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        masks = self.logit_bias or self.allowed_token_ids or self.bad_words or self.structured
        return penalties != (1.0, 0.0, 0.0) or bool(masks)

    @property
    def may_jump(self) -> bool:
        """Tokens that its grammar leaves no choice about need not be sampled: nothing asks how probable they were, and
        nothing on the device counts them."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        counts = penalties != (1.0, 0.0, 0.0)
        return self.grammar is not None and self.logprobs is None and self.best_of == self.n and not counts


@dataclass(frozen=True)
class TokenLogprob:
    token_id: int
    logprob: float
    """Natural log; never below -9999."""
    rank: int
    """1 is the most probable token of the vocabulary."""
    text: str
    bytes: bytes


@dataclass(frozen=True)
class PositionLogprobs:
    """Log-probabilities at one position: the token that stands there and the k most probable, best first.

    `top` contains the chosen token too (k or k + 1 entries).
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass
class OutputDelta:
    """New text, ids and logprobs of one output; the last one of an index carries finish_reason."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    cumulative_logprob: float | None = None
    """Sum over the output's tokens; set with finish_reason."""


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class RequestMetrics:
    """Times are `jserve.clock.stamp()` seconds; None where the request never got there."""

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None
    queue_s: float | None
    """Seconds from arrival to first scheduled."""
    num_preemptions: int


@dataclass
class GenerateUpdate:
    """One item of a request's stream."""

    request_id: str
    outputs: list[OutputDelta] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One entry a prompt token, the first None; sent once, in the first update."""
    embedding: list[float] | None = None
    """Pooled hidden states, not scaled, where `pooling` asked for them; in the last update."""
    usage: Usage | None = None
    """Set on the last update of the stream only."""
    metrics: RequestMetrics | None = None
