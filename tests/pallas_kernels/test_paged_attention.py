"""The reference and XLA against a dense float64 softmax, and what a step may and may not touch in the pool.

Bounds: values are standard normal and both implementations compute in float32 from the stored bits, so that outputs differ
from float64 only by rounding: 5e-6 absolute, whatever the pool's dtype.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels.paged_attention import AttentionSpec, RaggedBatch, choose, layout, paged_attention, prepare
from pallas_kernels.paged_attention.cases import CASES, HEADS, Case, Heads, Inputs, build, twin
from pallas_kernels.paged_attention.layout import pack, unpack

TOLERANCE = 5e-6
LAYER = 1
QUICK = {"xla_backend_optimization_level": 0}
"""Halves the compile; the test of the scan compiles as users do."""


def assert_right(inputs: Inputs, implementation: str = "xla") -> None:
    """Live rows are the dense softmax, padding rows finite, and the pool is the old one with this step's tokens in their slots."""
    out, pool = attend(inputs, implementation)
    expected_pool = pool_after(inputs)
    np.testing.assert_allclose(out[inputs.live], dense(inputs, expected_pool)[inputs.live], atol=TOLERANCE, rtol=0)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(bits(pool)[LAYER, 1:], bits(expected_pool)[LAYER, 1:])
    np.testing.assert_array_equal(bits(pool)[:LAYER], bits(inputs.pool)[:LAYER])


def attend(inputs: Inputs, implementation: str) -> tuple[np.ndarray, np.ndarray]:
    """(out, pool) with layer LAYER."""
    arguments = inputs.q, inputs.k, inputs.v, inputs.pool, inputs.batch
    out, pool = compiled(inputs.layout, inputs.case.spec, implementation)(*arguments, **inputs.extras)
    return np.asarray(out), np.asarray(pool)


@functools.cache
def compiled(pool_layout, spec, implementation):
    """One program for each bucket of a layout and a spec: compiling is most of a test's time."""

    def step(q, k, v, pool, batch, **extras):
        metadata = prepare(batch, q.shape[0], pool_layout, spec, implementation)
        return paged_attention(
            q, k, v, pool, LAYER, metadata, layout=pool_layout, spec=spec, implementation=implementation, **extras
        )

    return jax.jit(step, compiler_options=QUICK)


