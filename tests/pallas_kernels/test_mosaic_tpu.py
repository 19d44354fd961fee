"""TPU kernels under the TPU interpreter, against the float32 reference; every unowned slot of the pool is NaN.

Error bounds: float32 2e-6 (the order of sums differs); bfloat16 0.03 (outputs of about 1 have steps of 2**-8, and
weights are rounded once before the value matmul); int8 values enter exactly, so float32's bound times their scale.
"""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.paged_attention import AttentionSpec, RaggedBatch, layout, mosaic_tpu, mosaic_tpu_tiles
from pallas_kernels.paged_attention.cases import HEADS
from tests.support.tpu_interpreter import EAGER, LATE, SMALL_TILES, check, make_step

FLOAT32 = 2e-6
BFLOAT16 = 0.03


def test_decode_rows_of_every_kind_in_one_call():
    """Padding rows first, between and last; a block's and a group's first and last token; several groups."""
    check(make_step(decodes=[0, 1, 16, 17, 0, 255, 256, 257, 600, 0], decode_only=True, group=1), FLOAT32)


def test_decode_at_every_length_of_three_blocks():
    check(make_step(decodes=range(1, 49), decode_only=True, num_kv_heads=1, group=2), FLOAT32, modes=(LATE,))


def test_mixed_step_with_chunks_at_any_token_and_any_block_row():
    """Chunks start at flat tokens 2, 7 and 47 and at rows 0, 14 and 12 of a block; two of them share a query tile."""
    check(make_step(decodes=[1, 130], chunks=[(0, 5), (30, 40), (140, 20)]), FLOAT32)


def test_window_skips_freed_blocks():
    """Table entries behind the window are the dead block, which is NaN."""
    check(make_step(decodes=[1, 50, 51, 300], chunks=[(0, 5), (150, 40)], sliding_window=50), FLOAT32)


def test_soft_cap_sinks_and_a_packed_head_of_64():
    step = make_step(decodes=[1, 130], chunks=[(120, 20)], head_dim=64, group=1, soft_cap=5.0, has_sinks=True)
    check(step, FLOAT32, modes=(LATE,))


def test_bfloat16_with_a_head_of_256():
    step = make_step(
        decodes=[1, 130], chunks=[(120, 20)], head_dim=256, dtype="bfloat16", compute_dtype="bfloat16", num_kv_heads=1
    )
    check(step, BFLOAT16, modes=(LATE,))


def test_int8_with_a_scale_per_head_and_a_padded_head_of_80():
    scales = {"k_scale": jnp.array([0.02, 0.03, 0.025]), "v_scale": jnp.float32(0.025)}
    step = make_step(decodes=[1, 130], chunks=[(120, 20)], dtype="int8", head_dim=80, num_kv_heads=3, group=1)
    check(step, 1e-5, modes=(EAGER,), **scales)


def test_fp8_decode():
    step = make_step(
        decodes=[1, 40], decode_only=True, dtype="float8_e4m3fn", compute_dtype="bfloat16", block_size=32
    )
    check(step, BFLOAT16, modes=(LATE,), k_scale=jnp.float32(0.5), v_scale=jnp.array([1.5, 0.3]))


def test_empty_batch_changes_nothing():
    check(make_step(num_tokens=4, num_rows=2, max_blocks=2, group=1, num_kv_heads=1), FLOAT32)


def test_row_longer_than_its_table_touches_no_live_block():
    step = make_step(decodes=[5, 40], decode_only=True, num_kv_heads=1)
    too_long = replace(step.batch, kv_lens=jnp.array([5, 1000], jnp.int32))
    metadata = mosaic_tpu.prepare(too_long, 2, step.layout, step.spec, SMALL_TILES)
    assert metadata.decode_lens.tolist() == [5, 0]


