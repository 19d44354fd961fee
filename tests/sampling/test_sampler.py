"""The device sampler against the numpy reference: tokens, kept sets, and independence of batch, bucket and place."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jserve.request import SamplingParams
from jserve.sampling import threshold
from jserve.sampling.draw import draw_keys
from jserve.sampling.limits import ModelLimits
from jserve.sampling.threshold import Filters, keep_threshold
from jserve.sampling.validate import resolve
from tests.sampling import reference
from tests.sampling.reference import Row
from tests.support.sampler_rows import GREEDY, SAMPLE, SAMPLE_LOGPROBS, run, seed_words

V = 1000  # not a multiple of any chunk


def random_logits(rng: np.random.Generator, num_rows: int, vocab_size: int = V) -> np.ndarray:
    """Rows of many shapes: peaked, flat, rounded so that ties abound, shifted far, with logits that are -inf."""
    rows = []
    for _ in range(num_rows):
        x = rng.normal(size=vocab_size) * rng.choice([0.0, 0.1, 1, 3, 10])
        style = rng.integers(5)
        if style == 0:
            x = np.round(x)
        elif style == 1:
            x += rng.choice([-1e4, 1e4])
        elif style == 2:
            x[rng.random(vocab_size) < 0.5] = -np.inf
            x[rng.integers(vocab_size)] = 0
        rows.append(x)
    return np.array(rows, np.float32)


def random_row(rng: np.random.Generator, vocab_size: int = V) -> Row:
    pick = lambda *values: values[rng.integers(len(values))]
    return Row(
        temperature=pick(0.0, 0.01, 0.3, 0.7, 1.0, 1.0, 1.5, 5.0),
        top_k=int(pick(0, 0, 1, 2, 40, 64, 65, 300, vocab_size - 1)),
        top_p=float(pick(1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999)),
        min_p=float(pick(0.0, 0.0, 0.01, 0.1, 0.5, 1.0)),
        seed=int(rng.integers(-(2**63), 2**63)),
        sample_index=int(rng.integers(8)),
        position=int(rng.integers(5000)),
        banned=tuple(map(int, rng.integers(0, vocab_size, rng.choice([0, 0, 1, 5, 64])))),
    )


def random_full_row(rng: np.random.Generator) -> Row:
    ids = lambda most: tuple(map(int, rng.integers(0, V, rng.integers(most))))
    return dataclasses.replace(
        random_row(rng),
        banned=tuple(one for one in ids(20) if one != 7) if rng.random() < 0.3 else (),
        repetition=float(rng.choice([1.0, 1.2, 0.8, 2.0])),
        presence=float(rng.choice([0.0, 0.5, -1.0])),
        frequency=float(rng.choice([0.0, 0.3, -0.4])),
        prompt=ids(50),
        output=ids(50) * int(rng.integers(1, 3)),
        bias=tuple((token_id, float(rng.normal() * 5)) for token_id in set(ids(20))),
        allowed=ids(30) + (7,) if rng.random() < 0.3 else (),
        word_ends=tuple(one for one in ids(20) if one != 7) if rng.random() < 0.3 else (),
        grammar=ids(300) + (7,) if rng.random() < 0.3 else (),
    )


@pytest.mark.parametrize("vocab_size, num_real", [(V, V), (V, 900), (40, 40), (4096, 4096)])
def test_tokens_equal_the_reference(vocab_size, num_real):
    rng = np.random.default_rng(vocab_size + num_real)
    num_doubtful = 0
    for _ in range(12):
        rows = [random_row(rng, vocab_size) for _ in range(16)]
        logits = random_logits(rng, 16, vocab_size)
        if vocab_size == 40:
            rows = [dataclasses.replace(row, banned=row.banned[:5]) for row in rows]
        token_ids = run(logits, rows, SAMPLE, num_real_tokens=num_real).token_ids
        for row, x, token_id in zip(rows, logits, token_ids):
            if np.isneginf(reference.process(x, row, num_real)).all():
                continue
            wanted, is_doubtful = reference.sample(x, row, num_real)
            num_doubtful += is_doubtful
            assert is_doubtful or token_id == wanted, row
    assert num_doubtful < 20


def test_penalties_bias_and_allowed_ids_equal_the_reference():
    rng = np.random.default_rng(5)
    num_doubtful = 0
    for _ in range(8):
        rows = [random_full_row(rng) for _ in range(16)]
        logits = random_logits(rng, 16)
        logits[np.isneginf(logits)] = -50
        token_ids = run(logits, rows, shaped=True).token_ids
        for row, x, token_id in zip(rows, logits, token_ids):
            wanted, is_doubtful = reference.sample(x, row, V)
            num_doubtful += is_doubtful
            assert is_doubtful or token_id == wanted, row
    assert num_doubtful < 15


def thresholds(logits: np.ndarray, rows: list[Row], apply_rows) -> np.ndarray:
    column = lambda name, dtype: np.array([getattr(row, name) for row in rows], dtype)
    filters = Filters(column("temperature", np.float32), column("min_p", np.float32), column("top_k", np.int32),
                      column("top_p", np.float32))
    return np.asarray(apply_rows(logits, logits.max(1), filters))


@pytest.mark.parametrize("as_on", ["cpu", "accelerators"])
@pytest.mark.parametrize("vocab_size", [40, V, 5000])
def test_the_kept_set_equals_the_reference(vocab_size, as_on, monkeypatch):
    """One row after the other, most by their candidates; and all at once, by bisection alone."""
    rng = np.random.default_rng(vocab_size)
    apply_rows = jax.jit(lambda *arrays: jax.lax.map(lambda row: keep_threshold(*row), arrays))
    if as_on == "accelerators":
        monkeypatch.setattr(threshold, "_search", threshold._bisected)
        apply_rows = jax.jit(jax.vmap(keep_threshold))
    num_bisected = 0
    for _ in range(12):
        rows = [dataclasses.replace(random_row(rng, vocab_size), temperature=float(rng.choice([0.01, 0.5, 1, 4])))
                for _ in range(16)]
        logits = random_logits(rng, 16, vocab_size)
        for row, x, lowest in zip(rows, logits, thresholds(logits, rows, apply_rows)):
            wanted, doubtful = reference.keep(x, row)
            kept = np.isfinite(x) & (x >= lowest)
            assert (kept == wanted)[~doubtful].all(), row
            assert kept[np.argmax(x)] and doubtful.sum() < 0.2 * vocab_size
            num_bisected += 64 < kept.sum() < np.isfinite(x).sum()
    assert vocab_size == 40 or num_bisected > 10  # both ways of finding a threshold were taken


def test_a_huge_nucleus_and_a_large_top_k_together():
    x = np.random.default_rng(0).normal(size=(2, 20000)).astype(np.float32)
    row = Row(top_k=5000, top_p=0.8)
    for logits, lowest in zip(x, thresholds(x, [row, row], jax.jit(jax.vmap(keep_threshold)))):
        wanted, doubtful = reference.keep(logits, row)
        assert ((logits >= lowest) == wanted)[~doubtful].all()
        assert 2000 < wanted.sum() < 5000


@pytest.mark.parametrize("variant, batches", [
    (GREEDY, [(3, 16), (16, 16)]),
    (SAMPLE, [(1, 16), (3, 16), (16, 16), (24, 64)]),
    (SAMPLE_LOGPROBS, [(3, 16), (16, 16)]),
], ids=["greedy", "sample", "logprobs"])
def test_a_row_gets_the_same_bits_alone_in_any_bucket_at_any_place(variant, batches):
    """A seeded row among unseeded, greedy and filtered neighbours, and among padding."""
    rng = np.random.default_rng(3)
    logits = random_logits(rng, 24)
    rows = [random_row(rng) for _ in range(24)]
    logits[0] = rng.normal(size=V)
    rows[0] = Row(temperature=0.8, seed=42, position=7)
    logits[1], rows[1] = logits[0], Row(temperature=1.2, top_p=0.97, seed=-42)  # a nucleus that is bisected
    alone = [run(logits[[i]], [rows[i]], variant, num_rows=1) for i in range(24)]
    for num_rows, bucket in batches:
        order = rng.permutation(24)[:num_rows]
        together = run(logits[order], [rows[i] for i in order], variant, num_rows=bucket)
        for place, i in enumerate(order):
            jax.tree.map(lambda many, one: np.testing.assert_array_equal(many[place], one[0]), together, alone[i])


def test_greedy_rows_get_the_same_token_under_every_variant():
    rng = np.random.default_rng(9)
    logits = random_logits(rng, 16)
    rows = [Row(temperature=0.0, banned=(1, 2)) if i % 2 else Row(temperature=0.0) for i in range(16)]
    greedy = run(logits, rows, GREEDY).token_ids
    for shaped in (False, True):
        np.testing.assert_array_equal(run(logits, rows, SAMPLE, shaped=shaped).token_ids, greedy)
        np.testing.assert_array_equal(run(logits, rows, GREEDY, shaped=shaped).token_ids, greedy)


def test_greedy_takes_the_lowest_id_on_ties():
    logits = np.zeros((3, V), np.float32)
    logits[1, [500, 130, 999]] = 2
    logits[2, :] = -5
    logits[2, [126, 127, 128]] = -4
    assert run(logits, [Row(temperature=0.0)] * 3, GREEDY).token_ids.tolist() == [0, 130, 126]


@pytest.mark.parametrize("scale", [1, 60, 3e38])
def test_the_lowest_temperatures_draw_the_best_token(scale):
    """The best id is not the first, its lead is 30 times the temperature, and nothing overflows."""
    model = ModelLimits(context_length=64, vocab_size=V)
    asked = [0, 1e-45, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2]
    resolved = [resolve(SamplingParams(temperature=value), model, num_prompt_tokens=1) for value in asked]
    rows = [Row(temperature=sampling.temperature, seed=sampling.seed) for sampling in resolved]
    logits = np.linspace(-1, 0.7, V, dtype=np.float32)[None].repeat(8, 0)
    logits[:, 321] = 1
    out = run((logits * np.float32(scale)).astype(np.float32), rows, SAMPLE)
    assert out.token_ids.tolist() == [321] * 8
    assert np.isfinite(out.logprob).all() and out.is_sound.all()


def test_a_huge_temperature_draws_from_everything_and_from_nothing_banned():
    logits = np.where(np.arange(V) % 2, 5.0, -np.inf).astype(np.float32)[None].repeat(16, 0)
    rows = [Row(temperature=3e38, seed=seed, banned=(1, 3, 5)) for seed in range(16)]
    token_ids = run(logits, rows, SAMPLE).token_ids
    assert (token_ids % 2 == 1).all() and not set(token_ids) & {1, 3, 5} and len(set(token_ids)) > 8


def test_ids_beyond_the_tokenizer_are_never_returned():
    logits = np.zeros((16, V), np.float32)
    logits[:, 900:] = 50
    rows = [Row(seed=seed, temperature=float(seed % 2)) for seed in range(16)]
    assert (run(logits, rows, SAMPLE, num_real_tokens=900).token_ids < 900).all()


def test_ids_below_the_floor_are_masked_in_greedy_and_sampled_rows():
    logits = np.zeros((4, V), np.float32)
    logits[:, [2, 5, 9]] = [90, 60, 30]
    rows = [Row(temperature=0.0), Row(temperature=0.0, banned=(2,)), Row(temperature=0.0, banned=(5, 2)),
            Row(temperature=1.0, banned=(2, 5))]
    assert run(logits, rows, SAMPLE).token_ids.tolist() == [2, 5, 9, 9]


def test_a_row_of_nan_or_nothing_is_reported_and_hurts_no_neighbour():
    rng = np.random.default_rng(1)
    logits = random_logits(np.random.default_rng(1), 6)
    rows = [Row(seed=i, top_p=0.9, top_k=100) for i in range(6)]
    healthy = run(logits, rows, SAMPLE)
    assert healthy.is_sound.all()
    broken = logits.copy()
    broken[1, rng.integers(V)] = np.nan
    broken[3] = -np.inf
    broken[4, 17] = np.inf
    out = run(broken, rows, SAMPLE)
    assert out.is_sound.tolist() == [True, False, True, False, False, True]
    for row in (0, 2, 5):
        assert out.token_ids[row] == healthy.token_ids[row] and out.logprob[row] == healthy.logprob[row]
    assert (0 <= out.token_ids).all() and (out.token_ids < V).all()
    masked = run(logits[:1], [Row(temperature=0.0, banned=tuple(range(64)))], GREEDY, num_real_tokens=64)
    assert not masked.is_sound[0]


def test_draw_keys_are_threefry_of_seed_stream_and_position():
    rng = np.random.default_rng(2)
    seeds = [0, -1, 2**63 - 1, -(2**63), 2**32, *map(int, rng.integers(-(2**63), 2**63, 5))]
    streams, positions = rng.integers(0, 64, 10).astype(np.int32), rng.integers(0, 10**6, 10).astype(np.int32)
    words = np.array([seed_words(seed) for seed in seeds], np.uint32)
    drawn = np.asarray(jax.jit(draw_keys)(words, streams, positions))
    for seed, stream, position, pair in zip(seeds, streams, positions, drawn):
        assert tuple(pair) == reference.draw_key(seed, int(stream), int(position))


def test_unseeded_neighbours_vary_along_the_sequence_and_between_requests():
    """Flat logits at temperature 1: 256 positions of two requests that differ in their seed alone."""
    logits = np.zeros((64, 49152), np.float32)
    draws = {}
    for seed in (123456789, 987654321):
        rows = [Row(seed=seed, position=position) for position in range(256)]
        draws[seed] = [int(token_id) for start in range(0, 256, 64)
                       for token_id in run(logits, rows[start : start + 64], SAMPLE).token_ids]
        assert len(set(draws[seed])) > 250
    first, second = draws.values()
    assert sum(a == b for a, b in zip(first, second)) < 5


def test_samples_of_one_request_differ():
    logits = np.zeros((8, V), np.float32)
    rows = [Row(seed=5, sample_index=i) for i in range(8)]
    assert len(set(run(logits, rows, SAMPLE).token_ids.tolist())) > 6


def test_the_settings_of_jax_do_not_change_a_draw():
    words, zeros = np.array([[1, 2]], np.uint32), np.zeros(1, np.int32)
    plain = np.asarray(draw_keys(words, zeros, zeros))
    for name, value in (("jax_threefry_partitionable", False), ("jax_default_prng_impl", "rbg")):
        before = getattr(jax.config, name)
        try:
            jax.config.update(name, value)
            np.testing.assert_array_equal(np.asarray(draw_keys(words, zeros, zeros)), plain)
        finally:
            jax.config.update(name, before)
