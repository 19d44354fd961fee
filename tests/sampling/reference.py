"""The whole logit pipeline once more, row by row in plain numpy: the oracle of the device sampler.

Shares no code with it.  Where float32 rounding may decide (the edge of a nucleus, a draw on the border of two tokens)
it says so, instead of guessing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_CHUNK = 256


@dataclass(frozen=True)
class Row:
    """What one row asks for; the defaults ask for nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    position: int = 0
    banned: tuple[int, ...] = ()
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    word_ends: tuple[int, ...] = ()
    grammar: tuple[int, ...] = ()

    @property
    def is_shaped(self) -> bool:
        penalties = self.repetition, self.presence, self.frequency
        return penalties != (1, 0, 0) or bool(self.bias or self.allowed or self.word_ends or self.grammar)


def process(logits: np.ndarray, row: Row, num_real_tokens: int) -> np.ndarray:
    """float32[V] logits after masks, bias and penalties."""
    x = logits.astype(np.float32).copy()
    x[num_real_tokens:] = -np.inf
    for only in filter(None, (row.allowed, row.grammar)):
        forbidden = np.ones(len(x), bool)
        forbidden[list(only)] = False
        x[forbidden] = -np.inf
    x[list(row.banned)] = -np.inf
    x[list(row.word_ends)] = -np.inf
    for token_id, bias in row.bias:
        x[token_id] += np.float32(bias)
    for token_id in set(row.prompt) | set(row.output):
        factor = np.float32(row.repetition)
        x[token_id] = x[token_id] / factor if x[token_id] > 0 else x[token_id] * factor
    for token_id in set(row.output):
        count = np.float32(row.output.count(token_id))
        x[token_id] = x[token_id] - np.float32(row.frequency) * count - np.float32(row.presence)
    return x


def probabilities(x: np.ndarray, temperature: float) -> np.ndarray:
    """float64 softmax of processed logits at a temperature."""
    scaled = (x.astype(np.float64) - x.max()) / temperature
    weights = np.exp(scaled)
    return weights / weights.sum()


def keep(x: np.ndarray, row: Row) -> tuple[np.ndarray, np.ndarray]:
    """(bool[V] tokens kept by min_p, top_k, top_p in this order, bool[V] tokens for which rounding decides)."""
    p = probabilities(x, row.temperature)
    kept = np.isfinite(x)
    doubtful = np.zeros(len(x), bool)
    if row.min_p > 0:
        bound = np.float64(np.float32(row.min_p)) * p.max()
        kept &= p >= bound
        grid = np.spacing(np.float32(abs(x.max()))) / row.temperature
        doubtful |= (np.abs(p / bound - 1) < 1e-4 + grid) & (x < x.max())
    if 0 < row.top_k < kept.sum():
        kth = np.sort(x[kept])[-row.top_k]
        kept &= x >= kth
    if row.top_p < 1:
        order = np.argsort(-x, kind="stable")
        order = order[kept[order]]
        q = p[order] / p[order].sum()
        # Mass strictly above each token: equal logits stand together, all in or all out.
        first_of_ties = np.searchsorted(-x[order], -x[order], side="left")
        above = np.concatenate([[0.0], np.cumsum(q)])[first_of_ties]
        bound = np.float64(np.float32(row.top_p))
        doubtful[order] |= (np.abs(above - bound) < 2e-6) & (above > 0)
        kept[order[above >= bound]] = False
    return kept, doubtful


def sample(logits: np.ndarray, row: Row, num_real_tokens: int) -> tuple[int, bool]:
    """(token id, whether rounding may give another one)."""
    x = process(logits, row, num_real_tokens)
    if row.temperature == 0:
        return int(np.flatnonzero(x == x.max())[0]), False
    kept, doubtful = keep(x, row)
    p = np.where(kept, probabilities(x, row.temperature), 0.0)
    p = np.concatenate([p, np.zeros(-len(p) % _CHUNK)]).reshape(-1, _CHUNK)
    key = draw_key(row.seed, row.sample_index, row.position)
    between, within = exponentials(key, max(p.shape))
    chunk, unsure_chunk = _first_home(p.sum(1), between[: len(p)])
    inside, unsure_inside = _first_home(p[chunk], within[:_CHUNK])
    return chunk * _CHUNK + inside, bool(unsure_chunk or unsure_inside or doubtful.any())


def logprobs(logits: np.ndarray) -> np.ndarray:
    """float64[V] log-softmax of raw logits, floored."""
    x = logits.astype(np.float64)
    x = x - x.max()
    with np.errstate(divide="ignore"):
        return np.maximum(x - np.log(np.exp(x).sum()), -9999.0)


def ranked(logits: np.ndarray, num_real_tokens: int) -> np.ndarray:
    """int[num_real_tokens] ids, most probable first, equal ones by id."""
    return np.argsort(-logits[:num_real_tokens], kind="stable")


def draw_key(seed: int, sample_index: int, position: int) -> tuple[int, int]:
    """threefry2x32 with counter (0, position) under the key threefry2x32 with counter (0, sample_index) under seed."""
    key = _threefry((seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF, 0, sample_index)
    return _threefry(*key, 0, position)


def exponentials(key: tuple[int, int], count: int) -> tuple[np.ndarray, np.ndarray]:
    words = np.array([_threefry(*key, 0, i) for i in range(count)])
    return tuple(-np.log(((words >> 9) + 0.5) / 2**23).T)


def _first_home(weights: np.ndarray, exponentials: np.ndarray) -> tuple[int, bool]:
    with np.errstate(divide="ignore"):
        times = np.where(weights > 0, exponentials / weights, np.inf)
    best = np.sort(times)[:2]
    return int(np.argmin(times)), len(best) > 1 and np.isfinite(best[1]) and bool(best[1] < best[0] * (1 + 1e-4))


def _threefry(key0: int, key1: int, x0: int, x1: int) -> tuple[int, int]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3)."""
    mask = 0xFFFFFFFF
    keys = (key0, key1, key0 ^ key1 ^ 0x1BD11BDA)
    x0, x1 = (x0 + keys[0]) & mask, (x1 + keys[1]) & mask
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = (x0 + x1) & mask
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) & mask
            x1 ^= x0
        x0 = (x0 + keys[(group + 1) % 3]) & mask
        x1 = (x1 + keys[(group + 2) % 3] + group + 1) & mask
    return x0, x1