class TestPlantedBugs:
    """What the tests above would do if the kernels were wrong."""

    def step(self, **options):
        return make_step(decodes=[20, 300], decode_only=True, num_kv_heads=1, **options)

    def test_missing_wait(self, monkeypatch):
        """A wait for fetched blocks that does nothing: the race detector or NaN from unfilled memory."""
        real = pltpu.make_async_copy

        class WithoutWait:
            def __init__(self, *arguments):
                self.copy = real(*arguments)
                self.is_fetch = len(arguments[1].shape) == 5  # blocks into the buffer; the token's write has 4 axes

            def start(self):
                self.copy.start()

            def wait(self):
                if not self.is_fetch:
                    self.copy.wait()

        monkeypatch.setattr(pltpu, "make_async_copy", WithoutWait)
        with pytest.raises(Exception, match="(?i)race|NaN"):
            check(self.step(), FLOAT32, modes=(LATE,))

    def test_wrong_block(self, monkeypatch):
        real = mosaic_tpu.prepare

        def swapped(*arguments):
            metadata = real(*arguments)
            return replace(metadata, tables=metadata.tables.at[1, 0, 0].set(metadata.tables[1, 0, 1]))

        monkeypatch.setattr(mosaic_tpu, "prepare", swapped)
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            check(self.step(), FLOAT32, modes=(EAGER,))

    def test_block_outside_the_pool(self, monkeypatch):
        real = mosaic_tpu.prepare

        def outside(*arguments):
            metadata = real(*arguments)
            return replace(metadata, tables=metadata.tables.at[1, 0, 0].set(1_000_000))

        monkeypatch.setattr(mosaic_tpu, "prepare", outside)
        with pytest.raises(Exception, match="Out-of-bounds read"):
            check(self.step(), FLOAT32, modes=(LATE,))

    def test_window_off_by_one(self):
        """One token more in the kernel's window than in the reference's."""
        step = self.step(sliding_window=18)
        wrong = replace(step, spec=replace(step.spec, sliding_window=19))
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            check(step, FLOAT32, modes=(EAGER,), kernel_step=wrong)


def random_batch(rng, num_rows=6, num_tokens=96, block_size=16):
    """Decodes, then chunks of 0 to 30 tokens after contexts of 0 to 50; the rest is padding."""
    num_decodes = int(rng.integers(0, 4))
    new = np.array([1] * num_decodes + list(rng.integers(0, 31, num_rows - num_decodes)))
    new[np.cumsum(new) > num_tokens] = 0
    before = rng.integers(0, 51, num_rows)
    lens = np.where(new > 0, before + new, 0)
    tables = np.arange(1, 1 + num_rows * 6).reshape(num_rows, 6)
    cu_q_lens = np.cumsum([0, *new])
    batch = RaggedBatch(*(jnp.asarray(x, jnp.int32) for x in (tables, lens, cu_q_lens, num_decodes)))
    return batch, num_decodes, new, lens, tables, cu_q_lens


