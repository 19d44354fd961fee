"""`bench throughput`: how many tokens a second the engine makes in this process, with no network between.

Also what `bench latency` narrows to one stream: warm-up outside the figures, then a closed loop, then the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jserve.bench import report
from jserve.bench.load import RandomLoad, ordinary_token_ids, run_closed
from jserve.bench.report import RequestRecord


async def run(
    engine,
    load: RandomLoad,
    *,
    mode: str = "throughput",
    concurrency: int | None = None,
    num_warmups: int = 0,
    percentiles: Sequence[float] = (99,),
    with_details: bool = False,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> dict[str, object]:
    """Runs the load and returns its report.  `concurrency` is the engine's max_num_seqs unless given."""
    info = engine.info
    load = load.checked(info.context_length)
    concurrency = min(concurrency or info.max_num_seqs, load.num_prompts)
    token_ids = ordinary_token_ids(info)
    await run_closed(engine, load.warm_ups(num_warmups, token_ids), max(1, min(concurrency, num_warmups)))
    before = step_counters(engine)
    records = await run_closed(engine, load.requests(token_ids), concurrency, on_done)
    after = step_counters(engine)
    figures = report.header(
        mode,
        model_id=info.name,
        tokenizer_id=info.name,
        dtype=info.dtype,
        kv_dtype=info.kv_dtype,
        **machine(),
        dataset_name="random",
        num_prompts=load.num_prompts,
        random_input_len=load.input_len,
        random_output_len=load.output_len,
        random_range_ratio=load.range_ratio,
        ignore_eos=load.ignore_eos,
        seed=load.seed,
        num_warmups=num_warmups,
        request_rate="inf",
        max_concurrency=concurrency,
    )
    figures |= report.summarize(records, percentiles) | _step_figures(before, after)
    return figures | (report.details(records) if with_details else {})


def step_counters(engine) -> dict[str, int]:
    """The engine's running totals that a report takes the difference of."""
    loads = engine.loads()
    return {name: getattr(loads, name) for name in ("scheduled_tokens", "padded_tokens", "compiles_after_ready")}


def machine() -> dict[str, object]:
    """Where the figures were made."""
    import os
    import platform

    import jax

    return {
        "jax_version": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_cpus": os.cpu_count(),
        "machine": platform.machine(),
    }


def _step_figures(before: dict[str, int], after: dict[str, int]) -> dict[str, object]:
    scheduled = after["scheduled_tokens"] - before["scheduled_tokens"]
    padded = after["padded_tokens"] - before["padded_tokens"]
    return {
        "scheduled_tokens": scheduled,
        "padded_tokens": padded,
        "padded_token_share": padded / (scheduled + padded) if scheduled + padded else 0.0,
        # Not a difference: one during the warm-up is a hole in the compile plan too.
        "compiles_after_ready": after["compiles_after_ready"],
    }
