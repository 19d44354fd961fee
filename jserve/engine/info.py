"""What an engine says about itself: the model it serves, its sizes, its load.  Read by GetModelInfo, GetLoads and people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelInfo:
    """Facts that do not change after start."""

    tokenizer: Tokenizer
    name: str
    path: str
    family: str
    context_length: int
    vocab_size: int
    """Rows of the embedding: ids from 0 up to here may stand in a prompt."""
    num_parameters: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    kv_dtype: str
    block_size: int
    num_blocks: int
    """Without the dead block, as Loads.num_total_blocks."""
    max_num_seqs: int
    max_num_batched_tokens: int
    generation_defaults: Mapping[str, object]
    """Sampling values of the model's generation_config that fill unset fields."""
    capabilities: Mapping[str, bool]
    """Every field of SamplingParams: whether this build serves it."""
    has_chat_template: bool
    digest: str
    """SHA-256 over the weights."""
    platform: str
    devices: tuple[str, ...]
    attention: str
    """The attention implementation in use."""


@dataclass(frozen=True)
class Loads:
    """What the engine is doing now."""

    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of the pool's blocks that running sequences own, 0..1."""
    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """Blocks that nobody owns but the prefix cache still finds."""
    num_saved_blocks: int
    """Blocks that running sequences would need on top of the used ones if none were shared."""
    num_preemptions: int
    num_swap_preemptions: int
    """Of these: by moving KV to host memory; the others drop and recompute it."""
    preempted_tokens_lost: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    host_tier_hit_tokens: int
    disk_tier_hit_tokens: int
    """Prompt tokens whose KV came back from host memory or disk."""
    num_host_cached_blocks: int
    """Blocks in which the prefix cache finds something in host memory."""
    host_tier_saved_bytes: int
    host_tier_loaded_bytes: int
    disk_tier_saved_bytes: int
    disk_tier_loaded_bytes: int
    """Moved for the prefix cache: between device and host memory, and between host memory and disk."""
    num_steps: int
    prompt_tokens: int
    generated_tokens: int
    prefix_cache_queried_tokens: int
    prefix_cache_hit_tokens: int
    scheduled_tokens: int
    padded_tokens: int
    compiles_after_ready: int
    requests_accepted: int
    requests_refused: int
    requests_stopped: int
    requests_length: int
    requests_aborted: int
    requests_failed: int
