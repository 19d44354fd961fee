"""`bench throughput`: how many tokens a second the engine makes in this process, with no network between.

Also what `bench latency` narrows to one stream: warm-up outside the figures, then a closed loop, then the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from jserve.bench import report
from jserve.bench.driver import drive, engine_stream, run_closed
from jserve.bench.load import Load, ordinary_token_ids
from jserve.bench.report import RequestRecord
from jserve.bench.target import COUNTERS


async def run(
    engine,
    load: Load,
    *,
    mode: str = "throughput",
    concurrency: int | None = None,
    num_warmups: int = 0,
    percentiles: Sequence[float] = (99,),
    goodput: Mapping[str, float] | None = None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> tuple[dict[str, object], list[RequestRecord]]:
    """Runs the load; its report and what it is made of.  `concurrency` is the engine's max_num_seqs unless given."""
    info = engine.info
    load = load.checked(info.context_length)
    concurrency = min(concurrency or info.max_num_seqs, load.num_prompts)
    token_ids = ordinary_token_ids(info)
    stream = engine_stream(engine)
    await run_closed(stream, load.warm_ups(num_warmups, token_ids), max(1, min(concurrency, num_warmups)))
    before = step_counters(engine)
    conversations = [replace(one, start_s=None) for one in load.conversations(token_ids)]  # no times in a closed loop
    records = (await drive(stream, conversations, concurrency=concurrency, on_done=on_done)).records
    figures = report.header(
        mode,
        model_id=info.name,
        tokenizer_id=info.name,
        dtype=info.dtype,
        kv_dtype=info.kv_dtype,
        **machine(),
        **load.about(),
        num_warmups=num_warmups,
        request_rate="inf",
        max_concurrency=concurrency,
    )
    figures |= report.summarize(records, percentiles, goodput) | step_figures(before, step_counters(engine))
    return figures, records


def step_counters(engine) -> dict[str, int]:
    """The engine's running totals that a report takes the difference of."""
    loads = engine.loads()
    return {name: getattr(loads, name) for name in COUNTERS}


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


def step_figures(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, object]:
    """What the engine did between two looks at its counters."""
    made = {name: after[name] - before[name] for name in COUNTERS}
    computed = made["scheduled_tokens"] + made["padded_tokens"]
    queried = made.pop("prefix_cache_queried_tokens")
    hit = made.pop("prefix_cache_hit_tokens")
    return made | {
        "padded_token_share": made["padded_tokens"] / computed if computed else 0.0,
        "prefix_cache_hit_rate": hit / queried if queried else 0.0,
        # Not a difference: one during the warm-up is a hole in the compile plan too.
        "compiles_after_ready": after["compiles_after_ready"],
    }
