"""Steps for the TPU kernels under JAX's TPU interpreter: small pools in which everything that no sequence owns is NaN.

The interpreter models DMAs, semaphores and vector clocks.  Its race detector does not see hazards through HBM between
grid steps, so tests run both DMA modes and compare: `LATE` performs a DMA when it is waited for, `EAGER` when it is
started.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import (
    AttentionSpec,
    PoolLayout,
    RaggedBatch,
    layout,
    mosaic_tpu,
    paged_attention,
    prepare,
)
from pallas_kernels.paged_attention.mosaic_tpu_tiles import TpuTiles

LATE = pltpu.InterpretParams(
    dma_execution_mode="on_wait", detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)
EAGER = pltpu.InterpretParams(dma_execution_mode="eager", uninitialized_memory="nan", out_of_bounds_reads="raise")
SMALL_TILES = TpuTiles(
    decode_group=256, decode_tail=128, heads_per_matmul=2, query_tile=16, chunk_group=128, key_tile=128
)
LAYER, NUM_LAYERS = 1, 2


class RaceFound(AssertionError):
    """The interpreter's race detector fired."""


def raise_on_race() -> None:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    races = interpreter.get_races() if hasattr(interpreter, "get_races") else interpreter.races
    if races is not None and races.races_found:
        raise RaceFound("the interpreter's race detector fired; it printed where")


@dataclass(frozen=True)
class Step:
    """One step's inputs.  `rows` are (context before, new tokens); the decodes come first."""

    rows: tuple[tuple[int, int], ...]
    num_decodes: int
    layout: PoolLayout
    spec: AttentionSpec
    arrays: dict[str, jax.Array]
    batch: RaggedBatch

    @property
    def num_tokens(self) -> int:
        return self.arrays["q"].shape[0]