def bits(x) -> np.ndarray:
    """NaNs compare by their bits."""
    x = np.ascontiguousarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def pool_after(inputs: Inputs) -> np.ndarray:
    """The pool after the step, one token at a time."""
    pool = np.array(inputs.pool)
    scales = inputs.extras.get("k_scale"), inputs.extras.get("v_scale")
    packed = np.asarray(packed_tokens(inputs.k, inputs.v, inputs.layout, *scales))
    tables, token = np.asarray(inputs.batch.block_tables), 0
    for row, (context, new) in enumerate(inputs.case.rows):
        for position in range(context, context + new):
            flat = row if inputs.case.decode_only else token
            block, offset = tables[row, position // inputs.layout.block_size], position % inputs.layout.block_size
            pool[LAYER, block, :, :, offset] = packed[flat]
            token += 1
    return pool


packed_tokens = jax.jit(pack, static_argnums=2)
stored_values = jax.jit(unpack, static_argnums=1)


def dense(inputs: Inputs, pool: np.ndarray) -> np.ndarray:
    """Softmax over each token's visible keys in the pool as it is after the step, in float64 numpy."""
    spec, heads, size = inputs.case.spec, inputs.case.heads, inputs.layout.block_size
    scales = inputs.extras.get("k_scale"), inputs.extras.get("v_scale")
    stored = stored_values(pool[LAYER], inputs.layout, *scales)
    k, v = (np.moveaxis(np.asarray(x, np.float64), 1, 2) for x in stored)  # [B, P, K, H]
    queries = np.asarray(inputs.q, np.float64).reshape(inputs.case.num_tokens, heads.num_kv_heads, -1, heads.head_dim)
    sinks = np.exp(np.asarray(inputs.extras.get("sinks", np.full(heads.num_heads, -np.inf)), np.float64))
    out, token = np.zeros(queries.shape), 0
    for row, (context, new) in enumerate(inputs.case.rows):
        positions = np.arange(context + new)
        blocks = np.asarray(inputs.batch.block_tables)[row, positions // size]
        keys, values = k[blocks, positions % size], v[blocks, positions % size]
        for position in range(context, context + new):
            first = 0 if spec.sliding_window is None else max(0, position + 1 - spec.sliding_window)
            flat = row if inputs.case.decode_only else token
            logits = np.einsum("kgh,ckh->kgc", queries[flat], keys[first : position + 1]) * spec.scale
            if spec.soft_cap:
                logits = spec.soft_cap * np.tanh(logits / spec.soft_cap)
            weights = np.exp(logits)
            total = weights.sum(-1) + sinks.reshape(weights.shape[:2])
            out[flat] = np.einsum("kgc,ckh->kgh", weights, values[first : position + 1]) / total[..., None]
            token += 1
    return out.reshape(inputs.q.shape)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_twin_of_each_real_shape(case):
    """Everything unowned is NaN: the dead block, freed blocks behind a window, unwritten slots, padding tokens."""
    small = twin(case)
    num_tokens = 16 if case.decode_only else 272  # one bucket, so that cases of the same heads share a program
    in_bucket = replace(small, num_tokens=num_tokens, num_rows=16)
    assert_right(build(in_bucket, num_layers=2, num_blocks=128, max_blocks=12, poison=True))


@pytest.mark.parametrize("num_sequences", [256, 1])
def test_256_sequences_and_one(num_sequences):
    for decode_only in (True, False):
        rows = tuple((n % 20, 1) for n in range(num_sequences))
        case = small(rows, num_sequences, num_tokens=num_sequences, num_rows=num_sequences, decode_only=decode_only)
        assert_right(build(case, num_layers=2, poison=True))


def small(rows=((0, 1), (20, 1), (15, 3), (7, 18)), num_decodes=2, heads=Heads(6, 2, 16), block_size=8, **fields) -> Case:
    num_tokens, num_rows = sum(new for _, new in rows) + 3, len(rows) + 1
    return Case("small", heads, tuple(rows), num_decodes, **({"num_tokens": num_tokens, "num_rows": num_rows} | fields), block_size=block_size)


@pytest.mark.parametrize("heads", [
    Heads(6, 2, 16), Heads(2, 2, 80), Heads(3, 1, 16, sliding_window=9, soft_cap=2.0, has_sinks=True)
], ids=["gqa", "mha", "mqa with all options"])  # fmt: skip
def test_reference_is_a_dense_softmax(heads):
    assert_right(build(small(heads=heads), num_layers=2, poison=True), "reference")


@pytest.mark.parametrize(("platform", "head_dim"), [
    ("cpu", 96), ("gpu", 80), ("tpu", 64), ("tpu", 80), ("tpu", 256)
])  # fmt: skip
def test_every_layout_and_head_size(platform, head_dim):
    assert_right(build(small(heads=Heads(4, 2, head_dim)), platform, num_layers=2, poison=True))


@pytest.mark.parametrize(("platform", "dtype"), [
    ("cpu", "bfloat16"), ("cpu", "float16"), ("cpu", "int8"), ("cpu", "float8_e4m3fn"), ("tpu", "bfloat16")
])  # fmt: skip
def test_narrow_pools(dtype, platform):
    """The pool's bits, and attention over them; 8-bit values have a scale per kv head."""
    assert_right(build(small(), platform, dtype, num_layers=2, poison=True))


@pytest.mark.parametrize(("dtype", "error"), [("float32", 0), ("bfloat16", 2**-8), ("int8", 0.5), ("float8_e4m3fn", 2**-4)])
def test_what_is_packed_comes_back(dtype, error):
    """Relative to the value, or for int8 half a step of the scale; beyond the range values saturate, they never wrap or turn NaN."""
    pool_layout = layout("cpu", 2, 16, 4, dtype)
    scale = jnp.array([0.02, 0.03]) if pool_layout.dtype.itemsize == 1 else None
    k, v = np.random.default_rng(0).uniform(0.5, 2.0, (2, 4, 2, 16)).astype(np.float32)
    blocks = jnp.moveaxis(pack(k, v, pool_layout, scale, scale), 0, 2)  # one block of four tokens
    step = np.asarray(scale)[:, None, None] if dtype == "int8" else np.moveaxis(k, 0, 1)
    for stored, given in zip(unpack(blocks, pool_layout, scale, scale), (k, v)):
        assert (np.abs(stored - np.moveaxis(given, 0, 1)) <= error * np.abs(step).max(-1, keepdims=True) + 1e-6).all()
    huge = unpack(jnp.moveaxis(pack(k * 1e6, -v * 1e6, pool_layout, scale, scale), 0, 2), pool_layout, scale, scale)
    assert (huge[0] > 0).all() and (huge[1] < 0).all()


def test_layouts_are_what_the_kernels_were_written_for():
    shapes = {
        (platform, head_dim): layout(platform, 8, head_dim, 64, "bfloat16").shape(3, 5)
        for platform, head_dim in [("cpu", 80), ("gpu", 80), ("tpu", 64), ("tpu", 80), ("tpu", 128), ("tpu", 256)]
    }
    assert shapes == {
        ("cpu", 80): (3, 5, 8, 2, 64, 80),
        ("gpu", 80): (3, 5, 8, 2, 64, 128),
        ("tpu", 64): (3, 5, 8, 1, 64, 128),
        ("tpu", 80): (3, 5, 8, 2, 64, 128),
        ("tpu", 128): (3, 5, 8, 2, 64, 128),
        ("tpu", 256): (3, 5, 8, 4, 64, 128),
    }
    assert layout("tpu", 8, 64, 64, "bfloat16").bytes_per_block(3) == 3 * 8 * 64 * 128 * 2


def test_one_program_serves_decode_only_and_mixed_steps():
    """A decode-only program, told only kv_lens, gives what the mixed one does; padding rows may stand between live ones."""
    case = small([(0, 1), (0, 0), (30, 1), (15, 1)], 4, num_tokens=4, num_rows=4, decode_only=True)
    inputs = build(case, num_layers=2, poison=True)
    assert_right(inputs)
    rows = [0, 2, 3]
    take = lambda x: np.asarray(x)[rows]
    compact = RaggedBatch(take(inputs.batch.block_tables), take(inputs.batch.kv_lens), np.arange(4), np.array(3))
    mixed_case = replace(case, rows=tuple(case.rows[r] for r in rows), num_decodes=3, num_tokens=3, num_rows=3, decode_only=False)
    mixed = replace(
        inputs, case=mixed_case, batch=compact, q=take(inputs.q), k=take(inputs.k), v=take(inputs.v), live=np.ones(3, bool)
    )
    np.testing.assert_allclose(attend(mixed, "xla")[0], attend(inputs, "xla")[0][rows], atol=1e-6)


@pytest.mark.parametrize("heads", [HEADS["smollm2-135m"], Heads(4, 2, 16, sliding_window=11)], ids=["full", "window"])
def test_buckets_do_not_change_the_result(heads):
    """Token buckets 43 and 200, sequence buckets 6 and 40, wider tables: the same rows within rounding."""
    rows, outs = ((0, 1), (20, 1), (15, 1), (7, 18), (0, 22)), []
    for num_tokens, num_rows, max_blocks in ((43, 6, 4), (200, 6, 9), (43, 40, 7)):
        case = small(rows, 3, heads, num_tokens=num_tokens, num_rows=num_rows)
        inputs = build(case, num_layers=2, num_blocks=20, max_blocks=max_blocks, poison=True)
        outs.append(attend(inputs, "xla")[0][:43])
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("chunks", [(37,), (1,) * 5 + (32,), (8, 8, 16, 5), (3, 34)])
def test_prompt_cut_into_chunks_is_the_prompt_whole(chunks):
    """Each chunk is a step that reads what the steps before wrote; chunks start and end within blocks."""
    heads = Heads(4, 2, 16)
    pool_layout, spec = layout("cpu", 2, 16, 8, "float32"), AttentionSpec(0.25)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((64, n, 16)), jnp.float32) for n in (heads.num_heads, 2, 2))
    tables = jnp.array([[3, 1, 6, 2, 5]], jnp.int32)
    pool, out, done = pool_layout.allocate(2, 8), [], 0
    for new in chunks:
        batch = RaggedBatch(tables, jnp.array([done + new]), jnp.array([0, new]), jnp.array(0))
        padded = lambda x: jnp.pad(x[done : done + new], ((0, 37 - new), (0, 0), (0, 0)))
        step, pool = compiled(pool_layout, spec, "xla")(padded(q), padded(k), padded(v), pool, batch)
        out.append(step[:new])
        done += new
    batch = RaggedBatch(tables, jnp.array([37]), jnp.array([0, 37]), jnp.array(0))
    whole, _ = compiled(pool_layout, spec, "reference")(q[:37], k[:37], v[:37], pool_layout.allocate(2, 8), batch)
    np.testing.assert_allclose(np.concatenate(out), whole, atol=TOLERANCE, rtol=0)


