"""The CPU's own kernels against float64, and what they refuse.  They need AVX-512 and matrix tiles: skipped elsewhere, and why."""

from __future__ import annotations

from dataclasses import replace

import gguf
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jserve.models.layers import linear
from jserve.models.quantized import QuantizedMatrix, two_digit_dot
from pallas_kernels.cpu import compiled
from pallas_kernels.cpu.ops import linear_int8, matmul, matmul_packed, scan_rows, serves_matmul, why_no_simd, why_no_tiles
from pallas_kernels.cpu.packed_layout import tiled
from pallas_kernels.paged_attention import AttentionSpec, RaggedBatch, choose, layout, paged_attention, prepare
from pallas_kernels.paged_attention.cases import CASES, Case, Heads, build, twin
from tests.pallas_kernels.test_paged_attention import assert_right, attend, ragged_rows, small
from tests.pallas_kernels.test_paged_attention import compiled as compiled_program

needs_tiles = pytest.mark.skipif(why_no_tiles() is not None, reason=f"{why_no_tiles()}")
needs_simd = pytest.mark.skipif(why_no_simd() is not None, reason=f"{why_no_simd()}")
SERVED = [case for case in CASES if case.heads.soft_cap is None and not case.heads.has_sinks]


@needs_tiles
class TestMatmul:
    @hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
    @hypothesis.given(
        rows=st.integers(1, 130), depth=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 99)
    )
    def test_as_exact_as_float32_for_any_number_of_rows(self, rows, depth, columns, seed):
        x, w = operands(rows, 32 * depth, 32 * columns, seed)
        exact = x.astype(np.float64) @ w.astype(np.float64).T
        of_float32 = np.abs(x) @ np.abs(w).T * np.finfo(np.float32).eps
        assert (np.abs(np.asarray(matmul(x, w)) - exact) <= 2 * of_float32 + 1e-30).all()

    def test_many_rows_and_panels_are_cut_into_blocks_and_runs(self):
        x, w = operands(700, 1536, 32 * 67, 1)
        np.testing.assert_allclose(matmul(x, w), x.astype(np.float64) @ w.T.astype(np.float64), rtol=0, atol=2e-4)

    def test_a_row_does_not_depend_on_its_batch(self):
        x, w = operands(300, 576, 96, 2)
        whole = np.asarray(matmul(x, w))
        for begin, end in ((0, 9), (7, 24), (100, 133), (30, 300)):
            np.testing.assert_array_equal(np.asarray(matmul(x[begin:end], w)), whole[begin:end])
        for begin, end in ((0, 1), (7, 11)):  # few rows: in float32, and so alike among themselves
            np.testing.assert_array_equal(np.asarray(matmul(x[begin:end], w))[0], np.asarray(matmul(x[begin : begin + 1], w))[0])

    def test_sizes_over_the_whole_range_of_float32(self):
        x = np.float32(10.0) ** np.arange(-30, 34, 2, dtype=np.float32)[None, :]
        w = np.float32(1) / np.tile(x, (32, 1))
        np.testing.assert_allclose(matmul(x, w), np.full((1, 32), 32), rtol=1e-6)

    def test_nan_and_infinity_stay_in_their_rows(self):
        x, w = operands(20, 64, 32, 3)
        x[3, 5], x[9, 2] = np.nan, np.inf
        out = np.asarray(matmul(x, w))
        assert not np.isfinite(out[[3, 9]]).any()
        assert np.isfinite(np.delete(out, [3, 9], 0)).all()

    def test_calls_at_the_same_time(self):
        x, w = operands(64, 576, 960, 4)
        expected = np.asarray(matmul(x, w))
        many = jax.jit(lambda x, *ws: [matmul(x, w) for w in ws])
        for out in many(x, *[w] * 8) * 3:
            np.testing.assert_array_equal(out, expected)

    @pytest.mark.parametrize(("depth", "columns"), [(48, 64), (64, 40)])
    def test_shapes_that_do_not_fill_tiles_are_left_to_xla(self, depth, columns):
        x, w = operands(5, depth, columns, 5)
        assert not serves_matmul(jnp.asarray(x), jnp.asarray(w))
        np.testing.assert_allclose(linear(jnp.asarray(x), jnp.asarray(w)), x @ w.T, atol=1e-4)

    def test_programs_for_other_platforms_do_not_call_it(self):
        x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 64), (64, 64)))
        traced = jax.jit(linear).trace(x, w)
        assert "jserve_matmul" in traced.lower().as_text()
        assert "jserve_matmul" not in traced.lower(lowering_platforms=("tpu",)).as_text()


