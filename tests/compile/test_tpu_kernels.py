"""The TPU kernels through the real TPU compiler, for every generation and kind of model.  Nothing runs.

A mixed step compiles all three kernels.  Asserted besides acceptance: the pool is aliased to the byte, temporaries
are far smaller than it, and no copy has its shape (aliased bytes alone do not show a copy).
The whole matrix of shapes: `make test-compile PYTEST_ARGS='-m "compile and soak"'` besides `make test-compile`.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import targets
from pallas_kernels.block_copy import mosaic_tpu as block_copy
from pallas_kernels.paged_attention import AttentionSpec, RaggedBatch, layout, paged_attention, prepare

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not targets.has_tpu_compiler(), reason="needs libtpu: pip install jax[tpu]"),
]

NUM_LAYERS, NUM_BLOCKS = 2, 2048


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int = 64
    dtype: str = "bfloat16"
    compute_dtype: str = "bfloat16"
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_scales: bool = False


SHAPES = {
    "llama3-8b": Shape(8, 4, 128),
    "llama3-8b-tp8": Shape(1, 4, 128, block_size=128),
    "llama3-70b-tp8": Shape(1, 8, 128, block_size=128),
    "qwen3-30b-a3b": Shape(4, 8, 128),
    "gemma3-4b-local": Shape(4, 2, 256, sliding_window=1024),
    "gemma2-9b": Shape(8, 2, 256, soft_cap=50.0, sliding_window=4096),
    "gpt-oss-20b": Shape(8, 8, 64, sliding_window=128, has_sinks=True),
    "smollm2-135m": Shape(3, 3, 64),
    "smollm2-135m-f32": Shape(3, 3, 64, dtype="float32", compute_dtype="float32"),
    "phi3-mini": Shape(32, 1, 96, block_size=16),
    "heads-of-80": Shape(8, 4, 80, block_size=16),
    "llama3-8b-int8": Shape(8, 4, 128, dtype="int8", has_scales=True),
    "falcon-7b": Shape(1, 71, 64),
    "llama3-8b-fp8": Shape(8, 4, 128, block_size=256, dtype="float8_e4m3fn", has_scales=True),
}


FEW_SHAPES = ("llama3-8b", "llama3-8b-tp8", "smollm2-135m", "llama3-8b-int8")
"""Compiled for every target by `make test-compile`; the others are marked soak too, half an hour by themselves."""


def compile_step(target, shape: Shape, num_tokens=512, num_rows=64, max_blocks=128, decode_only=False, num_devices=1):
    """One layer's attention; over several devices kv heads are split."""
    local_heads = shape.num_kv_heads // num_devices
    pool_layout = layout("tpu", local_heads, shape.head_dim, shape.block_size, shape.dtype)
    spec = AttentionSpec(
        shape.head_dim**-0.5,
        sliding_window=shape.sliding_window,
        soft_cap=shape.soft_cap,
        has_sinks=shape.has_sinks,
        decode_only=decode_only,
    )
    optional = {}
    if shape.has_sinks:
        optional["sinks"] = jnp.zeros(shape.num_kv_heads * shape.group)
    if shape.has_scales:
        optional |= {"k_scale": jnp.ones(shape.num_kv_heads), "v_scale": jnp.ones(())}

    def step(q, k, v, pool, layer, batch):
        metadata = prepare(batch, num_tokens, pool_layout, spec, "mosaic_tpu")
        return paged_attention(
            q, k, v, pool, layer, metadata, layout=pool_layout, spec=spec, implementation="mosaic_tpu", **optional
        )

    heads, pool_heads = P(None, "model"), P(None, None, "model")
    specs = [heads, heads, heads, pool_heads, P(), P()]
    if num_devices == 1:
        specs = [P()] * 6
    else:
        mesh = targets.mesh(target, num_devices)
        step = jax.shard_map(step, mesh=mesh, in_specs=tuple(specs), out_specs=(heads, pool_heads), check_vma=False)
    i32 = lambda *size: jax.ShapeDtypeStruct(size, jnp.int32)
    compute = lambda *size: jax.ShapeDtypeStruct(size, jnp.dtype(shape.compute_dtype))
    pool_size = list(pool_layout.shape(NUM_LAYERS, NUM_BLOCKS))
    pool_size[2] *= num_devices
    kv = compute(num_tokens, shape.num_kv_heads, shape.head_dim)
    compiled = targets.compile_for(
        target,
        step,
        compute(num_tokens, shape.num_kv_heads * shape.group, shape.head_dim),
        kv,
        kv,
        jax.ShapeDtypeStruct(tuple(pool_size), pool_layout.storage_dtype),
        i32(),
        RaggedBatch(i32(num_rows, max_blocks), i32(num_rows), i32(num_rows + 1), i32()),
        num_devices=num_devices,
        specs=specs,
        donate=(3,),
    )
    return compiled, pool_layout


def assert_pool_stays(compiled, pool_layout, num_layers=NUM_LAYERS, num_blocks=NUM_BLOCKS):
    memory, pool_bytes = compiled.memory_analysis(), pool_layout.bytes_per_block(num_layers) * num_blocks
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8
    dimensions = ",".join(map(str, pool_layout.shape(num_layers, num_blocks)))
    assert not re.search(rf"\[{dimensions}\]\S* copy\(", compiled.as_text())