def make_step(
    decodes=(),
    chunks=(),
    *,
    num_kv_heads=2,
    group=2,
    head_dim=128,
    block_size=16,
    dtype="float32",
    compute_dtype="float32",
    num_tokens=None,
    num_rows=None,
    max_blocks=None,
    decode_only=False,
    scale=None,
    seed=0,
    **spec,
) -> Step:
    """`decodes`: lengths with the new token, 0 for a padding row; `chunks`: (context before, new tokens)."""
    rng = np.random.default_rng(seed)
    rows = tuple((max(n - 1, 0), min(n, 1)) for n in decodes) + tuple(chunks)
    used_rows, used_tokens = len(rows), sum(new for _, new in rows)
    if decode_only:
        num_rows = num_rows or used_rows
        num_tokens = num_rows
    num_rows, num_tokens = num_rows or used_rows + 2, num_tokens or used_tokens + 3
    lens = np.zeros(num_rows, np.int32)
    lens[:used_rows] = [before + new for before, new in rows]
    cu_q_lens = np.full(num_rows + 1, used_tokens, np.int32)
    cu_q_lens[: used_rows + 1] = np.cumsum([0] + [new for _, new in rows])
    max_blocks = max_blocks or max(1, -(-int(lens.max()) // block_size)) + 1
    window = spec.get("sliding_window")
    num_blocks = 1 + int(sum(-(-n // block_size) for n in lens)) + 3
    free = iter(1 + rng.permutation(num_blocks - 1))
    tables = np.zeros((num_rows, max_blocks), np.int32)
    owned = np.zeros((num_blocks, block_size), bool)
    for row, (before, _) in enumerate(rows):
        # Blocks wholly behind the window of the row's first new token are freed: their entries are the dead block.
        first = 0 if window is None else max(0, before + 1 - window) // block_size
        for index in range(first, -(-int(lens[row]) // block_size)):
            tables[row, index] = next(free)
        for position in range(first * block_size, before):
            owned[tables[row, position // block_size], position % block_size] = True

    pool_layout = layout("tpu", num_kv_heads, head_dim, block_size, dtype)
    attention = AttentionSpec(scale or head_dim**-0.5, decode_only=decode_only, **spec)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    pool = normal(*pool_layout.shape(NUM_LAYERS, num_blocks))
    if pool_layout.dtype == jnp.int8:
        pool = jnp.round(pool * 40)
    else:
        width = min(64, head_dim) if pool_layout.planes == 1 else head_dim
        lane = np.arange(pool_layout.lanes * max(1, pool_layout.planes // 2))
        live_lane = lane % 64 < width if pool_layout.planes == 1 else lane < width
        # What pads a head is written as zeros.
        lanes = live_lane.reshape(max(1, pool_layout.planes // 2), 1, pool_layout.lanes)
        lanes = np.concatenate([lanes, lanes])[: pool_layout.planes] if pool_layout.planes > 1 else lanes
        pool = jnp.where(lanes, pool, 0)
        pool = jnp.where(jnp.asarray(owned)[None, :, None, None, :, None], pool, jnp.nan)
    arrays = {
        "q": normal(num_tokens, num_kv_heads * group, head_dim),
        "k": normal(num_tokens, num_kv_heads, head_dim),
        "v": normal(num_tokens, num_kv_heads, head_dim),
    }
    # Padding tokens are garbage.
    padding = jnp.arange(num_tokens) >= used_tokens if not decode_only else jnp.asarray(lens == 0)
    arrays = {name: jnp.where(padding[:, None, None], jnp.nan, x).astype(compute_dtype) for name, x in arrays.items()}
    arrays["pool"] = pool.astype(pool_layout.storage_dtype)
    if attention.has_sinks:
        arrays["sinks"] = normal(num_kv_heads * group)
    batch = RaggedBatch(
        jnp.asarray(tables), jnp.asarray(lens), jnp.asarray(cu_q_lens), jnp.asarray(len(decodes), jnp.int32)
    )
    return Step(rows, len(decodes), pool_layout, attention, arrays, batch)


def run_kernel(step: Step, interpret, tiles: TpuTiles = SMALL_TILES, **scales) -> tuple[np.ndarray, np.ndarray]:
    """(out, pool) of the TPU kernels under the interpreter.  RaceFound if it found one."""
    if step.layout.num_kv_heads % tiles.heads_per_matmul or step.layout.head_dim > 128:
        tiles = replace(tiles, heads_per_matmul=1)

    def call(batch, arrays, scales):
        metadata = mosaic_tpu.prepare(batch, step.num_tokens, step.layout, step.spec, tiles)
        return mosaic_tpu.attend(
            **arrays,
            **scales,
            layer=LAYER,
            metadata=metadata,
            layout=step.layout,
            spec=step.spec,
            tiles=tiles,
            interpret=interpret,
        )

    try:
        out, pool = jax.block_until_ready(jax.jit(call)(step.batch, step.arrays, scales))
        if interpret.detect_races:
            raise_on_race()
    except Exception:
        pltpu.reset_tpu_interpret_mode_state()
        raise
    return as_float(out), as_float(pool)


def run_reference(step: Step, **scales) -> tuple[np.ndarray, np.ndarray]:
    """(out, pool) of the float32 reference, over a pool where NaN is zero."""
    def finite(x):
        return jnp.where(jnp.isnan(x.astype(jnp.float32)), 0, x.astype(jnp.float32)).astype(x.dtype)

    arrays = {name: finite(x) for name, x in step.arrays.items()}
    arrays |= {name: arrays[name].astype(jnp.float32) for name in ("q", "k", "v")}
    metadata = prepare(step.batch, step.num_tokens, step.layout, step.spec, "reference")
    out, pool = paged_attention(
        **arrays,
        **scales,
        layer=LAYER,
        metadata=metadata,
        layout=step.layout,
        spec=step.spec,
        implementation="reference",
    )
    return as_float(out), as_float(pool)


def as_float(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32))


def live_tokens(step: Step) -> np.ndarray:
    """Flat tokens that belong to a sequence."""
    if step.spec.decode_only:
        return np.flatnonzero(np.asarray(step.batch.kv_lens))
    return np.arange(int(step.batch.cu_q_lens[-1]))


def slots_of(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """bool[B, P]: slots that hold a visible token after the step; bool[B]: blocks of no sequence, the dead one left
    out.

    A slot after a sequence's last token is nobody's, and a kernel may clear it.
    """
    num_blocks, block_size = step.arrays["pool"].shape[1], step.layout.block_size
    tokens, foreign = np.zeros((num_blocks, block_size), bool), np.ones(num_blocks, bool)
    foreign[0] = False
    for row, (before, new) in enumerate(step.rows):
        table = np.asarray(step.batch.block_tables[row])
        foreign[table] = False
        for position in range(before + new):
            block = table[position // block_size]
            tokens[block, position % block_size] = block > 0
    return tokens, foreign


def check(
    step: Step, tolerance: float, tiles: TpuTiles = SMALL_TILES, modes=(LATE, EAGER), kernel_step=None, **scales
) -> None:
    """The kernels agree with the reference in each DMA mode, and bit for bit between the modes.

    `kernel_step`: what the kernels get instead of `step`, to see that a difference is found.
    """
    live = live_tokens(step)
    expected, expected_pool = run_reference(step, **scales)
    outputs = []
    for mode in modes:
        out, pool = run_kernel(kernel_step or step, mode, tiles, **scales)
        assert np.isfinite(out[live]).all(), "NaN reached an output"
        np.testing.assert_allclose(out[live], expected[live], atol=tolerance, rtol=0)
        tokens, foreign = slots_of(step)
        by_slot = lambda x: x[LAYER].transpose(0, 3, 1, 2, 4)  # [B, P, K, planes, lanes]
        np.testing.assert_array_equal(by_slot(pool)[tokens], by_slot(expected_pool)[tokens])
        before = as_float(step.arrays["pool"])
        np.testing.assert_array_equal(pool[LAYER, foreign], before[LAYER, foreign])
        np.testing.assert_array_equal(np.delete(pool, LAYER, 0), np.delete(before, LAYER, 0))
        outputs.append((out[live], pool))
    for out, pool in outputs[1:]:
        np.testing.assert_array_equal(out, outputs[0][0])
        np.testing.assert_array_equal(pool, outputs[0][1])
