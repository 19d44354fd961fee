"""Named shapes of real models' steps, each with a shrunken twin of the same structure, and the inputs of a case.

The twins drive the tests and interpreters (seconds), the real ones the benchmarks, the tuner and the device check.  `build` fills
what no sequence owns with NaN and padding tokens with garbage when asked to, so that a read too far shows.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.api import paged_attention, prepare
from pallas_kernels.paged_attention.batch import AttentionSpec, RaggedBatch
from pallas_kernels.paged_attention.layout import DEAD_BLOCK, PoolLayout, layout, pack

TWIN_BLOCK_SIZE = 16
TWIN_ROWS = 12


@dataclass(frozen=True)
class Heads:
    """A model's attention, or one device's share of it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


HEADS = {
    "smollm2-135m": Heads(9, 3, 64),
    "llama3-8b": Heads(32, 8, 128),
    "llama3-70b": Heads(64, 8, 128),
    "llama3-70b-tp8": Heads(8, 1, 128),
    "qwen3-8b": Heads(32, 8, 128),
    "qwen3-30b-a3b": Heads(32, 4, 128),
    "llama2-7b": Heads(32, 32, 128),
    "falcon-7b": Heads(71, 1, 64),
    "stablelm-3b": Heads(32, 32, 80),
    "phi3-mini": Heads(32, 32, 96, sliding_window=2047),
    "gemma3-12b-local": Heads(16, 8, 256, sliding_window=1024),
    "gemma2-9b-local": Heads(16, 8, 256, sliding_window=4096, soft_cap=50.0),
    "gpt-oss-20b-local": Heads(64, 8, 64, sliding_window=128, has_sinks=True),
}


@dataclass(frozen=True)
class Case:
    """One step of one layer group.  `rows` are (context before, new tokens); decodes, the rows of at most one token, first."""

    name: str
    heads: Heads
    rows: tuple[tuple[int, int], ...]
    num_decodes: int
    num_tokens: int
    """The token bucket."""
    num_rows: int
    """The sequence bucket."""
    block_size: int = 64
    decode_only: bool = False

    @property
    def spec(self) -> AttentionSpec:
        heads = self.heads
        return AttentionSpec(
            heads.head_dim**-0.5, heads.sliding_window, heads.soft_cap, heads.has_sinks, self.decode_only
        )

    @property
    def kv_lens(self) -> np.ndarray:
        lens = np.zeros(self.num_rows, np.int32)
        lens[: len(self.rows)] = [context + new if new else 0 for context, new in self.rows]
        return lens


def case(name, model, decodes=(), chunks=(), *, num_tokens=None, num_rows=None, block_size=64, decode_only=False) -> Case:
    """`decodes`: lengths with the new token, 0 for a padding row.  `chunks`: (context before, new tokens)."""
    rows = tuple((max(n - 1, 0), min(n, 1)) for n in decodes) + tuple(chunks)
    num_rows = num_rows or len(rows)
    num_tokens = num_rows if decode_only else num_tokens or sum(new for _, new in rows)
    return Case(f"{model}/{name}", HEADS[model], rows, len(decodes), num_tokens, num_rows, block_size, decode_only)


def _spread(count: int, low: int, high: int) -> list[int]:
    """`count` different lengths between low and high, in no order."""
    return [low + (i * 7919) % max(1, high - low + 1) for i in range(count)]


EDGES = (1, 2, 63, 64, 65, 127, 128, 129)

