"""Finds the tile sizes of attention kernels that are fastest on this machine's device, and writes them to its JSON.

    python tools/tune_kernels.py                                    the shapes that matter on this device
    python tools/tune_kernels.py --shape llama3-8b --block-size 64
    python tools/tune_kernels.py --rehearse --out FOLDER            tiny, on CPU: shows that this program works

For each shape a decode step and a step of chunks are timed, the least of many runs; one size after the other is varied
and kept where the sum of both, each over its time with the default sizes, falls by more than 3%.  Sizes that a kernel
refuses, or that give other numbers than the default ones, are left out.  Serving reads the file when it next traces a
program: the executables of earlier starts are made anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pallas_kernels.paged_attention import choose, layout, tuned  # noqa: E402
from pallas_kernels.paged_attention.cases import HEADS, Case, Inputs, build, case  # noqa: E402

SWEEPS = {
    "xla": {
        "decode_rows": (4, 8, 16, 32, 64), "decode_keys": (32, 64, 128),
        "chunk_rows": (16, 32, 64, 128), "chunk_keys": (32, 64, 128, 256),
    },
    "mosaic_tpu": {
        "decode_group": (256, 512, 1024, 2048), "decode_tail": (128, 256, 512), "heads_per_matmul": (1, 2, 4),
        "query_tile": (32, 64, 128, 256), "chunk_group": (256, 512, 1024, 2048), "key_tile": (128, 256, 512, 1024),
    },
    "mosaic_gpu": {
        "decode_stages": (2, 3, 4), "decode_programs": (132, 264, 528, 1056), "max_splits": (8, 16, 32, 64),
        "min_split_keys": (128, 256, 512), "chunk_stages": (2, 3),
    },
}  # fmt: skip
SHAPES = ("llama3-8b", "llama3-70b-tp8", "qwen3-30b-a3b", "smollm2-135m")
NUM_LAYERS = 4
WORTH = 0.97
"""A change must reach this share of the best time so far: below it is noise."""


@dataclass(frozen=True)
class Sizes:
    """Real ones, and those of a rehearsal."""

    batch: int = 32
    context: int = 2048
    past: int = 1000
    chunk: int = 1024
    repeats: int = 20
    most_values: int = 8
    """Of a size that are tried."""


REHEARSAL = Sizes(batch=2, context=40, past=20, chunk=30, repeats=1, most_values=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=tuple(HEADS), help="may be repeated")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--dtype", help="of the pool [float32 on CPU, bfloat16 elsewhere]")
    parser.add_argument("--out", type=Path, help="the folder of the JSON files [where serving looks for them]")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes: shows that this program works, tunes nothing")
    options = parser.parse_args()
    if options.rehearse and options.out is None:
        parser.error("--rehearse needs --out: what it finds means nothing")
    platform, kind = jax.default_backend(), jax.devices()[0].device_kind
    sizes = REHEARSAL if options.rehearse else Sizes()
    shapes = options.shape or (("smollm2-135m",) if platform == "cpu" else SHAPES)
    dtype = options.dtype or ("float32" if platform == "cpu" else "bfloat16")
    found: dict[str, dict[str, int]] = {}
    for name in shapes:
        block_size = options.block_size or (32 if platform == "cpu" else 128 if HEADS[name].num_kv_heads == 1 else 64)
        found |= tune(name, platform, dtype, block_size, sizes)
    facts = {"jax": jax.__version__, "rehearsal": options.rehearse}
    print(f"wrote {tuned.write(kind, found, facts, options.out)}")


def tune(name: str, platform: str, dtype: str, block_size: int, sizes: Sizes) -> dict[str, dict[str, int]]:
    """key -> the sizes that differ from the defaults; nothing where none is better."""
    cases = (
        case("decode", name, [sizes.context] * sizes.batch, block_size=block_size, decode_only=True),
        case("chunks", name, chunks=[(sizes.past, sizes.chunk), (0, sizes.chunk)], block_size=block_size),
    )
    pool_layout = layout(platform, HEADS[name].num_kv_heads, HEADS[name].head_dim, block_size, dtype)
    implementation = choose(platform, pool_layout, cases[0].spec)
    if implementation not in SWEEPS:
        print(f"{implementation} has no sizes to tune; tuning xla, which serves what it does not")
        implementation = "xla"
    runs = [Timed(one, platform, dtype, implementation, sizes.repeats) for one in cases]
    defaults = default_tiles(implementation, pool_layout, HEADS[name].num_heads // HEADS[name].num_kv_heads)
    base = [run(defaults) for run in runs]
    assert None not in base, f"{implementation} refuses its own default sizes: {defaults}"

    def score(tiles) -> float:
        times = [run(tiles) for run in runs]
        return float("inf") if None in times else sum(t / b for t, b in zip(times, base)) / len(base)

    best, least = defaults, 1.0
    for size, values in SWEEPS[implementation].items():
        for value in values[: sizes.most_values]:
            candidate = dataclasses.replace(best, **{size: value})
            if candidate != best and (now := score(candidate)) < least * WORTH:
                best, least = candidate, now
        print(f"{tuned.key(implementation, pool_layout)}: {size} = {getattr(best, size)}, {least:.2f} of the default's time")
    changed = {
        field.name: getattr(best, field.name)
        for field in dataclasses.fields(best)
        if getattr(best, field.name) != getattr(defaults, field.name)
    }
    return {tuned.key(implementation, pool_layout): changed} if changed else {}


class Timed:
    """A case through a few layers, pool donated from run to run, with given tile sizes."""

    def __init__(self, one: Case, platform: str, dtype: str, implementation: str, repeats: int):
        self._make: Callable[[], Inputs] = lambda: build(
            one, platform, dtype, compute_dtype=dtype, num_layers=NUM_LAYERS
        )
        self._implementation, self._repeats = implementation, repeats
        self._expected: np.ndarray | None = None

    def __call__(self, tiles) -> float | None:
        """Seconds a layer; None where the kernel refuses the sizes, or its numbers change."""
        inputs = self._make()  # built for each, as a run takes the pool
        try:
            run = jax.jit(self._step(inputs, tiles), donate_argnums=3)
            out, pool = jax.block_until_ready(run(inputs.q, inputs.k, inputs.v, inputs.pool))
        except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
            print(f"  left out, {tiles}: {str(error).splitlines()[0]}")
            return None
        numbers = np.asarray(out, np.float32)
        if self._expected is None:
            self._expected = numbers
        if not np.allclose(numbers, self._expected, atol=0.05, equal_nan=True):
            print(f"  left out, {tiles}: other numbers, by {np.nanmax(np.abs(numbers - self._expected))}")
            return None
        least = float("inf")
        for _ in range(self._repeats):
            began = time.perf_counter()
            _, pool = jax.block_until_ready(run(inputs.q, inputs.k, inputs.v, pool))
            least = min(least, time.perf_counter() - began)
        return least / NUM_LAYERS

    def _step(self, inputs: Inputs, tiles) -> Callable:
        module = importlib.import_module(f"pallas_kernels.paged_attention.{self._implementation}")
        spec = inputs.case.spec

        def step(q, k, v, pool):
            # On GPU a step's geometry serves every size of tiles.
            sizes = () if self._implementation == "mosaic_gpu" else (tiles,)
            metadata = module.prepare(inputs.batch, q.shape[0], inputs.layout, spec, *sizes)

            def layer(carry, index):
                x, pool = carry
                out, pool = module.attend(
                    x, k, v, pool, index, metadata, layout=inputs.layout, spec=spec, tiles=tiles, **inputs.extras
                )
                return (x * 0.5 + out, pool), None  # a layer's output moves the next one's queries

            return jax.lax.scan(layer, (q, pool), jnp.arange(NUM_LAYERS))[0]

        return step


def default_tiles(implementation: str, pool_layout, queries_per_kv_head: int):
    """What the implementation takes on a device that was never tuned."""
    if implementation == "mosaic_tpu":
        from pallas_kernels.paged_attention import mosaic_tpu_tiles

        return mosaic_tpu_tiles.default_tiles(pool_layout, queries_per_kv_head)
    if implementation == "mosaic_gpu":
        from pallas_kernels.paged_attention import mosaic_gpu, mosaic_gpu_tiles

        return mosaic_gpu_tiles.default_tiles(pool_layout, mosaic_gpu.INSTRUCTIONS[mosaic_gpu.compute_capability()])
    from pallas_kernels.paged_attention.xla import TILES

    return TILES


if __name__ == "__main__":
    main()