@needs_tiles
class TestMatmulPacked:
    @hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
    @hypothesis.given(
        encoding=st.sampled_from(["Q4_0", "Q4_1", "Q8_0"]),
        rows=st.integers(1, 130), depth=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 99),
    )
    def test_as_exact_as_float32_for_any_number_of_rows(self, encoding, rows, depth, columns, seed):
        x, w = operands(rows, 32 * depth, 32 * columns, seed)
        blocks = gguf.quantize(w, gguf.GGMLQuantizationType[encoding])
        assert_as_exact_as_float32(matmul_packed(x, tiled(blocks, encoding), encoding), x, blocks, encoding)

    @pytest.mark.parametrize("rows", [8, 700])
    def test_many_rows_and_panels_are_cut_into_blocks_and_runs(self, rows):
        x, w = operands(rows, 1536, 32 * 67, 1)
        blocks = gguf.quantize(w, gguf.GGMLQuantizationType.Q4_1)
        assert_as_exact_as_float32(matmul_packed(x, tiled(blocks, "Q4_1"), "Q4_1"), x, blocks, "Q4_1")

    def test_a_row_does_not_depend_on_its_batch(self):
        x, w = operands(300, 576, 96, 2)
        tiles = tiled(gguf.quantize(w, gguf.GGMLQuantizationType.Q4_1), "Q4_1")
        whole = np.asarray(matmul_packed(x, tiles, "Q4_1"))
        for begin, end in ((7, 16), (7, 24), (30, 300)):
            np.testing.assert_array_equal(matmul_packed(x[begin:end], tiles, "Q4_1"), whole[begin:end])

    def test_tiles_of_another_size_are_refused(self):
        with pytest.raises(ValueError, match="640 bytes of Q4_1"):
            matmul_packed(np.zeros((1, 96), np.float32), np.zeros((2, 640), np.uint8), "Q4_1")


def assert_as_exact_as_float32(y, x, blocks, encoding):
    """Of weights d * q + m, which float32 rounds, against numbers that it does not: what is lost is by |d * q| and |m|."""
    w = gguf.dequantize(blocks, gguf.GGMLQuantizationType[encoding]).astype(np.float64)
    by_block = np.repeat(np.abs(w).reshape(len(w), -1, 32).max(-1), 32, axis=-1)
    bound = np.abs(x) @ by_block.T * 8 * np.finfo(np.float32).eps
    assert (np.abs(np.asarray(y) - x.astype(np.float64) @ w.T) <= bound + 1e-30).all()