CASES = (
    case("decode_1", "smollm2-135m", [160], block_size=32, decode_only=True),
    case("decode_8", "smollm2-135m", _spread(8, 128, 192), block_size=32, decode_only=True),
    case("decode_64", "smollm2-135m", _spread(64, 128, 192), block_size=32, decode_only=True),
    case("decode_64_long", "smollm2-135m", _spread(64, 100, 1000), block_size=32, decode_only=True),
    case("decode_edges_and_padding", "smollm2-135m", [0, *EDGES, 0, 0], num_rows=16, decode_only=True),
    case("chunk_512", "smollm2-135m", chunks=[(0, 512)], block_size=32),
    case("chunk_512_late", "smollm2-135m", chunks=[(3500, 512)], block_size=32),
    case("chunks_4x128", "smollm2-135m", chunks=[(0, 128)] * 4, block_size=32),
    case("mixed_48_464", "smollm2-135m", _spread(48, 128, 192), [(0, 232), (100, 232)], num_rows=64, block_size=32),
    case("mixed_padded", "smollm2-135m", EDGES, [(0, 1), (63, 2), (64, 64), (30, 65)], num_tokens=192, num_rows=16),
    case("empty", "smollm2-135m", num_tokens=16, num_rows=8),
    case("one_token", "smollm2-135m", chunks=[(0, 1)]),
    case("decode_256", "llama3-8b", _spread(256, 256, 2048), decode_only=True),
    case("decode_32_long", "llama3-8b", _spread(32, 4096, 8192), decode_only=True),
    case("chunk_2048_late", "llama3-8b", chunks=[(6001, 2047)], num_tokens=2048),
    case("mixed_64_1984", "llama3-8b", _spread(64, 512, 4096), [(0, 1000), (2048, 900), (77, 84)], num_tokens=2048, num_rows=128),
    case("decode_128", "llama3-70b", _spread(128, 256, 4096), decode_only=True),
    case("decode_256", "llama3-70b-tp8", _spread(256, 256, 4096), block_size=128, decode_only=True),
    case("mixed", "llama3-70b-tp8", _spread(32, 256, 4096), [(1000, 992)], num_tokens=1024, num_rows=64, block_size=128),
    case("mixed", "qwen3-8b", _spread(24, 1, 2048), [(4000, 500), (0, 500)], num_tokens=1024, num_rows=32),
    case("mixed", "qwen3-30b-a3b", _spread(24, 1, 2048), [(4000, 500), (0, 500)], num_tokens=1024, num_rows=32),
    case("mixed", "llama2-7b", [1, 700, 1025], [(65, 500)], num_tokens=512, num_rows=4),
    case("mixed", "falcon-7b", [1, 700, 1025], [(65, 500)], num_tokens=512, num_rows=4),
    case("mixed", "stablelm-3b", [1, 700, 1025], [(65, 500)], num_tokens=512, num_rows=4),
    case("mixed", "phi3-mini", [1, 2048, 3000], [(1990, 500)], num_tokens=512, num_rows=4),
    case("decode", "gemma3-12b-local", [1, 1023, 1024, 1025, 1088, 4000, 8191], decode_only=True),
    case("mixed", "gemma3-12b-local", [1, 1024, 1025, 4000], [(3000, 1000), (0, 900)], num_tokens=2048, num_rows=8),
    case("mixed", "gemma2-9b-local", [1, 4096, 4097, 8000], [(5000, 1000), (0, 900)], num_tokens=2048, num_rows=8),
    case("decode", "gpt-oss-20b-local", [0, 1, 127, 128, 129, 1000, 5000, 0], decode_only=True),
    case("mixed", "gpt-oss-20b-local", [1, 128, 129, 1000], [(1000, 600), (0, 300)], num_tokens=1024, num_rows=8),
)


