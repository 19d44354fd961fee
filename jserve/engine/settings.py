"""Settings whose value depends on the platform or on other settings, and those that contradict each other.

The one place where "auto" becomes a value; the resolved values are stored in a new config.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax

from jserve.config import BadUsage, Config, ConfigError
from jserve.config_ranges import check_ranges
from jserve.models.config import ModelConfig
from jserve.runner.bundle import open_bundle
from jserve.runner.compile_plan import make_compile_plan
from jserve.sampling.validate import generation_defaults
from jserve.scheduler import PolicySettings
from jserve.scheduler.buckets import default_sequence_buckets
from jserve.scheduler.policies import parse_weights
from jserve.weights.load import LoadedModel
from pallas_kernels.cpu.ops import why_no_simd

KV_DTYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "int8": "int8", "fp8": "fp8",
    "float32": "float32", "float16": "float16", "bfloat16": "bfloat16",
}  # fmt: skip
"""What kv.dtype may be -> what it is called from then on."""


def check_settings(config: Config) -> None:
    """Raises the ConfigErrors that need no model."""
    make_compile_plan(resolve_automatic(config, jax.default_backend()))
    if config.compile.deterministic and config.kernel.attention not in (None, "aligned"):
        raise BadUsage(f"kernel.attention = {config.kernel.attention!r}: with compile.deterministic it is aligned")
    if config.compile.deterministic and config.parallel.tensor_parallel_size > 1:
        raise BadUsage("compile.deterministic = True: on one device only (parallel.tensor_parallel_size)")
    if (path := config.scheduler.step_log) is not None and not Path(path).absolute().parent.is_dir():
        raise BadUsage(f"scheduler.step_log = {path!r}: its folder does not exist")
    if path is not None and config.kv.disk_path is not None:
        raise BadUsage("scheduler.step_log and kv.disk_path: a replay cannot know when the disk answers; unset one")
    if config.compile.bundle is not None and "://" not in config.compile.bundle:
        open_bundle(config.compile.bundle)


def resolve_automatic(config: Config, platform: str) -> Config:
    """Fills every None that depends on the platform; checks the values that nothing later would.

    Raises:
      ConfigError: naming key and value.
    """
    check_ranges(config)
    on_cpu = platform == "cpu"

    def default(section: str, **values: object) -> None:
        nonlocal config
        current = getattr(config, section)
        config = config.replace(section, **{k: v for k, v in values.items() if getattr(current, k) is None})

    default("model", dtype="float32" if on_cpu else "bfloat16")
    default("kv", dtype=_kv_dtype_on_cpu(config) if on_cpu else config.model.dtype)
    default("scheduler", max_num_seqs=64 if on_cpu else 256)
    budget = 512 if on_cpu else 2048
    if config.compile.deterministic:  # tiles gain nothing from large steps, and the one program moves all its rows
        budget = max(128, config.scheduler.max_num_seqs)
    default("scheduler", max_num_batched_tokens=budget)
    if on_cpu and config.model.dtype == "bfloat16" and not (config.compile.deterministic or config.model.quantize != "none"):
        # XLA's matrix-vector product in bfloat16 takes ten times as long as a product of 8 rows.
        rows = default_sequence_buckets(min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens))
        default("compile", sequence_buckets=rows[1:] or rows)
    default("compile", num_threads=os.cpu_count() or 1)
    config = config.replace("kv", dtype=KV_DTYPES[config.kv.dtype])
    if config.kv.dtype == "int8" and not on_cpu:
        raise BadUsage(
            f"kv.dtype = 'int8': needs scales, which only the CPU's pool has; on {platform} fp8 has one byte and none"
        )
    policy_settings(config)
    return config


def _kv_dtype_on_cpu(config: Config) -> str:
    """float32; with int8 matrices bfloat16 where the CPU's own kernel reads it: attention is half of a step then, and bound by the
    bytes of keys and values, and what rounding them changes is a tenth of what int8 does."""
    is_own = config.kernel.attention in (None, "llvm_cpu") and not config.compile.deterministic
    return "bfloat16" if config.model.quantize == "int8" and is_own and why_no_simd() is None else "float32"


def resolve_block_size(config: Config, shard: ModelConfig, platform: str) -> Config:
    """Fills kv.block_size; `shard` is the part of the model that one device runs."""
    if config.kv.block_size is not None:
        return config
    if platform == "cpu":
        return config.replace("kv", block_size=32)
    # A block of a single head is so small a copy that its start shows.
    return config.replace("kv", block_size=128 if platform == "tpu" and shard.num_kv_heads == 1 else 64)


def policy_settings(config: Config) -> PolicySettings:
    """Who goes first and which gap steps keep.  ConfigError names key and value."""
    section = config.scheduler
    try:
        weights = parse_weights(section.tenant_weights)
    except ValueError as error:
        raise BadUsage(f"scheduler.tenant_weights = {section.tenant_weights!r}: {error}") from None
    target_s = None if section.target_tbt_ms is None else section.target_tbt_ms / 1e3
    return PolicySettings(section.policy, section.ageing_s, weights, target_s)


def read_generation_defaults(config: Config, model: LoadedModel) -> dict[str, float]:
    """Sampling values that fill unset fields.

    Raises:
      ConfigError: the model's generation_config has a value that no request could have.
    """
    if config.model.generation_config == "none":
        return {}
    try:
        return generation_defaults(model.generation_defaults)
    except ValueError as error:
        raise ConfigError(f"{error} (--generation-config none ignores the model's values)") from None