@needs_tiles
class TestLinearInt8:
    """Bit for bit what XLA makes of the same formula."""

    @hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
    @hypothesis.given(
        rows=st.integers(1, 80), depth=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 99)
    )
    def test_any_number_of_rows(self, rows, depth, columns, seed):
        operands = int8_operands(rows, 64 * depth, 32 * columns, seed)
        np.testing.assert_array_equal(linear_int8(*operands), jax.jit(two_digit_dot)(*operands))

    @pytest.mark.parametrize(("rows", "columns"), [(1, 3072), (8, 32), (40, 3072), (300, 32 * 131)])
    def test_gated_columns(self, rows, columns):
        x, w, scales = int8_operands(rows, 576, columns, 6)
        gate, up = np.split(np.asarray(linear_int8(x, w, scales), np.float64), 2, axis=-1)
        expected = gate / (1 + np.exp(-np.maximum(gate, -700))) * up
        got = np.asarray(linear_int8(x, w, scales, is_gated=True))
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-30)

    def test_a_gate_of_any_size_stays_a_number(self):
        x, w, scales = int8_operands(3, 64, 32, 7)
        scales[:16] = [1e-30, 1e-3, 1, 1e3, 1e6, 1e9, 1e12, 1e15] * 2
        gate = np.asarray(linear_int8(x, w, scales), np.float64)[:, :16]
        up = np.asarray(linear_int8(x, w, scales), np.float64)[:, 16:]
        expected = np.where(gate < -80, 0, gate / (1 + np.exp(-np.maximum(gate, -80)))) * up
        got = np.asarray(linear_int8(x, w, scales, is_gated=True))
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-28)

    @pytest.mark.parametrize("rows", [8, 300])
    def test_rows_and_panels_are_cut_into_blocks_and_runs(self, rows):
        operands = int8_operands(rows, 1536, 32 * 131, 1)
        np.testing.assert_array_equal(linear_int8(*operands), jax.jit(two_digit_dot)(*operands))

    def test_a_row_does_not_depend_on_its_batch(self):
        x, w, scales = int8_operands(300, 576, 96, 2)
        whole = np.asarray(linear_int8(x, w, scales))
        for begin, end in ((0, 1), (7, 15), (7, 24), (30, 300)):
            np.testing.assert_array_equal(linear_int8(x[begin:end], w, scales), whole[begin:end])

    def test_zero_tiny_and_unsound_rows_keep_to_themselves(self):
        x, w, scales = int8_operands(20, 64, 32, 3)
        x[1], x[2], x[3, 5], x[9, 2] = 0, 1e-38, np.nan, np.inf
        out, expected = np.asarray(linear_int8(x, w, scales)), np.asarray(jax.jit(two_digit_dot)(x, w, scales))
        assert not np.isfinite(out[[3, 9]]).any() and not out[1].any()
        np.testing.assert_array_equal(np.delete(out, [3, 9], 0), np.delete(expected, [3, 9], 0))

    def test_calls_at_the_same_time(self):
        x, w, scales = int8_operands(64, 576, 960, 4)
        expected = np.asarray(linear_int8(x, w, scales))
        for out in jax.jit(lambda x, *ws: [linear_int8(x, w, scales) for w in ws])(x, *[w] * 8) * 3:
            np.testing.assert_array_equal(out, expected)

    @pytest.mark.parametrize(("depth", "columns", "calls"), [(64, 32, True), (96, 64, False), (64, 40, False)])
    def test_only_programs_for_cpu_call_it_for_shapes_that_fill_tiles(self, depth, columns, calls):
        x, w, scales = int8_operands(5, depth, columns, 5)
        traced = jax.jit(linear).trace(x, QuantizedMatrix(jnp.asarray(w), jnp.asarray(scales)))
        assert ("jserve_linear_int8" in traced.lower().as_text()) == calls
        assert "jserve_linear_int8" not in traced.lower(lowering_platforms=("tpu",)).as_text()


