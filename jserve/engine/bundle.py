"""Makes a compile bundle: the plan of a config compiled without weights, for this machine or a TPU that is not here.

`jserve.engine.build` starts an engine from one (compile.bundle).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

import jax

from jserve.config import BadUsage, Config, ConfigError
from jserve.engine.build import Report, load_tokenizer, make_programs, place
from jserve.engine.pool_size import check_model_fits, count_host_blocks, pool_layouts
from jserve.engine.settings import resolve_automatic
from jserve.models.registry import model_code
from jserve.models.spec import shapes
from jserve.parallel.placement import Placement, on_devices
from jserve.planner.devices import find_target
from jserve.runner.bundle import Bundle, check_free, write_bundle
from jserve.runner.compile_plan import make_compile_plan
from jserve.runner.compiler import compile_all
from jserve.runner.executable_store import environment_facts
from jserve.weights.checkpoint import open_checkpoint
from jserve.weights.load import LoadedModel, packs, with_packed
from pallas_kernels import targets


def compile_bundle(config: Config, out: str | Path, target: str | None = None, report: Report | None = None) -> Bundle:
    """Compiles every program of `config` and writes them to the new folder `out`.

    Reads the checkpoint's headers and tokenizer, not its weights.  `target` names a TPU to compile for without having
    one (libtpu is needed); None: this machine's devices.
    Raises:
      ConfigError, ModelError, TokenizerError: one line that names what is wrong.
    """
    report = report or Report()
    out = Path(out).expanduser()
    check_free(out)
    is_here = target is None
    placement = place(config) if is_here else _place(target, config.parallel.tensor_parallel_size)
    if not is_here and placement.num_shards > 1 and config.compile.num_threads is None:
        # Two threads that compiled for a slice at once have crashed libtpu 0.0.42.1.
        config = config.replace("compile", num_threads=1)
    config = resolve_automatic(config, placement.devices[0].platform)
    if not is_here and config.kv.num_blocks is None:
        raise BadUsage("kv.num_blocks: how many blocks the pool has must be said for a device that is not here")
    checkpoint = open_checkpoint(config.model.path)
    device_bytes = None if is_here else int(find_target(target).memory_bytes)
    config, memory = check_model_fits(checkpoint, config, placement, device_bytes)
    report.line(str(memory))
    model_config = checkpoint.config.with_context_length(config.model.context_length)
    quantize = None if config.model.quantize == "none" else config.model.quantize
    specs = model_code(model_config).param_specs(model_config, config.model.dtype, placement.num_shards, quantize)
    if config.model.keep_packed and packs(checkpoint, placement, config.model.dtype, quantize):
        specs = with_packed(specs, checkpoint)
    model = LoadedModel(
        model_config, shapes(specs, placement), checkpoint.tokenizer_source, checkpoint.generation_defaults,
        checkpoint.eos_token_ids, checkpoint.digest,
    )  # fmt: skip
    plan = make_compile_plan(config)
    layouts, group_blocks = pool_layouts(model_config, config, placement), tuple(g.num_blocks for g in memory.groups)
    if is_here:
        num_shards = placement.num_shards
        num_host_blocks = count_host_blocks(config, memory.pool_bytes * num_shards, memory.bytes_per_block * num_shards)
    else:
        num_host_blocks = int(config.kv.preemption != "recompute")
    tokenizer = load_tokenizer(model)
    programs = make_programs(
        model_config, config, plan, layouts, group_blocks, tokenizer.vocab_size, num_host_blocks, placement
    )
    params = programs.served_shapes(model.params)
    elsewhere = None if is_here else placement
    jobs = {name: functools.partial(_under, elsewhere, lower) for name, lower in programs.jobs(params).items()}
    report.line(f"compile plan: {plan}; {len(jobs)} executables in all")
    executables = compile_all(
        jobs, config.compile.num_threads, lambda done, total: report.progress("compile", done, total),
        options=programs.compiler_options, devices=placement.devices,
    )  # fmt: skip
    facts = {**environment_facts(placement.devices[0]), **programs.facts(params)}
    named = ((str(name), compiled) for name, compiled in executables.items())
    return write_bundle(out, facts, max(group_blocks), named)


def _place(target: str, num_devices: int) -> Placement:
    """Devices that are not here."""
    if target not in targets.TPU_TARGETS:
        raise BadUsage(f"--target {target}: one of {', '.join(targets.TPU_TARGETS)}")
    if not targets.has_tpu_compiler():
        raise ConfigError(f"--target {target}: needs the TPU compiler; try: pip install 'jserve[tpu]'")
    devices = targets.devices(target)
    if num_devices > len(devices):
        raise BadUsage(f"parallel.tensor_parallel_size = {num_devices}: {target} has {len(devices)} devices")
    return on_devices(devices[:num_devices])


def _under(placement: Placement | None, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Lowered:
    """Lowers, on devices that are not here, what names none itself."""
    with contextlib.nullcontext() if placement is None else jax.set_mesh(placement.mesh):
        return lower()