def test_aligned_gives_a_token_the_same_bits_in_every_chunk():
    """Decodes, odd chunks and the whole prompt, at any place of the step and with another sequence before it."""
    pool_layout, spec = layout("cpu", 2, 16, 8, "float32"), AttentionSpec(0.25)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((37, n, 16)).astype(np.float32) for n in (4, 2, 2))
    tables, outs = jnp.array([[3, 1, 6, 2, 5], [7, 0, 0, 0, 0]], jnp.int32), []
    for chunks, lead in (((37,), 0), ((1,) * 37, 0), ((8, 8, 16, 5), 3), ((3, 34), 7), ((1,) * 9 + (11, 17), 1)):
        pool, out, done = pool_layout.allocate(2, 8), [], 0
        for new in chunks:
            lens = jnp.array([done + new, lead] if not lead else [lead, done + new])
            rows = tables if not lead else tables[::-1]
            batch = RaggedBatch(rows, lens, jnp.array([0, lead or new, lead + new]), jnp.array(0))

            def placed(x, done=done, new=new, lead=lead):
                flat = rng.standard_normal((44, *x.shape[1:])).astype(np.float32)
                flat[lead : lead + new] = x[done : done + new]
                return flat

            step, pool = compiled(pool_layout, spec, "aligned")(placed(q), placed(k), placed(v), pool, batch)
            out.append(np.asarray(step)[lead : lead + new])
            done += new
        outs.append(np.concatenate(out))
    for out in outs[1:]:
        np.testing.assert_array_equal(bits(out), bits(outs[0]))