@needs_simd
class TestAttention:
    @pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
    def test_twin_of_each_real_shape(self, case):
        """Everything unowned is NaN, as in the test of the same name for XLA."""
        in_bucket = replace(twin(case), num_tokens=16 if case.decode_only else 272, num_rows=16)
        inputs = build(replace(in_bucket, block_size=16), num_layers=2, num_blocks=128, max_blocks=12, poison=True)
        assert_right(inputs, "llvm_cpu")

    @pytest.mark.parametrize("window", [None, 1, 20])
    def test_chunks_of_several_sequences_and_windows(self, window):
        heads = Heads(6, 2, 32, sliding_window=window)
        rows = ((0, 1), (40, 1), (15, 3), (0, 50), (63, 2), (30, 21))
        case = small(rows, 2, heads, 16)
        assert_right(build(case, num_layers=2, poison=True), "llvm_cpu")

    def test_rows_as_long_as_their_table(self):
        for length in (15, 16, 17, 512):
            case = small(((length - 1, 1), (0, min(length, 40))), 1, Heads(4, 1, 64), 16)
            assert_right(build(case, num_layers=2, poison=True), "llvm_cpu")

    @pytest.mark.parametrize("window", [None, 1, 13, 70])
    @pytest.mark.parametrize("block_size", [16, 48])
    def test_any_ragged_geometry(self, window, block_size):
        heads = Heads(14, 2, 16, sliding_window=window)

        @hypothesis.settings(max_examples=20, deadline=None, derandomize=True, database=None)
        @hypothesis.given(ragged_rows(), st.integers(0, 5))
        def check(drawn, seed):
            case = Case("fuzz", heads, *drawn, num_tokens=64, num_rows=8, block_size=block_size)
            assert_right(build(case, num_layers=2, num_blocks=64, max_blocks=7, seed=seed, poison=True), "llvm_cpu")

        check()

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "float8_e4m3fn"])
    @pytest.mark.parametrize("heads", [Heads(6, 2, 64), Heads(3, 3, 80, sliding_window=20), Heads(100, 1, 16)], ids=str)
    def test_pools_of_narrow_numbers(self, dtype, heads):
        case = small(((0, 1), (70, 1), (15, 3), (0, 50)), 2, heads, 16)
        assert_right(build(case, dtype=dtype, num_layers=2, poison=True), "llvm_cpu")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
    def test_a_token_has_the_same_bits_in_any_run(self, dtype):
        """As a chunk, cut anywhere, and token by token as decodes: a tile has its place in the sequence."""
        pool_layout = layout("cpu", 2, 64, 16, dtype, scaled=dtype == "int8")
        spec, random = AttentionSpec(0.125), np.random.default_rng(3)
        q, k, v = (random.standard_normal((100, heads, 64), np.float32) for heads in (6, 2, 2))
        table = jnp.array([[3, 9, 1, 4, 7, 2, 5]], jnp.int32)
        outs = []
        for cuts in ([100], [1] * 100, [3, 70, 20, 7]):
            pool, done, out = pool_layout.allocate(2, 10), 0, []
            for new in cuts:
                part = slice(done, done + new)
                done += new
                batch = RaggedBatch(table, jnp.array([done]), jnp.array([0, new]), jnp.array(int(new == 1)))
                step, pool = compiled_program(pool_layout, spec, "llvm_cpu")(q[part], k[part], v[part], pool, batch)
                out.append(np.asarray(step))
            outs.append(np.concatenate(out))
        for out in outs[1:]:
            np.testing.assert_array_equal(out, outs[0])

    @pytest.mark.parametrize("block", [-1, 1000])
    def test_blocks_outside_the_pool_are_read_as_the_dead_one_and_not_written(self, block):
        inputs = build(small(((5, 1), (20, 1), (0, 9)), 2, Heads(6, 2, 16), 16), num_layers=2)
        wrong = replace(inputs.batch, block_tables=inputs.batch.block_tables.at[1].set(block))
        expected, _ = attend(inputs, "llvm_cpu")
        out, pool = attend(replace(inputs, batch=wrong), "llvm_cpu")
        np.testing.assert_array_equal(out[[0, *range(2, 11)]], expected[[0, *range(2, 11)]])
        others = np.setdiff1d(np.arange(1, pool.shape[1]), np.asarray(wrong.block_tables)[[0, 2]])
        np.testing.assert_array_equal(pool[:, others], np.asarray(inputs.pool)[:, others])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_donated_pool_is_written_in_place(self, dtype):
        pool_layout, spec = layout("cpu", 2, 64, 32, dtype), AttentionSpec(0.125, decode_only=True)

        def two_layers(q, k, v, pool, batch):
            metadata = prepare(batch, 4, pool_layout, spec, "llvm_cpu")
            for layer in range(2):
                kind = dict(layout=pool_layout, spec=spec, implementation="llvm_cpu")
                q, pool = paged_attention(q, k, v, pool, layer, metadata, **kind)
            return q, pool

        floats = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        pool = jax.ShapeDtypeStruct(pool_layout.shape(2, 2000), pool_layout.storage_dtype)
        batch = RaggedBatch(ints(4, 8), ints(4), ints(5), ints())
        arguments = floats(4, 6, 64), floats(4, 2, 64), floats(4, 2, 64), pool, batch
        program = jax.jit(two_layers, donate_argnums=3).lower(*arguments).compile()
        assert program.memory_analysis().temp_size_in_bytes < 2 << 20


