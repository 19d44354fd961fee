"""The compiled programs of one engine: forward, sampler and prompt scorer for every shape of the compile plan.

Only here do model, attention, sampler and pool meet under jit.  Every call goes to an executable that was compiled
before readiness.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.models.config import ModelConfig
from jserve.models.inputs import AttentionPlan
from jserve.models.packed import PackedMatrix
from jserve.models.quantized import QuantizedMatrix
from jserve.models.registry import model_code
from jserve.models.row_tiles import in_tiles
from jserve.parallel.placement import POOL, Placement, on_devices
from jserve.runner import sampling_rows
from jserve.runner.batch import InputLayout
from jserve.runner.block_programs import BlockPrograms
from jserve.runner.compile_plan import SCORED_ROWS, CompilePlan, SamplerShape, StepShape
from jserve.runner.compiler import compile_all
from jserve.runner.bundle import Bundle
from jserve.runner.executable_store import ExecutableStore
from jserve.runner.forward import ForwardPrograms, ServedParams, serve_params, served_shapes
from jserve.runner.sampled_columns import pack_columns
from jserve.runner.shaping_programs import ShapingPrograms
from jserve.sampling.beam_search import NUM_CANDIDATES
from jserve.sampling.prompt_scores import score_positions
from jserve.sampling.sampler import VARIANTS, SamplerVariant, sample
from jserve.sampling.scores import hide_unreal, largest, normalizer
from jserve.sampling.shaping import ShapingRows
from jserve.scheduler.buckets import bucket_for
from pallas_kernels.cpu.compiled import num_slots
from pallas_kernels.cpu.ops import register_kernels, register_scan, why_no_simd, why_no_tiles
from pallas_kernels.paged_attention import PoolLayout
from pallas_kernels.targets import step_compiler_options

CPU_OPTIONS = {
    "xla_cpu_parallel_codegen_split_count": 1, "xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 2
}  # fmt: skip
"""Of every CPU program but large layers, see ProgramSet.compiler_options."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """What a runner keeps on the device besides the parameters."""

    pools: tuple[jax.Array, ...]
    slot_tokens: jax.Array  # i32[num_slots + 1]; the last entry is the dead slot, which padding rows write to
    no_sums: jax.Array  # f32[num_slots, D], where `pool` starts
    shaping_rows: ShapingRows


class ProgramSet:
    """Builds, compiles and calls the programs of a CompilePlan."""

    def __init__(
        self,
        config: ModelConfig,
        plan: CompilePlan,
        *,
        layouts: tuple[PoolLayout, ...],
        pool_shapes: tuple[tuple[int, ...], ...],
        implementation: str,
        max_blocks: int,
        num_real_tokens: int,
        num_host_blocks: int = 0,
        poisons_freed: bool = False,
        placement: Placement | None = None,
    ):
        """
        Args:
          layouts: of the part of the pools that one device has; `pool_shapes` are of all devices together.
          num_host_blocks: host memory to swap to, in blocks of all layer groups; 0: no swapping.
          poisons_freed: blocks.poison will be called.
          placement: None is jax's default device.
        """
        self.plan = plan
        self.placement = placement or on_devices(jax.devices()[:1])
        self.num_slots = plan.num_slots
        self._model = model_code(config)
        self._config = config.shard(self.placement.num_shards, self.placement.axis)
        self._layouts = layouts
        self._pool_shapes = pool_shapes
        self.implementation = implementation
        self._num_real_tokens = num_real_tokens
        self._max_blocks = max_blocks
        self._input_layouts = {
            shape: InputLayout(shape, plan.num_slots, max_blocks, len(layouts)) for shape in plan.step_shapes
        }
        by_layer = layouts[0].platform == "cpu"
        self._forward = {
            shape: ForwardPrograms(
                self._model,
                self._config,
                layout,
                AttentionPlan(implementation, layouts, shape.decode_only, plan.row_tile),
                by_layer,
                self.placement,
            )
            for shape, layout in self._input_layouts.items()
        }
        self._by_layer = by_layer
        self.vocab_size = config.vocab_size
        self.shaping = ShapingPrograms(plan.num_slots, config.vocab_size, plan.sampler_rows, self.placement)
        self.blocks = BlockPrograms(layouts, pool_shapes, num_host_blocks, poisons_freed, self.placement)
        self._compiled: dict = {}
        self._compiled_forward: dict[StepShape, dict] = {}

    # -- device state

    def serve_params(self, params) -> ServedParams:
        """A model's parameter tree in the form that the programs take."""
        return serve_params(params, self._by_layer)

    def served_shapes(self, params) -> ServedParams:
        """The same of a tree of shapes."""
        return served_shapes(params, self._by_layer)

    def empty_state(self) -> DeviceState:
        """Zeros, by a program of the plan: an array filled on the side would be one more compile."""
        return self._compiled["state"]()

    def _state_shapes(self) -> DeviceState:
        shape_of = self.placement.shape
        return DeviceState(
            pools=tuple(
                shape_of(shape, layout.storage_dtype, POOL) for shape, layout in zip(self._pool_shapes, self._layouts)
            ),
            slot_tokens=shape_of((self.num_slots + 1,), jnp.int32),
            no_sums=shape_of((self.num_slots, self._config.d_model), jnp.float32),
            shaping_rows=self.shaping.rows_shape(),
        )

    # -- shapes

    def input_layout(self, shape: StepShape) -> InputLayout:
        return self._input_layouts[shape]

    # -- calls

    def forward(self, shape: StepShape, params: ServedParams, pools, slot_tokens, packed: np.ndarray):
        """Donates pools.  Returns hidden [T, D], sample_hidden [num_slots, D], pools."""
        return self._forward[shape](self._compiled_forward[shape], params, pools, slot_tokens, packed)

    def logits(self, num_rows: int, params: ServedParams, sample_hidden: jax.Array) -> jax.Array:
        """f32[sampler rows, V] of the first `num_rows`; zeros or padding below."""
        bucket = bucket_for(self.plan.head_rows, num_rows)
        return self._compiled["head", bucket](params.outer, sample_hidden, np.int32(num_rows))

    def sample(
        self,
        variant: SamplerVariant,
        logits: jax.Array,
        slot_tokens: jax.Array,
        packed: np.ndarray,
        shaped: jax.Array | None = None,
    ):
        """Returns the new slot_tokens and the packed output (see SampledColumns).

        Args:
          shaped: what penalties and masks made of the logits; None: nobody asks for any.
        """
        shaped = logits if shaped is None else shaped
        return self._compiled[SamplerShape(len(packed), variant)](logits, shaped, slot_tokens, packed)

    def beam_candidates(self, logits: jax.Array, rows: np.ndarray) -> jax.Array:
        """i32[at least len(rows), 2 * NUM_CANDIDATES]: ids and log-probabilities (their bits) behind some rows' beams."""
        num_rows = next(size for size in _beam_rows(len(logits)) if size >= len(rows))
        packed = np.zeros(num_rows, np.int32)
        packed[: len(rows)] = rows
        return self._compiled["beams", len(logits), num_rows](logits, packed)

    def score(self, shape: StepShape, params: ServedParams, hidden: jax.Array, packed: np.ndarray) -> jax.Array:
        """Scores prompt tokens: packed i32[2, SCORED_ROWS] holds flat positions and targets."""
        rows = self._compiled["select", shape](hidden, packed[0])
        return self._compiled["score"](params.outer, rows, packed[1])

    def pool(self, shape: StepShape, sums: jax.Array, hidden: jax.Array, packed: np.ndarray) -> jax.Array:
        """Adds hidden states to their sums: packed i32[2, SCORED_ROWS] holds flat positions and rows of `sums`,
        num_slots for padding."""
        rows = self._compiled["select", shape](hidden, packed[0])
        return self._compiled["pool"](sums, rows, packed[1])

    def run_each_once(self, params: ServedParams, state: DeviceState) -> DeviceState:
        """Donates state.  Runs the smallest step, sampler, scorer and copy on padding; returns the state unchanged."""
        pools, slot_tokens, shaping_rows = state.pools, state.slot_tokens, state.shaping_rows
        shape = self.plan.step_shapes[0]
        padding = np.zeros(self.input_layout(shape).size, np.int32)
        hidden, sample_hidden, pools = self.forward(shape, params, pools, slot_tokens, padding)
        logits = self.logits(self.plan.head_rows[0], params, sample_hidden)
        for variant in VARIANTS:
            packed = sampling_rows.padding(len(logits), self.num_slots)
            slot_tokens, _ = self.sample(variant, logits, slot_tokens, packed)
        shaping_rows = self.shaping.run_each_once(logits, shaping_rows, slot_tokens)
        self.beam_candidates(logits, np.zeros(1, np.int32))
        self.score(shape, params, hidden, np.zeros((2, SCORED_ROWS), np.int32))
        self.pool(shape, state.no_sums, hidden, np.full((2, SCORED_ROWS), [[0], [self.num_slots]], np.int32))
        pools = self.blocks.copy(pools, [(group, 0, 0) for group in range(len(pools))])
        return DeviceState(pools, slot_tokens, state.no_sums, shaping_rows)

    # -- compiling

    def compile(
        self,
        params: ServedParams,
        num_threads: int,
        progress: Callable[[int, int], None],
        store: ExecutableStore | Bundle | None = None,
    ) -> None:
        """Makes every program of the plan ready to run; `store` has executables of earlier starts."""
        if self._layouts[0].platform == "cpu":
            register_kernels(_encodings(params))
            if why_no_simd() is None:
                register_scan()
        self._compiled = compile_all(
            self.jobs(params), num_threads, progress, store, self.compiler_options, self.placement.devices
        )
        self.shaping.use(self._compiled)
        self.blocks.use(self._compiled)
        for shape in self._forward:
            self._compiled_forward[shape] = {
                key[1]: program for key, program in self._compiled.items() if isinstance(key, tuple) and key[0] == shape
            }

    def compiler_options(self, program: Any) -> dict[str, Any]:
        """On accelerators what `step_compiler_options` knows of them.  On CPU, where a start would otherwise be mostly
        compiling, what costs compile time and no speed is off: one LLVM module a program, no costly passes, and, where
        little is computed, the older and quicker emitter of elementwise code (which makes the layers of a step of 32 to
        64 tokens a tenth slower, of larger ones a third)."""
        if self._layouts[0].platform != "cpu":
            return step_compiler_options(self.placement.devices[0].device_kind)
        is_large = isinstance(program, tuple) and str(program[1]).startswith("layer") and program[0].num_tokens >= 32
        is_large &= self.plan.row_tile is None  # one emitter, one rounding, whatever the budget
        if is_large:
            return {"xla_cpu_parallel_codegen_split_count": 1, "xla_llvm_disable_expensive_passes": True}
        return CPU_OPTIONS

    def facts(self, params: ServedParams) -> dict[str, str]:
        """What decides which programs these are, by name; `params` may be shapes."""
        facts = {f"model.{field.name}": repr(getattr(self._config, field.name)) for field in fields(self._config)}
        facts |= {f"compile plan.{field.name}": repr(getattr(self.plan, field.name)) for field in fields(self.plan)}
        facts |= {"pool layouts": repr(self._layouts), "pool shapes": repr(self._pool_shapes)}
        facts |= {"attention": self.implementation, "tokens of the tokenizer": repr(self._num_real_tokens)}
        facts |= {"blocks of a sequence": repr(self._max_blocks)}
        if self._layouts[0].platform == "cpu":
            facts |= {"no SIMD": repr(why_no_simd())}
            facts |= {"no matrix tiles": repr(why_no_tiles()), "encodings": repr(sorted(_encodings(params)))}
            facts |= {"threads of a kernel": repr(num_slots())}  # a program's scratch memory is for so many
        layers = params.layers[0] if params.by_layer else params.layers
        for path, leaf in jax.tree_util.tree_leaves_with_path((params.outer, layers)):
            facts[f"parameter {jax.tree_util.keystr(path)}"] = f"{leaf.dtype}{list(leaf.shape)}{_spread(leaf.sharding)}"
        return facts

    def jobs(self, params: ServedParams) -> dict:
        """program -> function that lowers it; the parts of a forward pass are (shape, name of the part)."""
        params = params.shapes()
        shape_of, lowering = self.placement.shape, self.placement.lowering
        i32 = lambda *size: shape_of(size, jnp.int32)
        pools = tuple(
            shape_of(shape, layout.storage_dtype, POOL) for shape, layout in zip(self._pool_shapes, self._layouts)
        )
        width, dtype = self._config.d_model, params.outer.final_norm.dtype
        slot_tokens = i32(self.num_slots + 1)
        sample_hidden = shape_of((self.num_slots, width), dtype)
        jobs: dict = {"state": self._lowering_of_zeros(self._state_shapes())}
        # Largest first: the last thread to finish should not hold the longest job.
        for shape in sorted(self.plan.step_shapes, key=lambda s: -s.num_tokens):
            packed = i32(self.input_layout(shape).size)
            for part, lower in self._forward[shape].jobs(params, pools, slot_tokens, packed).items():
                jobs[shape, part] = lower
            hidden = shape_of((shape.num_tokens, width), dtype)
            jobs["select", shape] = lowering(_select_rows, (hidden, i32(SCORED_ROWS)))
        for rows in self.plan.head_rows:
            jobs["head", rows] = lowering(self._head_program(rows), (params.outer, sample_hidden, i32()))
        for sampler_shape in sorted(self.plan.sampler_shapes, key=lambda s: -s.num_rows):
            packed = i32(sampler_shape.num_rows, sampling_rows.NUM_COLUMNS)
            logits = shape_of((sampler_shape.num_rows, self._config.vocab_size), jnp.float32)
            jobs[sampler_shape] = lowering(self._sampler_program(sampler_shape), (logits, logits, slot_tokens, packed))
        for rows in self.plan.sampler_rows:
            logits = shape_of((rows, self._config.vocab_size), jnp.float32)
            for beams in _beam_rows(rows):
                jobs["beams", rows, beams] = lowering(self._beam_program, (logits, i32(beams)))
        jobs |= self.shaping.jobs()
        rows = shape_of((SCORED_ROWS, width), dtype)
        jobs["score"] = lowering(self._score_program, (params.outer, rows, i32(SCORED_ROWS)))
        sums = shape_of((self.num_slots, width), jnp.float32)
        jobs["pool"] = lowering(_add_rows, (sums, rows, i32(SCORED_ROWS)))
        jobs |= self.blocks.jobs(pools)
        return jobs

    def _lowering_of_zeros(self, shapes: DeviceState) -> Callable[[], jax.stages.Lowered]:
        zeros = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        if self.placement.num_shards == 1:
            return jax.jit(zeros).lower
        return jax.jit(zeros, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes)).lower

    def _head_program(self, num_rows: int) -> Callable:
        padding = bucket_for(self.plan.sampler_rows, num_rows) - num_rows

        def head(outer, sample_hidden, num_live):
            logits_RV = self._logits(outer, sample_hidden[:num_rows], num_live)
            return jnp.pad(logits_RV, ((0, padding), (0, 0)))

        return head

    def _logits(self, outer, hidden_RD: jax.Array, num_live: jax.Array | int) -> jax.Array:
        rows = functools.partial(self._model.logits, outer, self._config)
        return in_tiles(rows, hidden_RD, num_rows=num_live, tile=self.plan.row_tile)

    def _sampler_program(self, shape: SamplerShape) -> Callable:
        def sample_rows(logits_RV, shaped_RV, slot_tokens, packed):
            slots, inputs = sampling_rows.unpack(packed, self.num_slots)
            out = sample(logits_RV, inputs, shape.variant, self._num_real_tokens, shaped_RV)
            columns = pack_columns(out.token_ids, out.logprob, out.is_sound, out.scores)
            return slot_tokens.at[slots].set(out.token_ids), columns

        return sample_rows

    def _beam_program(self, logits_RV, rows):
        logits_NV = logits_RV[rows]
        norm = normalizer(logits_NV)
        count = min(NUM_CANDIDATES, self._num_real_tokens)
        values, token_ids = largest(hide_unreal(logits_NV, self._num_real_tokens), count)
        logprobs = values - norm.maximum[:, None] - norm.log_mass[:, None]
        return jnp.concatenate([token_ids, jax.lax.bitcast_convert_type(logprobs, jnp.int32)], axis=1)

    def _score_program(self, params, rows_CD, targets):
        logits_CV = self._logits(params, rows_CD, SCORED_ROWS)
        scores = score_positions(logits_CV, targets, self._num_real_tokens)
        return pack_columns(targets, scores.logprob, jnp.isfinite(logits_CV[:, 0]), scores)


