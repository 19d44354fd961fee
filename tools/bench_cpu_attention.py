"""Paged attention on this CPU: the XLA implementation against simple alternatives, tile sizes and block sizes.

    python tools/bench_cpu_attention.py alternatives|tiles|blocks [--case decode_64 ...] [--cpu-time] [--json]

Programs of a comparison run alternately in one process and the least of many runs counts; figures are milliseconds a layer
and the ratio to the first program.  `--cpu-time` measures CPU time instead, for a machine that is busy with other things
(then pin it to one core: `taskset -c 0`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.cases import CASES, Case, Inputs, build, case
from pallas_kernels.paged_attention.layout import pack, read_blocks, write_tokens
from pallas_kernels.paged_attention.xla import TILES, Tiles

MODEL = "smollm2-135m"
NUM_LAYERS = 6
"""Enough that the pool of 64 sequences lies beyond the caches, as a whole model's does."""

SWEEPS = {
    "decode_rows": (4, 8, 16, 32, 64),
    "decode_keys": (32, 64, 128),
    "chunk_rows": (16, 32, 64, 128),
    "chunk_keys": (32, 64, 128, 256),
}


@dataclass(frozen=True)
class Result:
    case: str
    program: str
    milliseconds_per_layer: float
    ratio: float
    """To the first program of the case; below 1 is faster."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("alternatives", "tiles", "blocks"))
    parser.add_argument("--case", action="append", help="only the cases whose name contains this; may be repeated")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs of each program")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of the process, not wall time")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    for chosen in cases(options.block_size):
        if options.case and not any(part in chosen.name for part in options.case):
            continue
        for result in compare(chosen, programs(options.what, chosen), options.repeats, clock):
            report = dataclasses.asdict(result)
            text = f"{result.case:34} {result.program:24} {result.milliseconds_per_layer:8.3f} ms  {result.ratio:5.2f}"
            print(json.dumps(report) if options.json else text, flush=True)


def cases(block_size: int) -> list[Case]:
    """SmolLM2's cases and plain decodes: 1, 8, 32 and 64 sequences at contexts up to 160 and 1,000."""
    plain = [
        case(f"decode_{count}_of_{longest}", MODEL, np.linspace(longest * 3 // 4, longest, count).astype(int).tolist(), decode_only=True)
        for longest in (160, 1000)
        for count in (1, 8, 32, 64)
    ]
    short = case("chunks_8x60", MODEL, chunks=[(0, 60)] * 8, num_tokens=512)
    named = [c for c in CASES if c.name.startswith(MODEL) and c.name.split("/")[1].startswith(("chunk", "mixed_48", "decode_64_long"))]
    return [dataclasses.replace(c, block_size=block_size) for c in (*plain, *named, short)]


def programs(what: str, chosen: Case) -> dict[str, tuple[int, Callable]]:
    """Name -> (block size, attend(q, k, v, pool, layer, inputs))."""
    if what == "alternatives":
        size = chosen.block_size
        return {"xla": (size, tiled(TILES)), "whole batch, block by block": (size, blockwise), "whole contexts": (size, gathered)}
    if what == "blocks":
        return {f"block {size}": (size, tiled(TILES)) for size in (16, 32, 64, 128)}
    fields = [name for name in SWEEPS if name.startswith("chunk") != chosen.decode_only or "mixed" in chosen.name]
    variants = {f"{name}={value}": dataclasses.replace(TILES, **{name: value}) for name in fields for value in SWEEPS[name]}
    return {"default": (chosen.block_size, tiled(TILES))} | {
        name: (chosen.block_size, tiled(tiles)) for name, tiles in variants.items() if tiles != TILES
    }


def compare(chosen: Case, candidates: dict[str, tuple[int, Callable]], repeats: int, clock) -> list[Result]:
    runs, least = {}, {}
    for name, (block_size, attend) in candidates.items():
        inputs = build(dataclasses.replace(chosen, block_size=block_size), num_layers=NUM_LAYERS)
        step = jax.jit(through_layers(attend, inputs), donate_argnums=3)
        pool = jax.block_until_ready(step(inputs.q, inputs.k, inputs.v, inputs.pool))[1]
        runs[name], least[name] = (step, inputs, pool), float("inf")
    for _ in range(repeats):
        for name, (step, inputs, pool) in runs.items():
            start = clock()
            _, pool = jax.block_until_ready(step(inputs.q, inputs.k, inputs.v, pool))
            least[name] = min(least[name], clock() - start)
            runs[name] = (step, inputs, pool)
    first = next(iter(least.values()))
    return [Result(chosen.name, name, 1e3 * least[name] / NUM_LAYERS, least[name] / first) for name in least]


def through_layers(attend: Callable, inputs: Inputs) -> Callable:
    """A step with nothing but attention in its layers; a layer's output moves the next one's queries."""

    def step(q, k, v, pool):
        prepared = xla.prepare(inputs.batch, q.shape[0], inputs.layout, inputs.case.spec, getattr(attend, "tiles", TILES))

        def layer(carry, index):
            x, pool = carry
            out, pool = attend(x, k, v, pool, index, inputs, prepared)
            return (x * 0.5 + out, pool), None

        return jax.lax.scan(layer, (q, pool), jnp.arange(NUM_LAYERS))[0]

    return step


def tiled(tiles: Tiles) -> Callable:
    def attend(q, k, v, pool, layer, inputs, prepared):
        return xla.attend(
            q, k, v, pool, layer, prepared, layout=inputs.layout, spec=inputs.case.spec, tiles=tiles
        )

    attend.tiles = tiles
    return attend


def blockwise(q, k, v, pool, layer, inputs: Inputs, prepared):
    """One loop over blocks for all sequences at once, padded to the longest chunk; every query meets every block."""
    batch, pool = inputs.batch, write(pool, layer, k, v, inputs, prepared)
    q_SQKGH, position_SQ = by_sequence(q, inputs)
    size = inputs.layout.block_size

    def step(i, state):
        keys, values = read_blocks(pool, layer, batch.block_tables[:, i], inputs.layout)
        used = i * size + jnp.arange(size) < batch.kv_lens[:, None]
        return online_softmax(state, q_SQKGH, keys, jnp.where(used[:, None, :, None], values, 0), i * size, position_SQ)

    rows = jnp.moveaxis(q_SQKGH, 1, 3)[..., 0]
    state = jnp.full(rows.shape, -1e30), jnp.zeros(rows.shape), jnp.zeros((*rows.shape, q.shape[-1]))
    num_blocks = (jnp.max(batch.kv_lens) + size - 1) // size
    _, total, weighted = jax.lax.fori_loop(0, num_blocks, step, state)
    return flat(weighted / jnp.maximum(total, 1e-30)[..., None], q, inputs), pool


def gathered(q, k, v, pool, layer, inputs: Inputs, prepared):
    """Every sequence's whole table gathered, one softmax."""
    batch, pool = inputs.batch, write(pool, layer, k, v, inputs, prepared)
    q_SQKGH, position_SQ = by_sequence(q, inputs)
    keys, values = (
        jnp.moveaxis(x, 2, 1).reshape(x.shape[0], x.shape[2], -1, x.shape[-1])
        for x in read_blocks(pool, layer, batch.block_tables, inputs.layout)
    )
    rows = jnp.moveaxis(q_SQKGH, 1, 3)[..., 0]
    state = jnp.full(rows.shape, -1e30), jnp.zeros(rows.shape), jnp.zeros((*rows.shape, q.shape[-1]))
    _, total, weighted = online_softmax(state, q_SQKGH, keys, values, 0, position_SQ)
    return flat(weighted / total[..., None], q, inputs), pool


def write(pool, layer, k, v, inputs, prepared):
    tokens = prepared.tokens
    return write_tokens(pool, layer, tokens.block, tokens.offset, pack(k, v, inputs.layout))


def by_sequence(q, inputs: Inputs):
    """q as [S, Q, K, G, H], padded to the longest chunk, scaled, and i32[S, Q] positions."""
    index, position = (jnp.asarray(x) for x in _rows(inputs))
    heads = inputs.case.heads
    q = q[index].reshape(*index.shape, heads.num_kv_heads, -1, heads.head_dim)
    return q * inputs.case.spec.scale, position


def flat(out_SKGQH, q, inputs: Inputs):
    index, _ = _rows(inputs)
    place = np.zeros(q.shape[0], np.int32)
    place[index.reshape(-1)[::-1]] = np.arange(index.size)[::-1]
    return jnp.moveaxis(out_SKGQH, 3, 1).reshape(-1, *q.shape[1:])[jnp.asarray(place)]


def _rows(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    new = np.diff(inputs.batch.cu_q_lens)
    offset = np.minimum(np.arange(new.max()), np.maximum(new[:, None] - 1, 0))
    index = np.minimum(np.asarray(inputs.batch.cu_q_lens)[:-1, None] + offset, inputs.case.num_tokens - 1)
    return index, np.asarray(inputs.batch.kv_lens)[:, None] - new[:, None] + offset


def online_softmax(state, q_SQKGH, keys, values, first_key, position_SQ):
    maximum, total, weighted = state
    logits = jnp.einsum("SQKGH,SKCH->SKGQC", q_SQKGH, keys)
    visible = first_key + jnp.arange(keys.shape[2]) <= position_SQ[:, None, None, :, None]
    logits = jnp.where(visible, logits, -1e30)
    new = jnp.maximum(maximum, logits.max(-1))
    weights, decay = jnp.exp(logits - new[..., None]), jnp.exp(maximum - new)
    weighted = weighted * decay[..., None] + jnp.einsum("SKGQC,SKCH->SKGQH", weights, values)
    return new, total * decay + weights.sum(-1), weighted


if __name__ == "__main__":
    main()
