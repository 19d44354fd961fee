"""Makes a compile bundle: the plan of a config compiled without weights, for this machine or for a TPU that is not here.

`jserve.engine.build` starts an engine from one (compile.bundle).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jserve.config import Config, ConfigError
from jserve.engine.build import (
    Report,
    count_host_blocks,
    load_tokenizer,
    make_programs,
    pool_layouts,
    resolve_automatic,
    size_pool,
)
from jserve.models.registry import model_code
from jserve.models.spec import shapes
from jserve.runner.bundle import Bundle, check_free, write_bundle
from jserve.runner.compile_plan import make_compile_plan
from jserve.runner.compiler import compile_all
from jserve.runner.executable_store import environment_facts
from jserve.weights.checkpoint import open_checkpoint
from jserve.weights.load import LoadedModel
from pallas_kernels import targets


@dataclass(frozen=True)
class _Target:
    platform: str
    device: Any
    """A device, or the description of one."""
    mesh: jax.sharding.Mesh | None
    """Where the device is not here: what programs are lowered under."""


def compile_bundle(config: Config, out: str | Path, target: str | None = None, report: Report | None = None) -> Bundle:
    """Compiles every program of `config` and writes them to the new folder `out`.

    Reads the checkpoint's headers and tokenizer, not its weights.  `target` names a TPU generation to compile for without
    having one (libtpu is needed); None: this machine's device.
    Raises:
      ConfigError, ModelError, TokenizerError: one line that names what is wrong.
    """
    report = report or Report()
    out = Path(out).expanduser()
    check_free(out)
    found = _find(target)
    config = resolve_automatic(config, found.platform)
    if found.mesh is not None and config.kv.num_blocks is None:
        raise ConfigError("kv.num_blocks: how many blocks the pool has must be said for a device that is not here")
    checkpoint = open_checkpoint(config.model.path)
    model_config = checkpoint.config.with_context_length(config.model.context_length)
    quantize = None if config.model.quantize == "none" else config.model.quantize
    specs = model_code(model_config).param_specs(model_config, config.model.dtype, quantize=quantize)
    model = LoadedModel(
        model_config, shapes(specs), checkpoint.tokenizer_source, checkpoint.generation_defaults,
        checkpoint.eos_token_ids, checkpoint.digest,
    )  # fmt: skip
    plan = make_compile_plan(config)
    layouts = pool_layouts(model_config, config, found.platform)
    if found.mesh is None:
        memory = size_pool(model, config, found.platform, layouts, plan)
        report.line(str(memory))
        num_blocks, num_host_blocks = memory.num_blocks, count_host_blocks(config, memory)
    else:
        num_blocks, num_host_blocks = config.kv.num_blocks, int(config.kv.preemption != "recompute")
    tokenizer = load_tokenizer(model)
    programs = make_programs(model_config, config, plan, layouts, num_blocks, tokenizer.vocab_size, num_host_blocks)
    params = programs.served_shapes(model.params)
    report.line(f"compile plan: {plan}")
    jobs = {name: functools.partial(_under, found.mesh, lower) for name, lower in programs.jobs(params).items()}
    executables = compile_all(
        jobs, config.compile.num_threads, lambda done, total: report.progress("compile", done, total),
        options=programs.compiler_options,
    )  # fmt: skip
    facts = {**environment_facts(found.device), **programs.facts(params)}
    return write_bundle(out, facts, num_blocks, ((str(name), compiled) for name, compiled in executables.items()))


def _find(target: str | None) -> _Target:
    if target is None:
        return _Target(jax.default_backend(), jax.devices()[0], None)
    if target not in targets.SINGLE_DEVICE_TARGETS:
        raise ConfigError(f"--target {target}: one of {', '.join(targets.SINGLE_DEVICE_TARGETS)}")
    if not targets.has_tpu_compiler():
        raise ConfigError(f"--target {target}: needs the TPU compiler; try: pip install 'jserve[tpu]'")
    mesh = targets.mesh(target)
    return _Target("tpu", mesh.devices.flat[0], mesh)


def _under(mesh: jax.sharding.Mesh | None, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Lowered:
    """Lowers for the mesh's devices what names none itself."""
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        return lower()