@st.composite
def ragged_rows(draw):
    """Up to 8 rows in 64 tokens and 96 positions: decodes, then chunks, any of them empty."""
    decodes = draw(st.lists(st.integers(0, 95), max_size=8))
    chunks = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 36)), max_size=8 - len(decodes)))
    room = 64 - len(decodes)
    fitting = []
    for context, new in chunks:
        if new <= room:
            fitting.append((context, new))
            room -= new
    return tuple((context, 1) for context in decodes) + tuple(fitting), len(decodes)


@pytest.mark.parametrize("window", [None, 1, 13])
def test_any_ragged_geometry(window):
    """One compiled program per implementation serves every geometry of its bucket."""
    heads = Heads(4, 2, 16, sliding_window=window)

    @hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @hypothesis.given(ragged_rows(), st.integers(0, 5))
    def check(drawn, seed):
        case = Case("fuzz", heads, *drawn, num_tokens=64, num_rows=8, block_size=8)
        inputs = build(case, num_layers=2, num_blocks=128, max_blocks=13, seed=seed, poison=True)
        assert_right(inputs)
        assert_right(inputs, "reference")
        assert_right(inputs, "aligned")

    check()


def test_row_longer_than_its_table_touches_no_live_block():
    inputs = build(small([(5, 1), (20, 1)], 2), num_layers=2, poison=True)
    too_long = replace(inputs.batch, kv_lens=inputs.batch.kv_lens.at[1].set(10_000))
    out, pool = attend(replace(inputs, batch=too_long), "xla")
    expected, _ = attend(inputs, "reference")
    np.testing.assert_allclose(out[0], expected[0], atol=TOLERANCE, rtol=0)
    assert not out[1].any()
    table = np.asarray(inputs.batch.block_tables[1])
    np.testing.assert_array_equal(bits(pool)[:, table[table > 0]], bits(inputs.pool)[:, table[table > 0]])


