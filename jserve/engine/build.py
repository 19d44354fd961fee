"""Builds an engine from a config: resolves what is automatic, loads the model, sizes the pool, compiles the plan."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import jax

from jserve.config import BadUsage, Config, ConfigError
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.info import ModelInfo
from jserve.engine.loop import EngineLoop
from jserve.engine.pool_size import (
    check_model_fits,
    count_host_blocks,
    pool_layouts,
    quantization,
    shortfall,
    size_pool,
)
from jserve.engine.settings import check_settings, policy_settings, read_generation_defaults, resolve_automatic
from jserve.engine.step_log import KvSettings, StepLog
from jserve.engine.streams import OutputThread
from jserve.engine.tier_end import keep_cached
from jserve.kv import BlockManager
from jserve.kv.block_keys import root_key
from jserve.metrics import Histograms, RequestCounts
from jserve.models.config import ModelConfig
from jserve.models.inputs import attention_spec
from jserve.models.registry import model_code
from jserve.models.spec import num_parameters
from jserve.parallel.placement import Placement, on_devices
from jserve.runner.bundle import Bundle, open_bundle
from jserve.runner.compile_plan import CompilePlan, make_compile_plan
from jserve.runner.compiler import CompileCounter
from jserve.runner.executable_store import ExecutableStore, environment_facts, fingerprint
from jserve.runner.memory import MemoryPlan
from jserve.runner.model_runner import ModelRunner
from jserve.runner.programs import ProgramSet
from jserve.sampling.fields import SUPPORTED
from jserve.sampling.limits import ModelLimits
from jserve.scheduler import PreemptionSettings, Scheduler, SchedulerLimits
from jserve.scheduler.seating import STEP_TOKENS
from jserve.tiers.disk_store import DiskStore
from jserve.tokenizer import Tokenizer, TokenizerError, from_folder, from_gguf
from jserve.weights import manifest
from jserve.weights.checkpoint import open_checkpoint
from jserve.weights.load import LoadedModel, load_model
from jserve.weights.remote import from_bucket
from pallas_kernels.paged_attention import PoolLayout, choose


class Report:
    """Where a start tells of itself: `line` for what stays to be read, `progress` for (phase, done, total)."""

    def __init__(
        self,
        line: Callable[[str], None] = lambda text: None,
        progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
    ):
        self.line = line
        self.progress = progress


def build_engine(config: Config, report: Report | None = None) -> AsyncEngine:
    """A started engine: weights loaded, pool allocated, every planned program compiled.

    Args:
      config: model.path is a path on disk (see `weights.fetch`).
    Raises:
      ConfigError, ModelError, TokenizerError: one line that names what is wrong.
    """
    report = report or Report()
    platform = jax.default_backend()
    if platform not in ("cpu", "gpu", "tpu"):
        raise ConfigError(f"jax runs on {platform!r}; cpu, gpu and tpu are supported")
    check_settings(config)
    config = resolve_automatic(config, platform)
    if config.model.verify:
        manifest.verify(Path(config.model.path), lambda done, total: report.progress("verify weights", done, total))
    placement = place(config)
    report.line(f"loading {config.model.path} as {config.model.dtype} on {describe(placement)}")
    checkpoint = open_checkpoint(config.model.path)
    config, _ = check_model_fits(checkpoint, config, placement)
    model = load_model(
        checkpoint,
        config.model.dtype,
        quantize=quantization(config),
        context_length=config.model.context_length,
        placement=placement,
        progress=lambda done, total: report.progress("load weights", done, total),
        keep_packed=config.model.keep_packed,
    )
    return assemble_engine(config, model, load_tokenizer(model), report, placement)


def place(config: Config) -> Placement:
    """The devices that share the model.  ConfigError where there are fewer."""
    wanted, devices = config.parallel.tensor_parallel_size, jax.local_devices()
    if wanted > len(devices):
        raise ConfigError(
            f"parallel.tensor_parallel_size = {wanted}: this machine has {len(devices)} {devices[0].device_kind} devices"
        )
    return on_devices(devices[:wanted])


def describe(placement: Placement) -> str:
    platform, count = placement.devices[0].platform, placement.num_shards
    return platform if count == 1 else f"{count} {platform} devices"


def _bundle_on_disk(config: Config, report: Report) -> str | Path:
    if "://" not in config.compile.bundle:
        return config.compile.bundle
    cache_dir = Path(config.compile.cache_dir).expanduser()
    return from_bucket(config.compile.bundle, cache_dir, report.line, setting="compile.bundle")


def assemble_engine(
    config: Config, model: LoadedModel, tokenizer: Tokenizer, report: Report, placement: Placement
) -> AsyncEngine:
    """A started engine around a model in memory; `config` is resolved."""
    counter = CompileCounter(forbid=config.compile.forbid_compile)
    plan = make_compile_plan(config)
    layouts = pool_layouts(model.config, config, placement)
    bundle = None if config.compile.bundle is None else open_bundle(_bundle_on_disk(config, report))
    if bundle is not None and config.kv.num_blocks is None and config.kv.memory_bytes is None:
        config = config.replace("kv", num_blocks=bundle.num_blocks)  # what its programs were made for
    memory = size_pool(model.config, placement.bytes_per_device(model.params), config, placement, plan)
    for line in str(memory).splitlines():
        report.line(line)
    if line := shortfall(memory, model.config.context_length):
        report.line(line)
    bytes_per_block = memory.bytes_per_block * placement.num_shards  # of all devices
    num_host_blocks = count_host_blocks(config, memory.pool_bytes * placement.num_shards, bytes_per_block)
    if num_host_blocks:
        size = num_host_blocks * bytes_per_block
        report.line(f"host memory: {num_host_blocks} blocks = {size / 2**30:.2f} GiB for swapping and cached prefixes")
    disk = open_disk(config, num_host_blocks, report)

    kv = KvSettings(
        windows=tuple(group.sliding_window for group in model.config.layer_groups),
        num_blocks=tuple(group.num_blocks for group in memory.groups),
        block_size=config.kv.block_size,
        num_slots=plan.num_slots,
        max_blocks_per_seq=math.ceil(model.config.context_length / config.kv.block_size),
        prefix_cache=config.kv.prefix_cache,
        num_host_blocks=(num_host_blocks + 1,) * len(layouts) if num_host_blocks else None,
        host_tier=config.kv.host_tier,
    )
    programs = make_programs(
        model.config, config, plan, layouts, kv.num_blocks, tokenizer.vocab_size, num_host_blocks, placement
    )
    key = root_key(
        # Another version may compute other keys and values, and who promises the same bits wants those of its own programs.
        program=fingerprint(environment_facts(placement.devices[0])),
        attention=programs.implementation,
        model=model.digest,
        dtype=f"{config.model.dtype} {config.model.quantize}",
        kv_dtype=config.kv.dtype,
        layouts=repr([(one, group.num_layers) for one, group in zip(layouts, model.config.layer_groups)]),
    )
    blocks = kv.make(key, disk)
    if plan.num_slots < config.scheduler.max_num_seqs:
        report.line(
            f"scheduler.max_num_seqs = {config.scheduler.max_num_seqs}: {plan.num_slots} run at once, as every step has a"
            f" token for each (scheduler.max_num_batched_tokens = {config.scheduler.max_num_batched_tokens})"
        )
    runner = _ready_runner(config, programs, model, blocks, bundle, report)
    if disk is not None:
        disk.attach(runner.host_blocks.bytes_of)
    return _wire(config, model, tokenizer, plan, memory, kv, blocks, disk, runner, counter, programs)


def _ready_runner(
    config: Config, programs: ProgramSet, model: LoadedModel, blocks: BlockManager, bundle: Bundle | None, report: Report
) -> ModelRunner:
    """A runner whose programs have run once.  Where executables of an earlier start fail, all are compiled again."""
    params = programs.serve_params(model.params)
    report.line(f"compile plan: {programs.plan}; {len(programs.jobs(params))} executables in all")
    facts = {**environment_facts(programs.placement.devices[0]), **programs.facts(params)}
    if bundle is None:
        phase, store = "compile", ExecutableStore(os.path.join(config.compile.cache_dir, "executables"), fingerprint(facts))
    else:
        bundle.check(facts)
        phase, store = "load bundle", bundle

    def make_programs_ready() -> None:
        programs.compile(
            params, config.compile.num_threads, lambda done, total: report.progress(phase, done, total), store
        )

    make_programs_ready()
    runner = ModelRunner(programs, params, blocks.tables, jumps=config.scheduler.jump_ahead)
    try:
        runner.warm_up()
    except jax.errors.JaxRuntimeError as error:
        if bundle is not None:
            raise ConfigError(
                f"compile.bundle = {str(bundle.folder)!r}: its programs do not run here ({error}); make it again"
            ) from None
        report.line(f"kept executables failed ({error}); compiling all of them again")
        store.forget()
        make_programs_ready()
        runner.reset()
        runner.warm_up()
    return runner


def open_step_log(config: Config, scheduler: Scheduler, kv: KvSettings) -> StepLog | None:
    """The log of scheduler.step_log.  ConfigError where the file cannot be written."""
    if config.scheduler.step_log is None:
        return None
    try:
        return StepLog(config.scheduler.step_log, scheduler, kv)
    except OSError as error:
        raise ConfigError(f"scheduler.step_log = {config.scheduler.step_log!r}: {error.strerror}") from None


def load_tokenizer(model: LoadedModel) -> Tokenizer:
    """The tokenizer that came with the weights.

    Raises:
      TokenizerError: there is none, or it has ids that the embedding lacks.
    """
    source = model.tokenizer_source
    tokenizer = from_folder(source) if isinstance(source, os.PathLike) else from_gguf(source)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the embedding only {model.config.vocab_size} rows"
        )
    return tokenizer


def make_programs(
    model: ModelConfig,
    config: Config,
    plan: CompilePlan,
    layouts: tuple[PoolLayout, ...],
    num_blocks: tuple[int, ...],
    num_real_tokens: int,
    num_host_blocks: int,
    placement: Placement,
) -> ProgramSet:
    """The programs of a resolved config, not yet compiled."""
    groups = model.layer_groups
    asked = "aligned" if config.compile.deterministic else config.kernel.attention
    implementations = {
        choose(one.platform, one, attention_spec(model, group), asked)
        for one, group in zip(layouts, groups)
    }
    if len(implementations) != 1:
        raise BadUsage(f"kernel.attention: the layer groups need different ones: {', '.join(sorted(implementations))}")
    return ProgramSet(
        model,
        plan,
        layouts=layouts,
        pool_shapes=tuple(
            placement.pool_shape(one.shape(group.num_layers, count))
            for one, group, count in zip(layouts, groups, num_blocks)
        ),
        implementation=implementations.pop(),
        max_blocks=math.ceil(model.context_length / config.kv.block_size),
        num_real_tokens=num_real_tokens,
        num_host_blocks=num_host_blocks,
        poisons_freed=config.kv.poison_freed,
        placement=placement,
    )


def open_disk(config: Config, num_host_blocks: int, report: Report) -> DiskStore | None:
    """The store of kv.disk_path.  ConfigError where nothing could be read from it or written to it."""
    if config.kv.disk_path is None:
        return None
    if not (config.kv.prefix_cache and config.kv.host_tier and num_host_blocks):
        raise BadUsage(
            f"kv.disk_path = {config.kv.disk_path!r}: blocks come and go through host memory, which needs "
            "kv.prefix_cache, kv.host_tier and room in kv.host_memory_bytes"
        )
    disk = DiskStore(config.kv.disk_path, config.kv.disk_bytes)
    report.line(
        f"disk: {disk.num_blocks} blocks = {disk.num_bytes / 2**30:.2f} of {config.kv.disk_bytes / 2**30:.2f} GiB in "
        f"{config.kv.disk_path}"
    )
    return disk


def _wire(
    config: Config,
    model: LoadedModel,
    tokenizer: Tokenizer,
    plan: CompilePlan,
    memory: MemoryPlan,
    kv: KvSettings,
    blocks: BlockManager,
    disk: DiskStore | None,
    runner: ModelRunner,
    counter: CompileCounter,
    programs: ProgramSet,
) -> AsyncEngine:
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
            token_buckets=plan.token_buckets,
            sequence_buckets=plan.sequence_buckets,
        ),
        blocks,
        policy=policy_settings(config),
        preemption=PreemptionSettings(config.kv.preemption, runner.swap_block_s),
    )
    scheduler.poisons_freed = config.kv.poison_freed
    eos_token_ids = tuple(model.eos_token_ids)
    defaults = read_generation_defaults(config, model)
    name = config.model.served_name or os.path.basename(os.path.normpath(config.model.path))
    counts, histograms = RequestCounts(), Histograms(name)
    outputs = OutputThread(lambda sequence, reason: loop.finish(sequence, reason), counts, histograms)
    loop = EngineLoop(
        scheduler,
        runner,
        outputs.put,
        overlap=config.scheduler.overlap,
        histograms=histograms,
        on_start=counter.watch_this_thread,
        on_stop=counter.stop,
        step_log=open_step_log(config, scheduler, kv),
        close_tiers=None if disk is None else lambda: keep_cached(blocks, runner, disk),
    )
    info = ModelInfo(
        tokenizer=tokenizer,
        name=name,
        path=config.model.path,
        family=model.config.family,
        context_length=model.config.context_length,
        vocab_size=model.config.vocab_size,
        num_parameters=num_parameters(model_code(model.config).param_specs(model.config, config.model.dtype)),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=eos_token_ids,
        dtype=config.model.dtype,
        kv_dtype=config.kv.dtype,
        block_size=config.kv.block_size,
        num_blocks=memory.num_usable_blocks,
        max_num_seqs=plan.num_slots,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        generation_defaults=defaults,
        capabilities=SUPPORTED | {"deterministic": config.compile.deterministic},
        has_chat_template=tokenizer.chat_template is not None,
        digest=model.digest,
        platform=jax.default_backend(),
        devices=tuple(str(device) for device in programs.placement.devices),
        attention=programs.implementation,
    )
    limits = ModelLimits(
        context_length=model.config.context_length,
        vocab_size=model.config.vocab_size,
        eos_token_ids=eos_token_ids,
        generation_defaults=defaults,
        max_pool_tokens=memory.most_tokens(STEP_TOKENS),
        block_size=config.kv.block_size,
        max_num_seqs=plan.num_slots,
        num_real_tokens=tokenizer.vocab_size,
        encode_word=lambda word: tokenizer.encode(word, add_special=False),
    )
    engine = AsyncEngine(
        info=info,
        config=config,
        limits=limits,
        tokenizer=tokenizer,
        scheduler=scheduler,
        loop=loop,
        outputs=outputs,
        counts=counts,
        histograms=histograms,
        max_waiting=config.scheduler.max_waiting,
        bytes_per_block=memory.bytes_per_block * programs.placement.num_shards // len(model.config.layer_groups),
        compiles_after_ready=lambda: counter.num_after_ready,
    )
    engine.start()
    return engine