class TestChoice:
    @needs_simd
    def test_it_serves_plain_attention_and_xla_the_rest(self):
        plain, spec = layout("cpu", 2, 64, 32, "float32"), AttentionSpec(1.0)
        for dtype, scaled in (("float32", False), ("bfloat16", False), ("float16", False), ("int8", True)):
            assert choose("cpu", layout("cpu", 2, 64, 32, dtype, scaled), spec) == "llvm_cpu"
        assert choose("cpu", plain, replace(spec, soft_cap=30.0)) == "xla"
        assert choose("cpu", layout("cpu", 2, 24, 32, "float32"), spec) == "xla"
        with pytest.raises(NotImplementedError, match="soft cap"):
            choose("cpu", plain, replace(spec, soft_cap=30.0), "llvm_cpu")

    def test_other_machines_use_xla_and_say_what_they_lack(self, monkeypatch, caplog):
        caplog.set_level("INFO")
        monkeypatch.setattr("pallas_kernels.paged_attention.llvm_cpu.ops.why_no_simd", lambda: "the processor lacks avx512f")
        assert choose("cpu", layout("cpu", 2, 64, 32, "float32"), AttentionSpec(1.0)) == "xla"
        assert "the processor lacks avx512f" in caplog.text

    def test_a_machine_without_tiles_multiplies_by_xla(self, monkeypatch):
        monkeypatch.setattr("pallas_kernels.cpu.ops.why_no_tiles", lambda: "the processor lacks amx-tile")
        x, w = operands(4, 64, 64, 6)
        assert not serves_matmul(jnp.asarray(x), jnp.asarray(w))
        with pytest.raises(NotImplementedError, match="amx-tile"):
            matmul(x, w)

    def test_what_is_lacking_is_named(self):
        assert compiled._lacks({"avx512f": True, "avx512bw": False}, ("avx512f", "avx512bw")) == "the processor lacks avx512bw"


def operands(rows: int, depth: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((rows, depth), np.float32), random.standard_normal((columns, depth), np.float32)


def int8_operands(rows: int, depth: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, depth), np.float32) * np.exp(random.standard_normal((rows, 1), np.float32))
    return x, random.integers(-127, 128, (columns, depth), np.int8), random.random(columns, np.float32)


@needs_simd
class TestScanRows:
    @pytest.mark.parametrize("width", [64, 192, 49152])
    def test_maximum_mass_and_lowest_id_of_the_best(self, width):
        generator = np.random.default_rng(width)
        logits = generator.normal(0, 5, (5, width)).astype(np.float32)
        shaped = np.round(generator.normal(0, 2, (5, width))).astype(np.float32)  # many are equal
        maximum, mass, best, best_id = (np.asarray(one) for one in scan_rows(logits, shaped, jnp.ones(5, bool)))
        np.testing.assert_array_equal(maximum, logits.max(axis=1))
        np.testing.assert_array_equal(best, shaped.max(axis=1))
        np.testing.assert_array_equal(best_id, shaped.argmax(axis=1))
        exact = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True)).sum(axis=1)
        np.testing.assert_allclose(mass, exact, rtol=4e-6)

    def test_rows_of_no_numbers_are_found_and_touch_no_other(self):
        logits = np.random.default_rng(1).normal(0, 5, (7, 128)).astype(np.float32)
        alone = [np.asarray(one)[0] for one in scan_rows(logits[3:4], logits[3:4], jnp.ones(1, bool))]
        logits[0, 5], logits[1, 7], logits[2] = np.nan, np.inf, -np.inf
        used = jnp.arange(7) < 6
        result = [np.asarray(one) for one in scan_rows(logits, logits, used)]
        np.testing.assert_array_equal(np.isfinite(result[1]), [False, False, False, True, True, True, True])
        assert [one[3] for one in result] == alone and [one[6] for one in result] == [0, 1, 0, 0]
