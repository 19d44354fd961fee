"""GPU kernels under the GPU interpreter, against the float32 reference; every unowned slot of the pool is NaN.

Error bounds, for outputs of about 1, against the reference that reads the same pool.  A pool of bfloat16 or int8 is computed
with in bfloat16: 0.02 (outputs have steps of 2**-8, weights are rounded once before the value matmul).  A pool of float16 or
fp8 is computed with in float16, whose steps are an eighth: 0.004 with float32 queries.  Values of 8 bits enter exactly and
scales are applied in float32, so what 8 bits cost is what storing costs (`stored`, tested in test_paged_attention.py).
"""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params", exc_type=ImportError)

from pallas_kernels.paged_attention import AttentionSpec, RaggedBatch, choose, layout, mosaic_gpu  # noqa: E402
from pallas_kernels.paged_attention import mosaic_gpu_chunk, mosaic_gpu_decode, query_tiles  # noqa: E402
from pallas_kernels.paged_attention.cases import Case, Heads  # noqa: E402
from pallas_kernels.paged_attention.mosaic_gpu_tiles import GpuTiles  # noqa: E402
from tests.support.gpu_interpreter import RACES, check, compile_threads_once, make_inputs  # noqa: E402

BFLOAT16 = 0.02
FLOAT16 = 0.004
BOUNDS = {"float16": FLOAT16, "int8": BFLOAT16, "float8_e4m3fn": FLOAT16, "float8_e5m2": FLOAT16}


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch):
    compile_threads_once(monkeypatch)
    mosaic_gpu_decode.decode_attention.clear_cache()  # a planted bug must be traced
    mosaic_gpu_chunk.attend_chunks.clear_cache()


def decodes(heads: Heads, lengths, block_size: int = 16) -> Case:
    rows = tuple((max(n - 1, 0), min(n, 1)) for n in lengths)
    return Case("decodes", heads, rows, len(rows), len(rows), len(rows), block_size, decode_only=True)


def mixed(heads: Heads, lengths, chunks, block_size: int = 16, padding: int = 3) -> Case:
    rows = decodes(heads, lengths).rows + tuple(chunks)
    num_tokens = sum(new for _, new in rows) + padding
    return Case("mixed", heads, rows, len(lengths), num_tokens, len(rows) + 1, block_size)


def test_decode_rows_of_every_kind_in_one_call():
    """Padding rows first, between and last; the first and last token of a block, of a tile of keys and of a split."""
    lengths = [0, 1, 16, 17, 0, 64, 65, 256, 257, 600, 0]
    check(make_inputs(decodes(Heads(3, 1, 64), lengths)), BFLOAT16)


def test_decode_window_skips_freed_blocks():
    """Table entries behind the window are the dead block, which is NaN.  Contexts around the window and a block's edge."""
    check(make_inputs(decodes(Heads(4, 2, 128, sliding_window=50), [1, 50, 51, 66, 67, 300])), BFLOAT16)


def test_decode_with_blocks_larger_than_a_tile_soft_cap_and_sinks():
    heads = Heads(2, 1, 80, soft_cap=5.0, has_sinks=True)
    check(make_inputs(decodes(heads, [1, 127, 128, 129, 700], block_size=128)), BFLOAT16)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_decode_of_pools_of_other_types(dtype):
    case = decodes(Heads(3, 1, 80 if dtype == "int8" else 64), [0, 1, 64, 81])
    check(make_inputs(case, dtype=dtype, compute_dtype="float32"), BOUNDS[dtype])


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_mixed_step_of_8_bits_with_a_scale_per_head(dtype):
    """Chunks of several tiles of keys, so that slots are used again; the last tile is cleared of what no token has reached."""
    case = mixed(Heads(4, 2, 64), [20], [(3, 5), (140, 20)], padding=0)
    check(make_inputs(case, dtype=dtype, compute_dtype="float32"), BOUNDS[dtype], tiles=GpuTiles(chunk_warpgroups=1))


def test_heads_of_256_in_decodes_and_chunks():
    check(make_inputs(mixed(Heads(2, 1, 256, sliding_window=100), [1, 130], [(120, 12)], padding=0)), BFLOAT16)


def test_chunk_of_8_bits_and_heads_of_256():
    case = mixed(Heads(1, 1, 256), [], [(130, 5)], padding=1)
    check(make_inputs(case, dtype="float8_e4m3fn", compute_dtype="float32"), FLOAT16)


def test_blackwell_kernels_in_a_mixed_step():
    """Weights through shared memory, output in strips.  The interpreter's products are plain: tcgen05 is the compiler's."""
    case = mixed(Heads(2, 1, 128), [70], [(60, 12)], padding=0)
    check(make_inputs(case), BFLOAT16, tiles=GpuTiles("tcgen05", chunk_warpgroups=1))


def test_more_query_heads_than_a_tile_has_rows():
    check(make_inputs(mixed(Heads(71, 1, 64), [40], [(15, 2)], padding=0)), BFLOAT16)


