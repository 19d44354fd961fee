"""The Triton kernels, interpreted, against the float32 reference; every unowned slot of the pool is NaN.

Bounds as those of test_mosaic_gpu.py: 0.02 for outputs of about 1 in bfloat16, 0.004 in float16.  The interpreter runs one
program after another: what it cannot see is how Triton overlaps copies, which is its own and not ours.
"""

from dataclasses import replace

import jax.numpy as jnp
import pytest

pytest.importorskip("jax.experimental.pallas.triton", exc_type=ImportError)
pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params", exc_type=ImportError)

from pallas_kernels.paged_attention import triton, triton_kernels  # noqa: E402
from pallas_kernels.paged_attention.cases import Case, Heads  # noqa: E402
from tests.support.gpu_interpreter import check, make_inputs, run_triton  # noqa: E402

BFLOAT16 = 0.02
FLOAT16 = 0.004


@pytest.fixture(autouse=True)
def traced_anew():
    triton_kernels.decode_attention.clear_cache()  # a planted bug must be traced
    triton_kernels.attend_chunks.clear_cache()


def decodes(heads: Heads, lengths, block_size: int = 16) -> Case:
    rows = tuple((max(n - 1, 0), min(n, 1)) for n in lengths)
    return Case("decodes", heads, rows, len(rows), len(rows), len(rows), block_size, decode_only=True)


def mixed(heads: Heads, lengths, chunks, block_size: int = 16, padding: int = 3) -> Case:
    rows = decodes(heads, lengths).rows + tuple(chunks)
    num_tokens = sum(new for _, new in rows) + padding
    return Case("mixed", heads, rows, len(lengths), num_tokens, len(rows) + 1, block_size)


def check_triton(case: Case, tolerance: float = BFLOAT16, dtype: str = "bfloat16", **options) -> None:
    check(make_inputs(case, dtype=dtype, compute_dtype=dtype), tolerance, run=run_triton, **options)


def test_decode_rows_of_every_kind_in_one_call():
    """Padding rows first, between and last; the first and last token of a block, of a tile of keys and of a split."""
    check_triton(decodes(Heads(3, 1, 64), [0, 1, 16, 17, 0, 64, 65, 256, 257, 600, 0]))


def test_decode_window_skips_freed_blocks():
    """Table entries behind the window are the dead block, which is NaN.  Contexts around the window and a block's edge."""
    check_triton(decodes(Heads(4, 2, 128, sliding_window=50), [1, 50, 51, 66, 67, 300]))


def test_mixed_step_with_chunks_at_any_token_and_any_block_row():
    """Chunks start at flat tokens 2, 7 and 57 and at rows 0, 14 and 12 of a block; three query heads share a kv head."""
    check_triton(mixed(Heads(6, 2, 64), [1, 130], [(0, 5), (30, 50), (140, 20)]))


def test_window_soft_cap_and_sinks_in_blocks_of_any_size():
    heads = Heads(2, 1, 80, sliding_window=40, soft_cap=5.0, has_sinks=True)
    check_triton(mixed(heads, [100], [(0, 5), (60, 80)], block_size=48))


def test_heads_of_256_in_float16():
    check_triton(mixed(Heads(2, 1, 256), [1, 130], [(120, 12)], padding=0), FLOAT16, dtype="float16")


def test_more_query_heads_than_a_tile_has_rows():
    check_triton(mixed(Heads(71, 1, 64), [40], [(15, 2)], padding=0))


def test_empty_batch_changes_nothing():
    inputs = make_inputs(mixed(Heads(1, 1, 64), [], [], padding=1), max_blocks=2)
    check(inputs, BFLOAT16, run=run_triton)


def test_scales_of_keys_and_values():
    inputs = make_inputs(mixed(Heads(4, 2, 64), [20], [(3, 5)]))
    scales = {"k_scale": jnp.array([0.5, 2.0]), "v_scale": jnp.float32(0.25)}
    check(replace(inputs, extras=scales), BFLOAT16, run=run_triton)


class TestPlantedBugs:
    """What the tests above would do if the kernels were wrong."""

    CASE = mixed(Heads(1, 1, 64, sliding_window=18), [20], [(30, 10)], padding=0)

    def test_loads_that_are_not_masked(self, monkeypatch):
        real = triton_kernels.plgpu.load
        monkeypatch.setattr(triton_kernels.plgpu, "load", lambda ref, **_: real(ref))
        with pytest.raises(AssertionError, match="NaN"):
            check_triton(self.CASE)

    def test_wrong_block(self, monkeypatch):
        real = triton.prepare

        def swapped(*arguments):
            metadata = real(*arguments)
            return replace(metadata, tables=metadata.tables.at[:, 1].set(metadata.tables[:, 2]))

        monkeypatch.setattr(triton, "prepare", swapped)
        with pytest.raises(AssertionError):
            check_triton(replace(self.CASE, heads=Heads(1, 1, 64)))

    def test_window_off_by_one(self):
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            check_triton(self.CASE, spec=replace(self.CASE.spec, sliding_window=17))