def test_work_lists_cover_every_chunk_token_once():
    """200 random steps against a loop over tokens."""
    block_size, query_tile = 16, 32
    pool_layout, spec = layout("tpu", 2, 128, block_size, "bfloat16"), AttentionSpec(1.0)
    tiles = replace(SMALL_TILES, query_tile=query_tile)
    prepare = jax.jit(lambda batch: mosaic_tpu.prepare(batch, 96, pool_layout, spec, tiles))
    for seed in range(200):
        batch, num_decodes, new, lens, tables, cu_q_lens = random_batch(np.random.default_rng(seed))
        metadata = jax.device_get(prepare(batch))
        expected = {
            (cu_q_lens[row] + i): (row, lens[row] - new[row] + i)
            for row in range(num_decodes, len(new))
            for i in range(new[row])
        }
        written = {}
        writes = metadata.writes
        for w in range(writes.count):
            for i in range(writes.num_tokens[w]):
                written[writes.first_token[w] + i] = (writes.block[w], writes.first_row[w] + i)
        assert sum(writes.num_tokens) == len(expected)
        assert written == {
            token: (tables[row, position // block_size], position % block_size)
            for token, (row, position) in expected.items()
        }
        attended = {}
        chunks = metadata.chunks
        for c in range(chunks.count):
            for i in range(chunks.num_queries[c]):
                attended[chunks.tile[c] * query_tile + chunks.start[c] + i] = (chunks.row[c], chunks.position[c] + i)
        assert sum(chunks.num_queries) == len(expected)
        assert attended == expected
        assert list(chunks.tile[: chunks.count]) == sorted(chunks.tile[: chunks.count])


class TestRefusals:
    """What cannot be served is refused with numbers before a compiler sees it."""

    @pytest.mark.parametrize(
        "options, message",
        [
            ({"platform": "cpu"}, "platform 'cpu'"),
            ({"head_dim": 512}, "head_dim=512: at most 256"),
            ({"block_size": 8}, "block_size=8: multiples of 16 from 16 to 256"),
            ({"block_size": 512}, "block_size=512"),
            ({"dtype": "float16"}, "a pool of float16"),
        ],
    )
    def test_layouts(self, options, message):
        sizes = {"num_kv_heads": 8, "head_dim": 128, "block_size": 64}
        options = {"platform": "tpu", "dtype": "bfloat16"} | sizes | options
        with pytest.raises(NotImplementedError, match=message):
            mosaic_tpu.validate(layout(**options), AttentionSpec(1.0))

    def trace(
        self, num_rows=4, max_blocks=8, num_kv_heads=8, group=4, head_dim=128, block_size=64, dtype="bfloat16",
        tiles=None, decode_only=True,
    ):  # fmt: skip
        pool_layout = layout("tpu", num_kv_heads, head_dim, block_size, dtype)
        spec = AttentionSpec(1.0, decode_only=decode_only)
        i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        values = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

        def step(q, k, v, pool, batch):
            metadata = mosaic_tpu.prepare(batch, num_rows, pool_layout, spec, tiles)
            return mosaic_tpu.attend(q, k, v, pool, 0, metadata, layout=pool_layout, spec=spec, tiles=tiles)

        kv = values(num_rows, num_kv_heads, head_dim)
        batch = RaggedBatch(i32(num_rows, max_blocks), i32(num_rows), i32(num_rows + 1), i32())
        q, pool = values(num_rows, num_kv_heads * group, head_dim), values(*pool_layout.shape(1, 9))
        return jax.eval_shape(step, q, kv, kv, pool, batch)

    def test_1024_sequences_of_128k_tokens_fit_in_scalar_memory(self):
        self.trace(num_rows=1024, max_blocks=131072 // 64)
        self.trace(num_rows=1024, max_blocks=131072 // 16, block_size=16)

    def test_table_row_too_long_for_scalar_memory(self):
        with pytest.raises(NotImplementedError, match="1040.1 KiB of SMEM, of 1020 KiB: 32 words .* 4 x 66560 table"):
            self.trace(num_rows=16, max_blocks=66560)

    def test_tiles_too_large_for_vector_memory(self):
        tiles = replace(SMALL_TILES, decode_group=8192)
        with pytest.raises(NotImplementedError, match="MiB of VMEM .* of 32 MiB .*decode_group=8192"):
            self.trace(tiles=tiles)

    @pytest.mark.parametrize("kind", mosaic_tpu_tiles.VMEM_BYTES)
    def test_default_tiles_of_every_model_fit_every_generation(self, kind):
        blocks = (("bfloat16", 16), ("bfloat16", 256), ("float32", 16), ("float32", 64))
        for heads, (dtype, block_size) in itertools.product(HEADS.values(), blocks):
            pool_layout = layout("tpu", heads.num_kv_heads, heads.head_dim, block_size, dtype)
            sizes = (heads.num_heads // heads.num_kv_heads, jnp.dtype(dtype).itemsize)
            with compiling_for(kind):
                tiles = mosaic_tpu_tiles.default_tiles(pool_layout, *sizes)
                for needed in (mosaic_tpu_tiles.decode_vmem_bytes, mosaic_tpu_tiles.chunk_vmem_bytes):
                    assert mosaic_tpu_tiles.fits_vmem(needed(pool_layout, tiles, *sizes)), (heads, dtype, block_size)
                assert mosaic_tpu_tiles.default_tiles(pool_layout).query_tile == tiles.query_tile, "prepare's is attend's"
            for group, part in ((tiles.decode_group, tiles.decode_tail), (tiles.chunk_group, tiles.key_tile)):
                assert group % part == 0 and part % block_size == 0 and part % 128 == 0

    def test_smaller_tiles_trace(self):
        with compiling_for("TPU v4"):
            self.trace(num_kv_heads=32, group=1, decode_only=False)

    def test_what_a_generation_has_decides(self):
        """71 query heads over one kv head: 24.2 MiB with the sizes that other generations take."""
        pool_layout = layout("tpu", 1, 64, 64, "bfloat16")
        tiles = mosaic_tpu_tiles.default_tiles(pool_layout, 71)
        assert tiles.query_tile == 128
        options = {"num_kv_heads": 1, "group": 71, "head_dim": 64, "decode_only": False}
        for kind in ("TPU v5 lite", "TPU7x"):
            with compiling_for(kind):
                self.trace(**options, tiles=tiles)
        refusal = "jserve_chunks: 24.2 MiB of VMEM .* of 16 MiB on TPU v4 .*num_heads=71.*query_tile=128"
        with compiling_for("TPU v4"), pytest.raises(NotImplementedError, match=refusal):
            self.trace(**options, tiles=tiles)

    def test_too_many_heads_for_vector_memory(self):
        with compiling_for("TPU v4"), pytest.raises(NotImplementedError, match="of VMEM .* of 16 MiB on TPU v4 "):
            self.trace(num_kv_heads=8, group=16, decode_only=False)


def compiling_for(kind: str):
    """As under the mesh of a TPU that is elsewhere."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("model",), abstract_device=device))
