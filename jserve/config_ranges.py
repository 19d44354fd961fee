"""Values that no machine and no model could make right, refused before anything is loaded.

What depends on the machine or the model is checked where it is known (`jserve.engine.settings`, `jserve.engine.pool_size`).
"""

from __future__ import annotations

from collections.abc import Callable

from jserve.config import BadUsage, Config

_DTYPES = ("float32", "bfloat16")
_ONE_OF = {
    "model.dtype": _DTYPES,
    "model.quantize": ("none", "int8"),
    "model.generation_config": ("auto", "none"),
    "kv.dtype": ("f32", "f16", "bf16", "int8", "fp8", "float32", "float16", "bfloat16"),
    "kv.preemption": ("auto", "recompute", "swap"),
    "scheduler.policy": ("fcfs", "priority", "shortest-remaining", "longest-prefix", "fair"),
    "kernel.attention": ("reference", "xla", "aligned", "llvm_cpu", "mosaic_tpu", "mosaic_gpu", "triton"),
    "server.log_format": ("text", "json"),
}


def _least(low: float) -> tuple[Callable[[float], bool], str]:
    return lambda value: value >= low, f"must be at least {low}" if low else "must be 0 or more"


_ABOVE_ZERO = lambda value: value > 0, "must be above 0"
_PORT = lambda value: 0 <= value <= 65535, "must be a port, 0 to 65535"
_SIZES = lambda values: values and min(values) >= 1, "must be sizes of at least 1"
_RANGES = {
    "model.context_length": _least(1),
    "kv.block_size": _least(1),
    "kv.num_blocks": (lambda value: value >= 2, "must be at least 2: one block is the dead one"),
    "kv.memory_fraction": (lambda value: 0 < value <= 1, "must be in (0, 1]"),
    "kv.memory_bytes": _ABOVE_ZERO,
    "kv.host_memory_bytes": _least(0),
    "kv.disk_bytes": _least(0),
    "scheduler.max_num_batched_tokens": _least(1),
    "scheduler.max_num_seqs": _least(1),
    "scheduler.max_waiting": _least(0),
    "scheduler.ageing_s": _ABOVE_ZERO,
    "scheduler.target_tbt_ms": _ABOVE_ZERO,
    "compile.token_buckets": _SIZES,
    "compile.sequence_buckets": _SIZES,
    "compile.num_threads": _least(1),
    "parallel.tensor_parallel_size": _least(1),
    "server.port": _PORT,
    "server.http_port": _PORT,
    "server.metrics_port": _PORT,
    "server.drain_timeout_s": _least(0),
    "server.max_message_bytes": _least(1),
    "server.max_concurrent_streams": _least(1),
}


def check_ranges(config: Config) -> None:
    """Raises BadUsage that names key and value; None (auto, unset) is always right."""
    for key, allowed in _ONE_OF.items():
        value = _value(config, key)
        if value is not None and value not in allowed:
            raise BadUsage(f"{key} = {value!r}: one of {', '.join(allowed)}")
    for key, (is_right, words) in _RANGES.items():
        value = _value(config, key)
        if value is not None and not is_right(value):
            shown = list(value) if isinstance(value, tuple) else value
            raise BadUsage(f"{key} = {shown}: {words}")


def _value(config: Config, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
