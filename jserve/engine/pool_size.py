"""Whether a model fits, and how many blocks the KV pool and host memory get: arithmetic before anything is loaded."""

from __future__ import annotations

import jax.numpy as jnp

from jserve.config import Config, ConfigError
from jserve.engine.settings import resolve_block_size
from jserve.models.config import LayerGroup, ModelConfig, ModelError
from jserve.models.registry import model_code
from jserve.models.spec import shapes
from jserve.parallel.placement import Placement
from jserve.runner.compile_plan import SCORED_ROWS, CompilePlan, make_compile_plan
from jserve.runner.memory import GroupMemory, MemoryPlan, available_host_bytes, plan_memory
from jserve.sampling.shaping import BYTES_PER_ID
from jserve.scheduler.seating import STEP_TOKENS
from jserve.weights.checkpoint import Checkpoint
from jserve.weights.errors import WeightsError
from pallas_kernels.paged_attention import PoolLayout, layout

MOST_HOST_BYTES = 4 * 2**30
"""Of host memory for swapping, where nothing else is asked."""


def check_model_fits(
    checkpoint: Checkpoint, config: Config, placement: Placement, device_bytes: int | None = None
) -> tuple[Config, MemoryPlan]:
    """Refuses, before weights are read, a model that does not divide or does not fit.

    Returns:
      The config with its block size, and the memory plan as far as it can be told without the weights.
    Raises:
      ConfigError, WeightsError: with the numbers.
    """
    try:
        model = checkpoint.config.with_context_length(config.model.context_length)
        code = model_code(model)
    except ModelError as error:
        raise WeightsError(f"{checkpoint.path}: {error}") from None
    try:
        shard = model.shard(placement.num_shards, placement.axis)
    except ModelError as error:
        raise ConfigError(f"parallel.{error}") from None
    config = resolve_block_size(config, shard, placement.devices[0].platform)
    specs = code.param_specs(model, config.model.dtype, placement.num_shards, quantization(config))
    weight_bytes = placement.bytes_per_device(shapes(specs, placement))
    plan = make_compile_plan(config)
    return config, size_pool(
        model, weight_bytes, config, placement, plan, is_loaded=False, device_bytes=device_bytes
    )


def pool_layouts(model: ModelConfig, config: Config, placement: Placement) -> tuple[PoolLayout, ...]:
    """One pool layout per layer group, of the part that one device has."""
    shard, platform = model.shard(placement.num_shards, placement.axis), placement.devices[0].platform
    dtype = jnp.dtype(jnp.float8_e4m3fn if config.kv.dtype == "fp8" else config.kv.dtype)
    scaled = dtype.itemsize == 1 and platform == "cpu"
    one = layout(platform, shard.num_kv_heads, shard.head_dim, config.kv.block_size, dtype, scaled)
    return (one,) * len(model.layer_groups)


def size_pool(
    model: ModelConfig,
    weight_bytes: int,
    config: Config,
    placement: Placement,
    plan: CompilePlan,
    *,
    is_loaded: bool = True,
    device_bytes: int | None = None,
) -> MemoryPlan:
    """How many blocks the pool gets, of each device's memory alike.

    Args:
      weight_bytes: of one device.
      is_loaded: whether the weights are in memory already, which shows on a CPU only.
      device_bytes: of one device; None: it is asked.
    """
    platform = placement.devices[0].platform
    if device_bytes is None and platform == "cpu":  # devices of one host's memory
        device_bytes = available_host_bytes() // placement.num_shards - (0 if is_loaded else weight_bytes)
    elif device_bytes is None:
        device_bytes = min(device.memory_stats()["bytes_limit"] for device in placement.devices)
    layouts = pool_layouts(model, config, placement)
    return plan_memory(
        config.kv,
        platform=platform,
        device_bytes=device_bytes,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes(model.shard(placement.num_shards, placement.axis), plan),
        groups=group_memory(model, config, layouts, plan),
        block_size=config.kv.block_size,
        num_devices=placement.num_shards,
    )


def shortfall(memory: MemoryPlan, context_length: int) -> str | None:
    """What to say where the pools hold no sequence as long as the context."""
    most = memory.most_tokens(STEP_TOKENS)
    if most is None or most >= context_length:
        return None
    return (
        f"the KV pool holds {most:,} tokens of one sequence and the context is {context_length:,}: longer prompts are"
        " refused, longer outputs end with LENGTH"
    )


def group_memory(
    model: ModelConfig, config: Config, layouts: tuple[PoolLayout, ...], plan: CompilePlan
) -> tuple[GroupMemory, ...]:
    """What each layer group's blocks take; how many there are is not decided yet."""
    return tuple(
        GroupMemory(
            num_layers=group.num_layers,
            bytes_per_block=layout.bytes_per_block(group.num_layers),
            window=group.sliding_window,
            most_blocks=_most_blocks(group, config, plan) if len(layouts) > 1 else None,
        )
        for layout, group in zip(layouts, model.layer_groups)
    )


def _most_blocks(group: LayerGroup, config: Config, plan: CompilePlan) -> int | None:
    """Blocks of a window group that are of use beside a group that keeps everything: twice what all slots can hold at
    once, with two steps' tokens; the second half is for what the prefix cache may find."""
    if group.sliding_window is None:
        return None
    size, budget = config.kv.block_size, config.scheduler.max_num_batched_tokens
    return 1 + 2 * (plan.num_slots * (-(-group.sliding_window // size) + 2) + 2 * -(-budget // size))


def activation_bytes(model: ModelConfig, plan: CompilePlan) -> int:
    """An upper estimate of what one step needs besides weights and pool, in float32; `model` is what one device runs.

    The widest layer of the largest step, three times (input, output, gate and up), the logits of the largest sampler
    three times (raw, processed, one temporary), and the rows of penalties and bias.
    """
    widest = max(4 * model.d_model, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim, 2 * model.d_ff)
    step = 3 * plan.token_buckets[-1] * widest
    logits = 3 * max(plan.num_slots, SCORED_ROWS) * model.vocab_size
    return 4 * (step + logits) + BYTES_PER_ID * (plan.num_slots + 1) * model.vocab_size


def count_host_blocks(config: Config, pool_bytes: int, bytes_per_block: int) -> int:
    """Blocks of all layer groups that host memory takes for swapping and for cached prefixes; bytes of all devices
    together."""
    if config.kv.preemption == "recompute" and not (config.kv.prefix_cache and config.kv.host_tier):
        return 0
    size = config.kv.host_memory_bytes
    if size is None:
        size = min(pool_bytes, MOST_HOST_BYTES, available_host_bytes() // 4)
    return size // bytes_per_block


def quantization(config: Config) -> str | None:
    return None if config.model.quantize == "none" else config.model.quantize