@pytest.mark.parametrize("target", targets.SINGLE_DEVICE_TARGETS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW_SHAPES else pytest.mark.soak) for name in SHAPES]
)
def test_mixed_step(name, target):
    compiled, pool_layout = compile_step(target, SHAPES[name])
    assert compiled.as_text().count("tpu_custom_call") == 3, "decode, write and chunks"
    assert_pool_stays(compiled, pool_layout)


@pytest.mark.parametrize("name", ["falcon-7b", "phi3-mini"])
def test_the_widest_models_fit_the_16_mib_of_v4(name):
    """With the tiles of other generations they need 24 and 22 MiB, and the compiler refuses."""
    assert_pool_stays(*compile_step("v4", SHAPES[name]))


@pytest.mark.parametrize("target", targets.SINGLE_DEVICE_TARGETS)
@pytest.mark.parametrize("num_rows", [1, 256])
def test_decode_step(num_rows, target):
    compiled, pool_layout = compile_step(
        target, SHAPES["llama3-8b"], num_tokens=num_rows, num_rows=num_rows, decode_only=True
    )
    assert compiled.as_text().count("tpu_custom_call") == 1
    assert_pool_stays(compiled, pool_layout)


@pytest.mark.parametrize("target", ["v5e", "tpu7x"])
def test_smallest_mixed_step(target):
    """Fewer tokens than rows, and than a query tile."""
    assert_pool_stays(*compile_step(target, SHAPES["llama3-8b"], num_tokens=7, num_rows=16))


@pytest.mark.parametrize("target", ["v5e-8", "v6e-8", "tpu7x-8"])
def test_kv_heads_split_over_eight_devices(target):
    compiled, local_layout = compile_step(target, SHAPES["llama3-8b"], num_devices=8)
    text = compiled.as_text()
    assert text.count("tpu_custom_call") == 3
    assert not re.search(r"\b(all-reduce|all-gather|all-to-all|collective-permute)", text)
    assert_pool_stays(compiled, local_layout)
    pool_bytes = local_layout.bytes_per_block(NUM_LAYERS) * NUM_BLOCKS
    assert compiled.memory_analysis().argument_size_in_bytes < pool_bytes * 1.05, "an eighth of the pool on each device"


@pytest.mark.parametrize("target", targets.SINGLE_DEVICE_TARGETS)
def test_1024_sequences_of_128k_tokens(target):
    """At the default block size; the table is 8 MiB, eight times scalar memory."""
    compile_step(target, SHAPES["llama3-8b"], num_tokens=1024, num_rows=1024, max_blocks=2048, decode_only=True)


@pytest.mark.parametrize("target", targets.SINGLE_DEVICE_TARGETS)
def test_our_limit_of_scalar_memory_is_what_the_compiler_takes(target):
    """The longest table rows that we do not refuse."""
    shape, num_rows = SHAPES["llama3-8b"], 16
    longest = (1020 * 1024 // 4 - num_rows - 2 * shape.num_kv_heads) // 4 // 128 * 128
    compile_step(target, shape, num_tokens=num_rows, num_rows=num_rows, max_blocks=longest, decode_only=True)
    with pytest.raises(NotImplementedError, match="KiB of SMEM"):
        compile_step(target, shape, num_tokens=num_rows, num_rows=num_rows, max_blocks=longest + 256, decode_only=True)


@pytest.mark.parametrize("target", targets.SINGLE_DEVICE_TARGETS)
def test_block_copies(target):
    pool_layout = layout("tpu", 8, 128, 64, "bfloat16")
    pool = jax.ShapeDtypeStruct(pool_layout.shape(4, 256), pool_layout.storage_dtype)
    ids, count = jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    staging = jax.ShapeDtypeStruct((16, 4, *pool.shape[2:]), pool.dtype)
    copied = targets.compile_for(target, block_copy.copy_blocks, pool, ids, ids, count, donate=(0,))
    scattered = targets.compile_for(target, block_copy.scatter_blocks, pool, ids, staging, count, donate=(0,))
    gathered = targets.compile_for(target, block_copy.gather_blocks, pool, ids, count)
    assert_pool_stays(copied, pool_layout, 4, 256)
    assert_pool_stays(scattered, pool_layout, 4, 256)
    assert gathered.memory_analysis().temp_size_in_bytes < 1 << 20


def load_count_bundles(repository_root):
    spec = importlib.util.spec_from_file_location("count_bundles", repository_root / "tools" / "count_bundles.py")
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("target, budget", [("v5e", 0.38), ("v6e", 0.36), ("tpu7x", 0.35)])
def test_decode_schedule(target, budget, repository_root):
    """Bundles per KiB of KV at 8 kv heads, block size 64 (JAX's own kernel: 1.18, 1.13, 1.10); no spills."""
    count_bundles = load_count_bundles(repository_root)
    case = count_bundles.Case("decode", target)
    tree = count_bundles.compile_case(case)
    assert count_bundles.decode_bundles_per_kib(tree, case) <= budget
    assert [loop.spills for loop in tree.walk() if loop.spills] == []


@pytest.mark.parametrize("target", ["v5e", "tpu7x"])
def test_chunk_schedule(target, repository_root):
    """No spills in the loop over units."""
    count_bundles = load_count_bundles(repository_root)
    tree = count_bundles.compile_case(count_bundles.Case("chunks", target))
    assert max(tree.walk(), key=lambda loop: loop.matmuls).spills == 0
