"""What the server asks of an engine.  `engine.async_engine.AsyncEngine` has it; tests put a scripted one in its place."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from jserve.config import Config
from jserve.request import GenerateRequest, GenerateUpdate


class ModelInfo(Protocol):
    """Facts of the served model and its engine, fixed once the engine is ready."""

    name: str
    path: str
    context_length: int
    vocab_size: int
    tokenizer: Any
    """A `jserve.tokenizer.Tokenizer`."""
    bos_token_id: int | None
    eos_token_ids: Sequence[int]
    dtype: str
    kv_dtype: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    generation_defaults: Mapping[str, Any]
    """Keys are fields of SamplingParams."""
    capabilities: Mapping[str, bool]
    digest: str
    platform: str
    """cpu, gpu or tpu."""
    devices: Sequence[str]


class Loads(Protocol):
    num_running: int
    num_waiting: int
    kv_usage: float
    num_free_blocks: int
    num_total_blocks: int
    generated_tokens: int


class Engine(Protocol):
    info: ModelInfo
    config: Config
    """With every `auto` resolved."""

    @property
    def state(self) -> str:
        """starting, ready, draining or stopped."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateUpdate, None]:
        """Updates of one request.  RequestError where it is refused; closing (`aclose`) or cancelling it aborts.

        The last update has `usage`, also that of a request which `abort` ended.
        """

    async def abort(self, request_id: str) -> bool:
        """Whether such a request was waiting or running."""

    def loads(self) -> Loads: ...

    async def flush_cache(self) -> int:
        """Number of blocks forgotten."""

    async def check_integrity(self) -> list[str]:
        """One line a violation."""

    def begin_drain(self) -> None:
        """From now on `generate` raises UNAVAILABLE; what is waiting or running goes on."""

    async def close(self) -> None: ...