def test_mixed_step_with_chunks_at_any_token_and_any_block_row():
    """Chunks start at flat tokens 2, 7 and 57 and at rows 0, 14 and 12 of a block; three query heads share a kv head."""
    check(make_inputs(mixed(Heads(6, 2, 64), [1, 130], [(0, 5), (30, 50), (140, 20)])), BFLOAT16)


def test_chunks_with_window_soft_cap_and_sinks():
    heads = Heads(2, 1, 128, sliding_window=40, soft_cap=5.0, has_sinks=True)
    check(make_inputs(mixed(heads, [100], [(0, 5), (60, 80)])), BFLOAT16)


def test_empty_batch_changes_nothing():
    check(make_inputs(mixed(Heads(1, 1, 64), [], [], padding=1), max_blocks=2), BFLOAT16)


def test_scales_of_keys_and_values():
    inputs = make_inputs(mixed(Heads(4, 2, 64), [20], [(3, 5)]))
    scales = {"k_scale": jnp.array([0.5, 2.0]), "v_scale": jnp.float32(0.25)}
    check(replace(inputs, extras=scales), BFLOAT16)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("case", [
    decodes(Heads(1, 1, 64), [200]), mixed(Heads(1, 1, 64), [], [(150, 10)], padding=0)
], ids=["decode", "chunk"])  # fmt: skip
def test_no_races(case, dtype):
    """Slots are filled and read several times."""
    check(make_inputs(case, dtype=dtype), BFLOAT16, interpret=RACES, tiles=GpuTiles(chunk_warpgroups=1))


class TestPlantedBugs:
    """What the tests above would do if the kernels were wrong."""

    def inputs(self, **options):
        return make_inputs(decodes(Heads(1, 1, 64, **options), [20, 200]))

    def test_missing_wait(self, monkeypatch):
        """A wait for keys and values that is left out: NaN of unfilled memory, or the race detector."""
        real, waits = mosaic_gpu_decode.plgpu.barrier_wait, []

        def only_for_queries(barrier):
            if not waits:
                real(barrier)
            waits.append(barrier)

        monkeypatch.setattr(mosaic_gpu_decode.plgpu, "barrier_wait", only_for_queries)
        with pytest.raises(Exception, match="(?i)race|NaN|barrier"):
            check(self.inputs(), BFLOAT16, interpret=RACES)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
    def test_values_beyond_the_end_not_cleared(self, monkeypatch, dtype):
        monkeypatch.setattr(mosaic_gpu_decode, "clear_rows_from", lambda *_: None)
        with pytest.raises(AssertionError, match="NaN"):
            check(make_inputs(self.inputs().case, dtype=dtype), BFLOAT16)

    def test_chunk_values_beyond_the_end_not_cleared_after_widening(self, monkeypatch):
        monkeypatch.setattr(mosaic_gpu_chunk, "clear_rows_from", lambda *_: None)
        case = mixed(Heads(1, 1, 64), [], [(60, 10)], padding=0)
        with pytest.raises(AssertionError, match="NaN"):
            check(make_inputs(case, dtype="float8_e4m3fn"), BFLOAT16, tiles=GpuTiles(chunk_warpgroups=1))

    def test_scale_of_another_head(self):
        inputs = make_inputs(decodes(Heads(2, 2, 64), [70]), dtype="int8")
        for name in ("k_scale", "v_scale"):
            scale = inputs.extras[name] * jnp.array([1.0, 4.0])
            read_with = replace(inputs, extras=inputs.extras | {name: scale})
            swapped = replace(inputs, extras=inputs.extras | {name: scale[::-1]})
            with pytest.raises(AssertionError, match="Not equal to tolerance"):
                check(swapped, BFLOAT16, reference=read_with)

    def test_wrong_block(self, monkeypatch):
        real = mosaic_gpu.prepare

        def swapped(*arguments):
            metadata = real(*arguments)
            return replace(metadata, tables=metadata.tables.at[1, 0].set(metadata.tables[1, 1]))

        monkeypatch.setattr(mosaic_gpu, "prepare", swapped)
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            check(self.inputs(), BFLOAT16)

    def test_window_off_by_one(self):
        """One token more in the kernel's window than in the reference's."""
        inputs = self.inputs(sliding_window=18)
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            check(inputs, BFLOAT16, spec=replace(inputs.case.spec, sliding_window=19))


def test_query_tiles_cover_every_chunk_token_once():
    """200 random steps against a loop over tokens."""
    make = jax.jit(query_tiles.query_tiles, static_argnums=(1, 2))
    for seed in range(200):
        rng = np.random.default_rng(seed)
        num_decodes, size = int(rng.integers(0, 4)), (21, 32)[seed % 2]
        new = np.array([1] * num_decodes + list(rng.integers(0, 60, 6 - num_decodes)))
        new[np.cumsum(new) > 96] = 0
        context = rng.integers(0, 51, 6)
        cu_q_lens = np.cumsum([0, *new])
        geometry = np.zeros((6, 1)), np.where(new > 0, context + new, 0), cu_q_lens, num_decodes
        tiles = make(RaggedBatch(*(jnp.asarray(x, jnp.int32) for x in geometry)), 96, size)
        found = {}
        for row, token, position, count in zip(*map(np.asarray, (tiles.row, tiles.token, tiles.position, tiles.count))):
            assert 0 <= count <= size
            for i in range(count):
                assert token + i not in found
                found[token + i] = row, position + i
        expected = {
            cu_q_lens[row] + i: (row, context[row] + i) for row in range(num_decodes, 6) for i in range(new[row])
        }
        assert found == expected


