"""Kernels on the accelerator of this machine: are they right, and how near to what it can do.

    python tools/device_check.py                    table on stdout, then one JSON object
    python tools/device_check.py --json FILE        the JSON there
    python tools/device_check.py --skip steps       without whole 8B steps (16 GB of weights, minutes of compiling)
    python tools/device_check.py --rehearse         tiny shapes on CPU: shows that this program works, measures nothing

Numerics: every implementation that serves a case against the float32 reference.  Decode attention: bytes of KV over
time, as a share of the bandwidth of a copy measured here.  Chunks: operations over time, as a share of a large matmul's
rate measured here.  Steps: time over (bytes of weights and KV / copy bandwidth).  Nothing starts after `--minutes`; what
was left out is listed.  Exits with 0 (all well), 1 (something failed) or 2 (no accelerator).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pallas_kernels.paged_attention import AttentionSpec, RaggedBatch, choose, layout  # noqa: E402
from pallas_kernels.paged_attention import paged_attention, prepare  # noqa: E402
from pallas_kernels.paged_attention.cases import CASES, HEADS, Case, build, twin  # noqa: E402

TOLERANCE = {"bfloat16": 0.03, "float32": 1e-4}
"""Against float32: bfloat16 outputs of about 1 have steps of 2**-8; a float32 kernel may order sums as it likes."""
NUMERICS = (
    "smollm2-135m/decode_edges_and_padding", "smollm2-135m/mixed_padded", "smollm2-135m/chunks_4x128",
    "llama3-8b/decode_32_long", "llama3-8b/mixed_64_1984", "llama3-70b-tp8/mixed", "qwen3-30b-a3b/mixed",
    "falcon-7b/mixed", "stablelm-3b/mixed", "phi3-mini/mixed", "gemma2-9b-local/mixed", "gpt-oss-20b-local/mixed",
)  # fmt: skip
SECTIONS = ("rates", "numerics", "decode", "chunks", "steps")


@dataclass(frozen=True)
class Row:
    section: str
    name: str
    implementation: str
    value: float
    unit: str
    share: float | None = None
    """Of the rate measured here; of steps, time over the least time."""
    ok: bool = True
    note: str = ""


@dataclass(frozen=True)
class Rates:
    copy_bytes: float
    matmul_operations: float


@dataclass(frozen=True)
class Sizes:
    """Real ones, and those of a rehearsal."""

    platform: str
    copied_mib: int = 1024
    matmul: int = 8192
    decodes: tuple[tuple[int, int], ...] = ((1, 32768), (4, 16384), (32, 4096), (128, 2048), (256, 1024))
    """Sequences, and tokens of each."""
    chunks: tuple[tuple[int, int], ...] = ((0, 2048), (6001, 2047), (0, 8192))
    """Tokens before, new tokens."""
    steps: tuple[tuple[int, int], ...] = ((1, 2048), (32, 2048), (128, 1024))
    repeats: int = 20
    model: str = "llama3-8b"
    numerics: tuple[str, ...] = NUMERICS


REHEARSAL = Sizes("cpu", 1, 64, ((4, 100),), ((21, 30),), ((2, 100),), 1, "smollm2-135m", NUMERICS[:1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file for the JSON, instead of the last line of stdout")
    parser.add_argument("--skip", action="append", default=[], choices=SECTIONS[1:])
    parser.add_argument("--minutes", type=float, default=7.0, help="no section or case starts after this long")
    parser.add_argument("--rehearse", action="store_true", help="on CPU, tiny: shows that this program works")
    arguments = parser.parse_args()
    platform = jax.default_backend()
    if platform == "cpu" and not arguments.rehearse:
        sys.exit(no_accelerator())
    device = jax.devices()[0]
    sizes = REHEARSAL if arguments.rehearse else Sizes(platform)
    report = {
        "device": device.device_kind, "platform": platform, "jax": jax.__version__, "rehearsal": arguments.rehearse,
        "rows": [], "left_out": [],
    }  # fmt: skip
    print(f"{device.device_kind}, jax {jax.__version__}" + (", a rehearsal" if arguments.rehearse else ""), flush=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    for row in check(sizes, arguments.skip, deadline, report["left_out"]):
        report["rows"].append(dataclasses.asdict(row))
        print(table_line(row), flush=True)
    print("left out: " + (", ".join(report["left_out"]) or "nothing"))
    text = json.dumps(report)
    arguments.json.write_text(text) if arguments.json else print(text)
    sys.exit(0 if all(row["ok"] for row in report["rows"]) else 1)


def no_accelerator() -> int:
    print(
        f"no accelerator: jax {jax.__version__} sees {jax.devices()[0].device_kind} only.  Nothing was checked or measured.\n"
        "Where there is one, install for it (pip install 'jserve[cuda13]' or 'jserve[tpu]'); --rehearse tries this on CPU.",
        file=sys.stderr,
    )
    return 2


def check(sizes: Sizes, skip: list[str], deadline: float, left_out: list[str]) -> Iterator[Row]:
    """One row after the other; what fails is a row that is not ok."""
    rates = Rates(copy_rate(sizes), matmul_rate(sizes))
    yield Row("rates", f"copy of {sizes.copied_mib} MiB", "", rates.copy_bytes / 1e9, "GB/s")
    yield Row("rates", f"bfloat16 matmul of {sizes.matmul}", "", rates.matmul_operations / 1e12, "TFLOP/s")
    for section, items, one in (
        ("numerics", sizes.numerics, numerics),
        ("decode", sizes.decodes, functools.partial(decode, rates=rates)),
        ("chunks", sizes.chunks, functools.partial(chunk, rates=rates)),
        ("steps", sizes.steps, functools.partial(step, rates=rates)),
    ):
        for item in items:
            if section in skip or time.monotonic() > deadline:
                left_out.append(f"{section} {item}")
                continue
            try:
                yield from one(item, sizes)
            except Exception as error:  # the others are still worth their time
                yield Row(section, str(item), "", float("nan"), "", ok=False, note=f"{type(error).__name__}: {error}"[:500])


def seconds(function: Callable, *arguments, repeats: int) -> float:
    """A call's mean time, with calls queued one after the other so that the host's part is hidden."""
    jax.block_until_ready(function(*arguments))
    least = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(repeats):
            result = function(*arguments)
        jax.block_until_ready(result)
        least = min(least, (time.perf_counter() - started) / repeats)
    return least


def copy_rate(sizes: Sizes) -> float:
    """Bytes read and written a second."""
    x = jnp.ones(sizes.copied_mib << 18, jnp.float32)
    return 2 * x.nbytes / seconds(jax.jit(lambda x: x + 1), x, repeats=sizes.repeats)


def matmul_rate(sizes: Sizes) -> float:
    x = jax.random.normal(jax.random.key(0), (sizes.matmul, sizes.matmul), jnp.bfloat16)
    return 2 * sizes.matmul**3 / seconds(jax.jit(lambda a, b: a @ b), x, x, repeats=sizes.repeats)


def numerics(name: str, sizes: Sizes) -> Iterator[Row]:
    """The twin of a real shape: every implementation of this platform against the float32 reference."""
    case = twin(next(case for case in CASES if case.name == name))
    dtype = "float32" if sizes.platform == "cpu" else "bfloat16"
    inputs = build(case, sizes.platform, dtype, compute_dtype=dtype, num_layers=2, poison=True)

    def attend(implementation, q, k, v):
        metadata = prepare(inputs.batch, q.shape[0], inputs.layout, case.spec, implementation)
        static = {"layout": inputs.layout, "spec": case.spec, "implementation": implementation}
        return paged_attention(q, k, v, inputs.pool, 1, metadata, **static, **inputs.extras)[0]

    run = jax.jit(attend, static_argnums=0)
    wide = [x.astype(jnp.float32) for x in (inputs.q, inputs.k, inputs.v)]
    expected = np.asarray(run("reference", *wide))[inputs.live]
    kernels = {"cpu": (), "gpu": ("mosaic_gpu", "triton"), "tpu": ("mosaic_tpu",)}[sizes.platform]
    for implementation in ("xla", *kernels):
        try:
            choose(sizes.platform, inputs.layout, case.spec, implementation)
        except NotImplementedError as refusal:
            yield Row("numerics", name, implementation, float("nan"), "", note=f"refused: {refusal}")
            continue
        out = np.asarray(run(implementation, inputs.q, inputs.k, inputs.v).astype(jnp.float32))[inputs.live]
        error = float(np.abs(out - expected).max(initial=0))
        yield Row("numerics", name, implementation, error, "largest error", ok=error <= TOLERANCE[dtype])


def attention(sizes: Sizes, rows: list[tuple[int, int]], decode_only: bool):
    """(seconds a layer, implementation) of Llama-3-8B's attention over `rows` of (tokens before, new tokens).

    Layers follow each other over a pool larger than the caches, each fed with what the one before gave.
    """
    heads, size, num_layers = HEADS[sizes.model], 64, 4
    pool_layout = layout(sizes.platform, heads.num_kv_heads, heads.head_dim, size, "bfloat16")
    spec = AttentionSpec(heads.head_dim**-0.5, decode_only=decode_only)
    implementation = choose(sizes.platform, pool_layout, spec)
    lens = np.array([before + new for before, new in rows])
    blocks = -(-lens // size)
    ids = 1 + np.random.default_rng(0).permutation(int(blocks.sum()))
    tables = np.zeros((len(rows), int(blocks.max())), np.int32)
    for row, (first, count) in enumerate(zip(np.cumsum(blocks) - blocks, blocks)):
        tables[row, :count] = ids[first : first + count]
    cu_q_lens = np.cumsum([0] + [new for _, new in rows])
    geometry = tables, lens, cu_q_lens, len(rows) if decode_only else 0
    batch = RaggedBatch(*(jnp.asarray(x, jnp.int32) for x in geometry))
    num_tokens = int(cu_q_lens[-1])
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    q = normal(0, num_tokens, heads.num_heads, heads.head_dim)
    k, v = (normal(seed, num_tokens, heads.num_kv_heads, heads.head_dim) for seed in (1, 2))
    pool = jnp.zeros(pool_layout.shape(num_layers, int(blocks.sum()) + 1), pool_layout.storage_dtype)

    @functools.partial(jax.jit, donate_argnums=3)
    def run(q, k, v, pool, batch):
        metadata = prepare(batch, num_tokens, pool_layout, spec, implementation)
        static = {"layout": pool_layout, "spec": spec, "implementation": implementation}
        for layer in range(num_layers):
            q, pool = paged_attention(q, k, v, pool, layer, metadata, **static)
        return q, pool

    held = [pool]

    def call():
        out, held[0] = run(q, k, v, held[0], batch)
        return out

    return seconds(call, repeats=sizes.repeats) / num_layers, implementation


def decode(item: tuple[int, int], sizes: Sizes, rates: Rates) -> Iterator[Row]:
    num_rows, length = item
    heads = HEADS[sizes.model]
    took, implementation = attention(sizes, [(length - 1, 1)] * num_rows, True)
    rate = num_rows * length * heads.num_kv_heads * heads.head_dim * 2 * 2 / took
    name = f"{num_rows} sequences of {length}"
    note = f"{took * 1e6:.1f} us a layer"
    yield Row("decode", name, implementation, rate / 1e9, "GB/s", rate / rates.copy_bytes, note=note)


def chunk(item: tuple[int, int], sizes: Sizes, rates: Rates) -> Iterator[Row]:
    before, new = item
    heads = HEADS[sizes.model]
    took, implementation = attention(sizes, [item], False)
    visible = new * before + new * (new + 1) // 2
    rate = 4 * visible * heads.num_heads * heads.head_dim / took
    name = f"{new} new tokens after {before}"
    note = f"{took * 1e6:.1f} us a layer"
    yield Row("chunks", name, implementation, rate / 1e12, "TFLOP/s", rate / rates.matmul_operations, note=note)


def step(item: tuple[int, int], sizes: Sizes, rates: Rates) -> Iterator[Row]:
    """A whole decode step with weights of zeros: their values change no time."""
    from gpu_report import model_config

    from jserve.models import llama
    from jserve.models.inputs import AttentionPlan, ForwardInputs

    num_rows, length = item
    config, size = model_config(sizes.model), 64
    pool_layout = layout(sizes.platform, config.num_kv_heads, config.head_dim, size, "bfloat16")
    spec = AttentionSpec(config.head_dim**-0.5, decode_only=True)
    implementation = choose(sizes.platform, pool_layout, spec)
    plan = AttentionPlan(implementation, (pool_layout,), True)
    blocks = -(-length // size)
    params = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), llama.param_specs(config, "bfloat16"))
    tables = jnp.arange(1, num_rows * blocks + 1, dtype=jnp.int32).reshape(num_rows, blocks)
    geometry = tables, jnp.full(num_rows, length), jnp.arange(num_rows + 1), num_rows
    batch = RaggedBatch(*(jnp.asarray(x, jnp.int32) for x in geometry))
    inputs = ForwardInputs(jnp.zeros(num_rows, jnp.int32), jnp.full(num_rows, length - 1, jnp.int32), (batch,))
    held = [jnp.zeros(pool_layout.shape(config.num_layers, num_rows * blocks + 1), pool_layout.storage_dtype)]

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params, pool, inputs):
        hidden, (pool,) = llama.forward(params, config, (pool,), inputs, plan)
        return jnp.argmax(llama.logits(params, config, hidden), -1), pool

    def call():
        ids, held[0] = run(params, held[0], inputs)
        return ids

    took = seconds(call, repeats=sizes.repeats)
    kv = num_rows * length * config.num_layers * config.num_kv_heads * config.head_dim * 2 * 2
    least = (sum(leaf.nbytes for leaf in jax.tree.leaves(params)) + kv) / rates.copy_bytes
    name = f"{sizes.model}, {num_rows} sequences of {length}"
    yield Row("steps", name, implementation, took * 1e3, "ms", took / least, note="share: time over bytes / bandwidth")


def table_line(row: Row) -> str:
    share = "" if row.share is None else f"{row.share:6.2f}x" if row.section == "steps" else f"{100 * row.share:5.1f}%"
    verdict = "" if row.ok else "FAILED "
    return f"{row.section:9}{row.name:42}{row.implementation:12}{row.value:12.4g} {row.unit:14}{share:8}{verdict}{row.note}"


if __name__ == "__main__":
    main()
