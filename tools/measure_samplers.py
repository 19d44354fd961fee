"""What each variant of the sampler costs a step, by rows and vocabulary: the table of docs/sampling.md.

    python -m tools.measure_samplers [--rows 8 32 64] [--vocab 49152 128256] [--rounds 15]

Compiled as the engine compiles them on this platform.  Every round runs all of them once, so that a machine with other work
is as busy for one as for the other; of each the fastest round counts.  `shape` and `count` run beside a sampler, in steps
where some row asks for penalties, bias, bans or structured output.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jserve.runner.compiler import understands
from jserve.runner.programs import CPU_OPTIONS
from jserve.sampling.limits import MAX_EOS_TOKEN_IDS
from jserve.sampling.sampler import SamplerInputs, SamplerKind, SamplerVariant, sample
from jserve.sampling.shaping import ShapingInputs, count_tokens, empty_rows, num_words, shape

FILTERS = dict(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02)
CASES = {
    "greedy": (SamplerKind.GREEDY, False, dict(temperature=0.0)),
    "greedy, log-probabilities": (SamplerKind.GREEDY, True, dict(temperature=0.0)),
    "temperature": (SamplerKind.SAMPLE, False, dict(temperature=0.8)),
    "temperature, top_k, top_p, min_p": (SamplerKind.SAMPLE, False, FILTERS),
    "the same, log-probabilities": (SamplerKind.SAMPLE, True, FILTERS),
    "greedy rows in a step that draws for others": (SamplerKind.SAMPLE, False, dict(temperature=0.0)),
}
Case = Callable[[], object]


def inputs(num_rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplerInputs:
    full = lambda value, dtype: jnp.full((num_rows,), value, dtype)
    return SamplerInputs(
        temperature=full(temperature, jnp.float32), top_k=full(top_k, jnp.int32), top_p=full(top_p, jnp.float32),
        min_p=full(min_p, jnp.float32), seed=jnp.zeros((num_rows, 2), jnp.uint32), sample_index=jnp.arange(num_rows),
        position=full(3, jnp.int32), banned_ids=jnp.zeros((num_rows, MAX_EOS_TOKEN_IDS), jnp.int32),
        num_banned=full(0, jnp.int32), is_used=full(True, bool),
    )  # fmt: skip


def shaping(num_rows: int, vocab_size: int) -> ShapingInputs:
    """Penalties, a bias and a mask of half the vocabulary in every row."""
    full = lambda value, dtype: jnp.full((num_rows,), value, dtype)
    return ShapingInputs(
        repetition=full(1.3, jnp.float32), presence=full(0.5, jnp.float32), frequency=full(0.2, jnp.float32),
        prompt_seen=jnp.zeros((num_rows, vocab_size), bool), output_counts=jnp.zeros((num_rows, vocab_size), jnp.int32),
        bias=jnp.zeros((num_rows, vocab_size)), word_ends=jnp.full((num_rows, 256), vocab_size, jnp.int32),
        allowed_bits=jnp.full((num_rows, num_words(vocab_size)), 0x55555555, jnp.uint32),
    )  # fmt: skip


def compiled(function: Callable, *arguments, **jit_options) -> Callable:
    device = jax.devices()[0]
    options = CPU_OPTIONS if device.platform == "cpu" else {}
    options = {option: value for option, value in options.items() if understands(option, value, device)}
    return jax.jit(function, **jit_options).lower(*arguments).compile(compiler_options=options)


def cases(num_rows: int, vocab_size: int) -> dict[str, Case]:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(num_rows, vocab_size)).astype(np.float32) * 4)
    programs: dict[tuple, Callable] = {}
    made: dict[str, Case] = {}
    for name, (kind, logprobs, params) in CASES.items():
        variant, row_inputs = SamplerVariant(kind, logprobs), inputs(num_rows, **params)
        if variant not in programs:
            program = lambda logits, row, variant=variant: sample(logits, row, variant)
            programs[variant] = compiled(program, logits, row_inputs)
        made[name] = lambda run=programs[variant], row=row_inputs: run(logits, row)
    row_shaping = shaping(num_rows, vocab_size)
    run_shape = compiled(shape, logits, row_shaping)
    made["+ `shape`: penalties, bias, mask"] = lambda: run_shape(logits, row_shaping)
    dense, ids = empty_rows(num_rows, vocab_size), jnp.arange(num_rows)
    run_count = compiled(count_tokens, dense, ids, ids, donate_argnums=0)
    held = [dense]

    def count() -> object:
        held[0] = run_count(held[0], ids, ids)
        return held[0]

    return made | {"+ `count`": count}


def fastest(made: dict[str, Case], rounds: int) -> dict[str, float]:
    """Seconds of each, the best of `rounds`."""
    best = dict.fromkeys(made, float("inf"))
    for number in range(rounds + 1):
        for name, run in made.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            if number:  # the first only warms up
                best[name] = min(best[name], time.perf_counter() - began)
    return best


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 128_256])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    columns: dict[str, dict[str, float]] = {}
    for vocab_size in options.vocab:
        for num_rows in options.rows:
            columns[f"{num_rows} rows, {vocab_size:,} ids"] = fastest(cases(num_rows, vocab_size), options.rounds)
            print(f"{num_rows} rows, {vocab_size:,} ids: done", file=sys.stderr, flush=True)
    print(f"jax {jax.__version__}, {device.platform} ({device.device_kind}), fastest of {options.rounds} rounds\n")
    print(table(columns))


def table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown: ms, and how many times what greedy costs beside it."""
    lines = [["ms (x greedy)", *columns], ["---"] * (len(columns) + 1)]
    for name in next(iter(columns.values())):
        cells = []
        for times in columns.values():
            ratio = f" ({times[name] / times['greedy']:.1f})" if not name.endswith("`count`") else ""
            cells.append(f"{1e3 * times[name]:.2g}{ratio}" if times[name] < 0.01 else f"{1e3 * times[name]:.0f}{ratio}")
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