def test_row_longer_than_its_table_is_padding():
    inputs = make_inputs(decodes(Heads(1, 1, 64), [5, 40]))
    too_long = replace(inputs.batch, kv_lens=jnp.array([5, 1000], jnp.int32))
    assert mosaic_gpu.prepare(too_long, 2, inputs.layout, inputs.case.spec).decode_lens.tolist() == [5, 0]


class TestChoice:
    SPEC = AttentionSpec(1.0)

    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
    @pytest.mark.parametrize("dtype", ["bfloat16", *BOUNDS])
    def test_hopper_kernels_serve(self, head_dim, dtype):
        assert choose("gpu", layout("gpu", 8, head_dim, 64, dtype), self.SPEC) == "mosaic_gpu"

    @pytest.mark.parametrize(("fields", "reason"), [
        ((8, 512, 64, "bfloat16"), "head_dim=512: at most 256 with wgmma.*; triton: head_dim=512: at most 256"),
        ((8, 128, 64, "float32"), "a pool of float32, not bfloat16, float16, int8.*; triton: a pool of float32"),
    ], ids=["head of 512", "float32"])  # fmt: skip
    def test_what_no_kernel_can_serve_falls_back_unless_it_was_asked_for(self, fields, reason, caplog):
        refused = layout("gpu", *fields)
        with caplog.at_level("INFO"):
            assert choose("gpu", refused, self.SPEC) == "xla"
        assert re.search(f"attention on gpu.* by xla; not by mosaic_gpu: {reason}", caplog.text)
        for name, of_name in zip(("mosaic_gpu", "triton"), reason.split(".*; triton: ")):
            with pytest.raises(NotImplementedError, match=of_name):
                choose("gpu", refused, self.SPEC, name)

    def test_what_they_cannot_serve_goes_to_triton_unless_it_was_asked_for(self, caplog):
        refused, reason = layout("gpu", 8, 128, 48, "bfloat16"), "block_size=48: a multiple of 8 that divides the 64 keys"
        with caplog.at_level("INFO"):
            assert choose("gpu", refused, self.SPEC) == "triton"
        assert re.search(f"attention on gpu.* by triton; not by mosaic_gpu: {reason}", caplog.text)
        with pytest.raises(NotImplementedError, match=reason):
            choose("gpu", refused, self.SPEC, "mosaic_gpu")

    def test_blackwell_serves_heads_up_to_128_and_triton_larger_ones(self, monkeypatch):
        monkeypatch.setattr(mosaic_gpu, "compute_capability", lambda: "10.0")
        assert choose("gpu", layout("gpu", 8, 128, 64, "int8"), self.SPEC) == "mosaic_gpu"
        assert choose("gpu", layout("gpu", 8, 256, 64, "bfloat16"), self.SPEC) == "triton"
        with pytest.raises(NotImplementedError, match="head_dim=256: at most 128 with tcgen05"):
            choose("gpu", layout("gpu", 8, 256, 64, "bfloat16"), self.SPEC, "mosaic_gpu")

    @pytest.mark.parametrize(("capability", "dtype", "chosen", "why"), [
        ("8.0", "bfloat16", "triton", ""),
        ("8.9", "float16", "triton", ""),
        ("8.9", "int8", "xla", "; triton: a pool of int8, not bfloat16, float16"),
        ("7.5", "float16", "xla", "; triton: compute capability 7.5: the kernels need 8.0"),
    ], ids=["A100", "L4", "L4 with 8 bits", "T4"])  # fmt: skip
    def test_other_cards_and_the_log_says_why(self, capability, dtype, chosen, why, monkeypatch, caplog):
        monkeypatch.setattr(mosaic_gpu, "compute_capability", lambda: capability)
        served, reason = layout("gpu", 8, 128, 64, dtype), f"compute capability {capability}: the kernels are written for 9.0"
        with caplog.at_level("INFO"):
            assert choose("gpu", served, self.SPEC) == chosen
        assert re.search(f"attention on gpu.* by {chosen}; not by mosaic_gpu: {reason} and 10.0.*{why}", caplog.text)
        with pytest.raises(NotImplementedError, match=reason):
            choose("gpu", served, self.SPEC, "mosaic_gpu")

    def test_tiles_beyond_shared_memory_are_refused_with_their_size(self):
        tiles = GpuTiles(decode_keys=128, decode_stages=4)
        with pytest.raises(NotImplementedError, match="decode kernel's tiles take .* KiB of 227 KiB"):
            mosaic_gpu.validate(layout("gpu", 8, 128, 64, "bfloat16"), self.SPEC, tiles)