def _beam_rows(num_rows: int) -> tuple[int, ...]:
    """Row buckets of the program that ranks the candidates of beams, out of num_rows rows of logits."""
    return tuple(sorted({min(8, num_rows), num_rows}))


def _select_rows(hidden_TD, rows):
    return hidden_TD[rows]


def _add_rows(sums_ND, rows_CD, places):
    return sums_ND.at[places].add(rows_CD.astype(jnp.float32), mode="drop")  # no row's NaN reaches another's sum


def _encodings(params: ServedParams) -> set[str]:
    """Of the matrices, as `register_kernels` names them."""
    kinds = (PackedMatrix, QuantizedMatrix)
    nodes = jax.tree.leaves((params.outer, params.layers), is_leaf=lambda node: isinstance(node, kinds))
    packed = {node.encoding for node in nodes if isinstance(node, PackedMatrix)}
    int8 = {"INT8" for node in nodes if isinstance(node, QuantizedMatrix)}
    plain = {"F32" for node in nodes if not isinstance(node, kinds) and node.dtype == jnp.float32 and len(node.shape) > 1}
    return packed | int8 | plain


def _spread(sharding: jax.sharding.Sharding | None) -> str:
    """How an array lies over several devices; nothing where there is one."""
    if sharding is None or sharding.num_devices == 1:
        return ""
    return f" {sharding.spec} over {dict(sharding.mesh.shape)}"