@pytest.mark.parametrize("block", [-1, 1000])
def test_block_id_outside_the_pool_writes_no_block_of_anybody(block):
    inputs = build(small([(5, 1), (20, 1)], 2), num_layers=2)
    wrong = replace(inputs.batch, block_tables=inputs.batch.block_tables.at[1].set(block))
    for implementation in ("reference", "xla"):
        _, pool = attend(replace(inputs, batch=wrong), implementation)
        mine = np.asarray(inputs.batch.block_tables[0])
        changed = (pool != np.asarray(inputs.pool)).any((0, 2, 3, 4, 5))
        assert set(np.flatnonzero(changed)) <= {0, *mine}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("decode_only", [True, False], ids=["decode", "mixed"])
def test_donated_pool_stays_in_place_through_a_scan_over_layers(dtype, decode_only):
    """Aliased bytes alone would not show a copy: temporaries must be far below the pool, and no copy may have its shape."""
    heads, num_layers, num_rows = HEADS["smollm2-135m"], 30, 16
    num_tokens = num_rows if decode_only else 256
    pool_layout = layout("cpu", heads.num_kv_heads, heads.head_dim, 32, dtype)
    spec = AttentionSpec(heads.head_dim**-0.5, decode_only=decode_only)

    def step(q, k, v, pool, batch):
        metadata = prepare(batch, num_tokens, pool_layout, spec, "xla")

        def layer(carry, index):
            x, pool = carry
            out, pool = paged_attention(
                x, k, v, pool, index, metadata, layout=pool_layout, spec=spec, implementation="xla"
            )
            return (x + out, pool), None

        return jax.lax.scan(layer, (q, pool), jnp.arange(num_layers))[0]

    array = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype)
    tokens = lambda count: array(num_tokens, count, heads.head_dim, dtype=jnp.float32)
    pool = array(*pool_layout.shape(num_layers, 1000), dtype=pool_layout.storage_dtype)
    batch = RaggedBatch(array(num_rows, 64), array(num_rows), array(num_rows + 1), array())
    lowered = jax.jit(step, donate_argnums=3).lower(tokens(9), tokens(3), tokens(3), pool, batch)
    program = lowered.compile()
    memory, pool_bytes = program.memory_analysis(), pool_layout.bytes_per_block(num_layers) * 1000
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 20
    shape = ",".join(map(str, pool.shape))
    assert not [line for line in program.as_text().splitlines() if f"[{shape}]" in line.split(" = ")[-1][:60] and " copy(" in line]


class TestChoice:
    def test_cpu_serves_with_xla_what_its_kernel_does_not(self):
        assert choose("cpu", layout("cpu", 2, 80, 32, "bfloat16"), AttentionSpec(1.0, soft_cap=30.0)) == "xla"

    def test_what_the_kernel_refuses_falls_back_unless_it_was_asked_for(self):
        refused = layout("tpu", 2, 512, 32, "float32")
        assert choose("tpu", refused, AttentionSpec(1.0)) == "xla"
        with pytest.raises(NotImplementedError, match="512"):
            choose("tpu", refused, AttentionSpec(1.0), "mosaic_tpu")

    def test_unknown_names_are_refused(self):
        with pytest.raises(ValueError, match="cutlass.*reference, xla, aligned"):
            choose("cpu", layout("cpu", 2, 64, 32, "float32"), AttentionSpec(1.0), "cutlass")
        with pytest.raises(ValueError, match="platform='metal'"):
            layout("metal", 2, 64, 32, "float32")

    def test_arrays_that_do_not_fit_the_layout_are_refused(self):
        inputs = build(small(), num_layers=1)
        with pytest.raises(ValueError, match="pool"):
            replace(inputs, pool=inputs.pool[:, :, :1]).attend("xla")
        with pytest.raises(ValueError, match="kv heads"):
            replace(inputs, q=inputs.q[:, :5]).attend("xla")
        with pytest.raises(ValueError, match="sinks"):
            replace(inputs, extras={"sinks": jnp.zeros(6)}).attend("xla")
        with pytest.raises(ValueError, match="kv_lens"):
            replace(inputs, batch=replace(inputs.batch, kv_lens=inputs.batch.kv_lens[:-1])).attend("xla")
