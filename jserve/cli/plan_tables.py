"""`jserve plan` for a person: the JSON answer as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 100
"""Columns that the tables need, also where the terminal or pipe has fewer."""


def print_tables(answer: Mapping[str, Any], console: Console | None = None) -> None:
    console = console or Console(highlight=False, width=max(WIDTH, Console().width))
    devices = answer["tensor_parallel_size"]
    where = answer["device"] + (f", {devices} devices share it" if devices > 1 else "")
    console.print(f"[bold]{answer['model']}[/bold] ({answer['num_parameters'] / 1e9:.2f}e9 parameters) on {where}\n")
    for table in (_memory(answer), _concurrency(answer), _steps(answer), _chunks(answer)):
        console.print(table, "")
    prefix, compiled, advice = answer["prefix_hit"], answer["compile_plan"], answer["recommended"]
    console.print(
        f"A prompt of {prefix['prompt']:,} tokens that shares {prefix['shared']:,}: {prefix['num_blocks']} blocks ="
        f" {prefix['hit_tokens']:,} tokens found, {prefix['tokens_to_prefill']:,} left to compute"
        f" ({prefix['share']:.1%})\n"
    )
    console.print(
        f"To start with (gaps of at most {advice['target_tbt_ms']:g} ms at the longest context):\n"
        f"  jserve serve --max-num-batched-tokens {advice['max_num_batched_tokens']}"
        f" --max-num-seqs {advice['max_num_seqs']}"
        f"{f' --tensor-parallel-size {devices}' if devices > 1 else ''}\n"
        f"  {compiled['num_programs']} programs to compile: {compiled['forward']} forward (mixed tokens"
        f" {_listed(compiled['token_buckets'])}; decode rows {_listed(compiled['sequence_buckets'])}),"
        f" {compiled['heads']} heads, {compiled['samplers']} samplers, {compiled['scorers']} scorer"
    )


def _memory(answer: Mapping[str, Any]) -> Table:
    table = _table("Memory of one device", "", "bytes")
    table.add_row("usable", _gb(answer["usable_bytes"]))
    table.add_row("- weights", _gb(answer["weight_bytes_per_device"]))
    table.add_row("- activations and the rest", _gb(answer["reserve_bytes"]))
    table.add_row("= KV pool", f"{answer['kv_pool_bytes'] / 1e9:.4f} GB")
    for group in answer["kv_bytes_per_token_by_group"]:
        kind = "all of them" if group["window"] is None else f"window {group['window']:,}"
        table.add_row(f"KV a token, {group['num_layers']} layers, {kind}", f"{group['bytes']:,}")
    table.add_row("tokens in the pool", f"{answer['kv_pool_tokens']:,}")
    table.add_row(f"blocks of {answer['block_size']}", f"{answer['num_blocks']:,}")
    return table


def _concurrency(answer: Mapping[str, Any]) -> Table:
    table = _table("Sequences at the same time", "", "sequences", "")
    most, waste = answer["max_sequences"], answer["block_waste"]
    ratio, gain = answer["paged_over_preallocated"], answer["paging_gain"]
    table.add_row(f"preallocated to {answer['context']:,} tokens", f"{most['preallocated']:,}", "")
    table.add_row(
        f"paged, {answer['mean_length']:,} tokens on average", f"{most['paged']:,}",
        (f"{ratio:.1f}x; " if ratio else "") + f"{waste['tokens']} tokens wasted each ({waste['share']:.2%})",
    )
    if gain:
        rate, time = f"{gain['tokens_per_s']:.1f}x", f"{gain['step_time']:.1f}x"
        table.add_row("", "", f"{rate} the tokens a second, each step {time} as long")
    others = [
        f"{size}: {count:,}"
        for size, count in answer["max_sequences_by_block_size"].items()
        if int(size) != answer["block_size"]
    ]
    table.add_row("other block sizes", "", ", ".join(others))
    return table


def _steps(answer: Mapping[str, Any]) -> Table:
    table = _table("Decode steps, lower bound", "batch", "context", "GB read", "ms", "tokens/s")
    for step in answer["steps"]:
        table.add_row(
            f"{step['batch']:,}", f"{step['context']:,}", f"{step['bytes'] / 1e9:.2f}",
            f"{step['lower_bound_ms']:.2f}", f"{step['tokens_per_s']:,.0f}",
        )
    return table


def _chunks(answer: Mapping[str, Any]) -> Table:
    schedule, whole = answer["chunk_schedule"], answer["chunk_schedule"]["whole_prompt"]
    beside = answer["prefill"]
    table = _table(
        f"A prompt of {schedule['prompt']:,} tokens beside {schedule['decodes']} decodes,"
        f" budget {schedule['budget']:,}",
        "", "steps", "first ms", "longest ms",
    )
    for name, chunks in (("decodes count", schedule["chunks"]), ("budget for the chunk alone", beside)):
        table.add_row(name, str(len(chunks)), f"{chunks[0]['ms']:.1f}", f"{max(chunk['ms'] for chunk in chunks):.1f}")
    half_rate = f"{whole['ms_at_half_rate']:,.0f} at half rate"
    table.add_row(f"not cut ({whole['flops']:.3g} FLOP)", "1", f"{whole['ms']:,.0f}", half_rate)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place or column == "batch" else "left", no_wrap=True)
    if columns[-1] == "":
        table.columns[-1].justify = "left"
    return table


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def _listed(sizes: Sequence[int]) -> str:
    return " ".join(map(str, sizes))