def twin(case: Case) -> Case:
    """The same structure with short sequences, few rows and at most two kv heads (three stay three)."""
    heads = case.heads
    group = heads.num_heads // heads.num_kv_heads
    num_kv_heads = heads.num_kv_heads if heads.num_kv_heads <= 3 else 2
    window = heads.sliding_window and _shrink(heads.sliding_window, case.block_size)
    heads = replace(
        heads, num_heads=num_kv_heads * min(group, 8), num_kv_heads=num_kv_heads, sliding_window=window
    )
    decodes, chunks = list(case.rows[: case.num_decodes]), case.rows[case.num_decodes :]
    decodes = decodes[:: -(-len(decodes) // TWIN_ROWS) or 1]
    rows = tuple((_shrink(a, case.block_size), _shrink(b, case.block_size)) for a, b in (*decodes, *chunks))
    used_tokens, padded_rows = sum(new for _, new in rows), case.num_rows > len(case.rows)
    num_rows = max(1, len(rows) + 2 * padded_rows)
    padded_tokens = case.num_tokens > sum(new for _, new in case.rows)
    num_tokens = num_rows if case.decode_only else max(1, used_tokens + 5 * padded_tokens)
    name = f"{case.name}/twin"
    return Case(name, heads, rows, len(decodes), num_tokens, num_rows, TWIN_BLOCK_SIZE, case.decode_only)


def _shrink(length: int, block_size: int) -> int:
    """At most five blocks of the twin's size; at a block's first or last token where `length` is."""
    blocks, rest = divmod(length, block_size)
    blocks = blocks if blocks <= 3 else 3 + blocks % 3
    if rest > 1:
        left = block_size - rest
        rest = TWIN_BLOCK_SIZE - left if left <= 2 else 2 + rest * (TWIN_BLOCK_SIZE - 5) // block_size
    return blocks * TWIN_BLOCK_SIZE + rest


@dataclass(frozen=True)
class Inputs:
    """A case's arrays, and what is needed to judge an output."""

    case: Case
    layout: PoolLayout
    batch: RaggedBatch
    q: jax.Array
    k: jax.Array
    v: jax.Array
    pool: jax.Array
    live: np.ndarray
    """bool[T]: flat tokens that belong to a sequence."""
    owned: np.ndarray
    """bool[B]: blocks that a sequence of the batch owns."""
    extras: dict[str, jax.Array] = field(default_factory=dict)
    """sinks, k_scale and v_scale, where the case has them."""

    def attend(self, implementation: str, layer: int = 0) -> tuple[jax.Array, jax.Array]:
        """(out, pool); call under jit."""
        spec = self.case.spec
        metadata = prepare(self.batch, self.q.shape[0], self.layout, spec, implementation)
        return paged_attention(
            *(self.q, self.k, self.v, self.pool, layer, metadata),
            layout=self.layout,
            spec=spec,
            implementation=implementation,
            **self.extras,
        )


def build(
    case: Case,
    platform: str = "cpu",
    dtype="float32",
    *,
    compute_dtype="float32",
    num_layers: int = 1,
    num_blocks: int | None = None,
    max_blocks: int | None = None,
    seed: int = 0,
    poison: bool = False,
) -> Inputs:
    """Standard normal q, k, v and contexts in randomly permuted blocks.  8-bit pools come with a scale per kv head.

    num_blocks, max_blocks: of the pool and of a table row, unless what the case needs is enough.  With num_blocks given, the
    same seed gives live tokens and contexts the same values in every bucket.
    poison: NaN (an integer pool: its largest value) wherever no sequence has written, the dead block and freed blocks
    included, and NaN in padding tokens.
    """
    heads = case.heads
    pool_layout = layout(platform, heads.num_kv_heads, heads.head_dim, case.block_size, dtype)
    tables, written = _allocate(case, num_blocks, max_blocks, seed)
    new = np.zeros(case.num_rows, np.int32)
    new[: len(case.rows)] = [count for _, count in case.rows]
    live = new > 0 if case.decode_only else np.arange(case.num_tokens) < new.sum()
    cu_q_lens = np.concatenate([[0], np.cumsum(new)])
    geometry = (tables, case.kv_lens, cu_q_lens, np.asarray(case.num_decodes))
    batch = RaggedBatch(*(jnp.asarray(x.astype(np.int32)) for x in geometry))

    extras = {"sinks": jnp.asarray(_normal((seed, 0), heads.num_heads))} if heads.has_sinks else {}
    if pool_layout.dtype.itemsize == 1:
        for name in ("k_scale", "v_scale"):
            extras[name] = jnp.asarray(np.linspace(0.02, 0.03, heads.num_kv_heads), jnp.float32)

    def tokens(stream: int, count: int) -> jax.Array:
        x = _normal((seed, stream), case.num_tokens, count, heads.head_dim)
        return jnp.asarray(np.where(live[:, None, None], x, np.nan if poison else 0).astype(jnp.dtype(compute_dtype)))

    def pool_of_layer(layer: int) -> jax.Array:
        slots = (_normal((seed, 4 + i, layer), written.size, heads.num_kv_heads, heads.head_dim) for i in range(2))
        scales = extras.get("k_scale"), extras.get("v_scale")
        return _pool_of_layer(*slots, *scales, written, layout=pool_layout, poison=poison)

    owned = np.zeros(written.shape[0], bool)
    owned[tables] = True
    owned[DEAD_BLOCK] = False
    q, k, v = (tokens(i, n) for i, n in ((1, heads.num_heads), (2, heads.num_kv_heads), (3, heads.num_kv_heads)))
    pool = jnp.asarray(np.stack([pool_of_layer(layer) for layer in range(num_layers)]))
    return Inputs(case, pool_layout, batch, q, k, v, pool, live, owned, extras)


def _allocate(
    case: Case, num_blocks: int | None, max_blocks: int | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Block tables, and bool[B, P]: slots that hold a token before the step.  Blocks behind the window are freed."""
    size, blocks_of_row = case.block_size, -(-case.kv_lens // case.block_size)
    tables = np.zeros((case.num_rows, max_blocks or int(blocks_of_row.max(initial=0)) + 1), np.int32)
    num_blocks = num_blocks or int(blocks_of_row.sum()) + 3
    free = iter(1 + np.random.default_rng(seed).permutation(num_blocks - 1))
    written = np.zeros((num_blocks, size), bool)
    for row, (context, _) in enumerate(case.rows):
        window = case.heads.sliding_window
        first = 0 if window is None else max(0, context + 1 - window) // size
        for index in range(first, int(blocks_of_row[row])):
            tables[row, index] = next(free)
            written[tables[row, index]] = np.arange(size) < context - index * size
    return tables, written


def _normal(seed: tuple[int, ...], *shape: int) -> np.ndarray:
    """Float32 standard normal; above a million values they repeat with a prime period, which is quick and harmless."""
    count = min(math.prod(shape), 1_000_003)
    return np.resize(np.random.default_rng(seed).standard_normal(count, np.float32), shape)


@functools.partial(jax.jit, static_argnames=("layout", "poison"))
def _pool_of_layer(k, v, k_scale, v_scale, written, *, layout: PoolLayout, poison: bool) -> jax.Array:
    """Keys and values [B * P, K, H] as one layer of a pool, with garbage where bool[B, P] `written` says so."""
    packed = pack(k, v, layout, k_scale, v_scale).reshape(*written.shape, -1, layout.planes, layout.lanes)
    blocks = jnp.moveaxis(packed, 1, 3)  # [B, K, planes, P, lanes]
    return jnp.where(written[:, None, None, :, None], blocks, _garbage(layout)) if poison else blocks


def _garbage(layout: PoolLayout) -> jax.Array:
    """One element of the pool that no correct step may read."""
    if jnp.issubdtype(layout.dtype, jnp.integer):
        return jnp.asarray(jnp.iinfo(layout.dtype).max, layout.storage_dtype)
    return jnp.full((), jnp.nan, layout.dtype).view(layout.storage_dtype)
