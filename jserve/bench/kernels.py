"""`bench kernels`: what attention takes on this device, beside what the device copies and multiplies.

A step of nothing but attention through a few layers, pool donated; the least of many runs counts.  Decodes are measured
by the bytes of keys and values they must read, chunks by the operations they must do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jserve.bench import report
from jserve.bench.throughput import machine
from pallas_kernels.paged_attention import choose, layout, paged_attention, prepare
from pallas_kernels.paged_attention.cases import HEADS, Case, Inputs, build, case

DECODE, CHUNK = "decode", "chunk"
DEFAULT_BLOCK = {"cpu": 32}


@dataclass(frozen=True)
class KernelLoad:
    """The steps to measure, each alone: decodes of so many sequences at `context`, chunks of so many tokens after `past`."""

    heads: str = "smollm2-135m"
    batches: Sequence[int] = (1, 8, 32, 64)
    context: int = 1000
    chunks: Sequence[int] = (128, 512)
    past: int = 0
    implementations: Sequence[str] = ()
    """Unless given the one that a server takes on this device."""
    dtype: str | None = None
    block_size: int | None = None
    num_layers: int = 4
    repeats: int = 20


def measure(load: KernelLoad, on_done: Callable[[dict], None] = lambda point: None) -> dict[str, object]:
    """The report.  NotImplementedError where a named implementation cannot serve the case on this device."""
    platform = jax.default_backend()
    dtype = load.dtype or ("float32" if platform == "cpu" else "bfloat16")
    block_size = load.block_size or DEFAULT_BLOCK.get(platform, 64)
    copy, matrix = copy_rate(), matrix_rate(dtype)
    points = []
    for kind, one in _cases(load, block_size):
        pool_layout = layout(platform, one.heads.num_kv_heads, one.heads.head_dim, block_size, dtype)
        for name in load.implementations or [choose(platform, pool_layout, one.spec)]:
            # Built for each, as a run takes the pool.
            inputs = build(one, platform, dtype, compute_dtype=dtype, num_layers=load.num_layers)
            seconds = least_seconds(inputs, name, load.num_layers, load.repeats)
            num_bytes, num_flops = work(one, np.dtype(jnp.dtype(dtype)).itemsize)
            point = {
                "kind": kind, "case": one.name, "implementation": name, "batch": len(one.rows),
                "context": int(one.kv_lens.max()), "new_tokens": sum(new for _, new in one.rows),
                "ms_per_layer": 1e3 * seconds, "kv_gb_per_s": num_bytes / seconds / 1e9,
                "gflop_per_s": num_flops / seconds / 1e9, "share_of_copy": num_bytes / seconds / copy,
                "share_of_matrix": num_flops / seconds / matrix,
            }
            points.append(point)
            on_done(point)
    about = {"heads": load.heads, "dtype": dtype, "block_size": block_size, "num_layers": load.num_layers}
    return report.header("kernels", **machine(), **about) | {
        "copy_gb_per_s": copy / 1e9, "matrix_gflop_per_s": matrix / 1e9, "points": points,
    }


def work(one: Case, itemsize: int) -> tuple[int, int]:
    """(bytes of keys and values that one layer must read, operations that it must do)."""
    heads = one.heads
    window = heads.sliding_window or 1 << 62
    num_read = sum(min(past + new, window + new - 1) for past, new in one.rows if new)
    num_pairs = sum(min(past + at + 1, window) for past, new in one.rows for at in range(new))
    per_token = 2 * heads.num_kv_heads * heads.head_dim * itemsize
    return num_read * per_token, 4 * num_pairs * heads.num_heads * heads.head_dim


def least_seconds(inputs: Inputs, implementation: str, num_layers: int, repeats: int) -> float:
    """Of a layer."""

    def step(q, k, v, pool):
        spec = inputs.case.spec
        metadata = prepare(inputs.batch, q.shape[0], inputs.layout, spec, implementation)

        def layer(carry, index):
            x, pool = carry
            out, pool = paged_attention(
                x, k, v, pool, index, metadata, layout=inputs.layout, spec=spec, implementation=implementation,
                **inputs.extras,
            )
            return (x * 0.5 + out, pool), None  # a layer's output moves the next one's queries

        return jax.lax.scan(layer, (q, pool), jnp.arange(num_layers))[0]

    run = jax.jit(step, donate_argnums=3)
    _, pool = jax.block_until_ready(run(inputs.q, inputs.k, inputs.v, inputs.pool))
    least = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        _, pool = jax.block_until_ready(run(inputs.q, inputs.k, inputs.v, pool))
        least = min(least, time.perf_counter() - began)
    return least / num_layers


def copy_rate(num_bytes: int = 1 << 27) -> float:
    """Bytes a second that the device reads; a copy reads and writes as much."""
    add = jax.jit(lambda x: x + 1)
    return 2 * num_bytes / _least(add, jnp.zeros(num_bytes // 4, jnp.float32))


def matrix_rate(dtype: str, size: int = 1024) -> float:
    """Operations a second of a large product."""
    multiply = jax.jit(lambda x: x @ x)
    return 2 * size**3 / _least(multiply, jnp.ones((size, size), dtype))


def render(answer: dict[str, object]) -> str:
    lines = [
        f"{answer['device']}: copies {answer['copy_gb_per_s']:.1f} GB/s, multiplies {answer['matrix_gflop_per_s']:.0f}"
        f" GFLOP/s in {answer['dtype']}",
        f"{'case':<34}{'implementation':>15}{'ms/layer':>10}{'KV GB/s':>9}{'of copy':>9}{'GFLOP/s':>9}"
        f"{'of matrix':>10}",
    ]
    if answer["device"] == "cpu":
        lines.insert(0, "no accelerator here: these are the CPU's own implementations, no kernel of an accelerator was run")
    for point in answer["points"]:
        lines.append(
            f"{point['case']:<34}{point['implementation']:>15}{point['ms_per_layer']:>10.3f}"
            f"{point['kv_gb_per_s']:>9.1f}{point['share_of_copy']:>9.0%}{point['gflop_per_s']:>9.0f}"
            f"{point['share_of_matrix']:>10.0%}"
        )
    return "\n".join(lines)


def _cases(load: KernelLoad, block_size: int) -> list[tuple[str, Case]]:
    assert load.heads in HEADS
    decodes = [
        (DECODE, case(f"decode_{batch}_of_{load.context}", load.heads, [load.context] * batch, block_size=block_size,
                      decode_only=True))
        for batch in load.batches
    ]
    chunks = [
        (CHUNK, case(f"chunk_{chunk}_after_{load.past}", load.heads, chunks=[(load.past, chunk)],
                     block_size=block_size))
        for chunk in load.chunks
    ]
    return decodes + chunks


def _least(function: Callable, argument: jax.Array, repeats: int = 5) -> float:
    jax.block_until_ready(function(argument))
    least = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(argument))
        least = min(least, time.perf_counter() - began)
    return least
