"""Every kernel case on every target, and whole steps, through the real compilers with no device: JSON lines and tables.

    python tools/compile_matrix.py v5e h100 --out matrix.jsonl        the cases on two targets
    python tools/compile_matrix.py --out matrix.jsonl                 on all of them
    python tools/compile_matrix.py h100 --only gemma --out m.jsonl    cases with that in their name
    python tools/compile_matrix.py --steps --out steps.jsonl          whole steps (tools/step_report.py), refusals too
    python tools/compile_matrix.py --tables matrix.jsonl steps.jsonl  what docs/compile-matrix.md holds

Cases are those of pallas_kernels/paged_attention/cases.py and some of other KV types and block sizes.  One subprocess a
target at a time; a compiler that dies costs its case, and is named.  Targets whose compiler this environment lacks are
left out, and said.  Lines already in --out are not compiled again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
NUM_LAYERS, NUM_BLOCKS, LIMIT_S = 2, 2048, 3600
TYPES = ("float32", "int8", "float8_e4m3fn", "float8_e5m2")
STEPS = [
    *((target, "smollm2-135m") for target in ("v5e", "v6e", "tpu7x", "h100", "h200", "b200", "a100", "l4")),
    *((target, "llama3-8b") for target in ("tpu7x", "h100", "h200", "b200", "a100", "v6e", "v5e", "l4")),
    *((target, "llama3-8b", "--tp", "8") for target in ("v5e-8", "v6e-8")),
    ("v5e-8", "llama3-70b", "--tp", "8"),
    ("v6e-8", "llama3-70b", "--tp", "8", "--quantize", "int8"),
    ("tpu7x-8", "llama3-70b", "--tp", "8"),
    ("h100", "llama3-70b"),
    ("h200", "llama3-70b"),
    ("a100", "llama3-70b", "--tp", "2"),
    ("l4", "llama3-70b", "--tp", "4"),
    ("h200", "llama3-70b", "--tp", "8"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], metavar="REGEX", help="cases whose name has one of these")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--tables", nargs="+", type=Path)
    parser.add_argument("--child", nargs="+", metavar="CASE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    from pallas_kernels import targets

    if arguments.tables:
        lines = (line for path in arguments.tables for line in path.read_text().splitlines())
        print("\n".join(tables([json.loads(line) for line in lines])))
        return 0
    if arguments.child:
        return compile_cases(arguments.targets[0], arguments.child)
    if arguments.out is None:
        parser.error("--out FILE: where the JSON lines go")
    every = [step[0] for step in STEPS] if arguments.steps else [*targets.SINGLE_DEVICE_TARGETS, *targets.GPU_TARGETS]
    chosen = arguments.targets or every
    here = [target for target in chosen if is_here(target)]
    if left_out := sorted(set(chosen) - set(here)):
        print(f"no compiler here for {', '.join(left_out)}", file=sys.stderr)
    done = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    with arguments.out.open("a") as out:
        make_reports = step_reports if arguments.steps else case_reports
        for report in make_reports(here, arguments.only, done):
            out.write(json.dumps(report) + "\n")
            out.flush()
            outcome = report.get("problem") or report.get("refused") or "compiled"
            print(f"{report['target']:8} {report['case']}: {outcome}", file=sys.stderr)
    return 0


def is_here(target: str) -> bool:
    from pallas_kernels import targets

    return targets.has_gpu_compiler() if target in targets.GPU_TARGETS else targets.has_tpu_compiler()


def case_names() -> dict[str, tuple]:
    """Name -> (case, KV type)."""
    from dataclasses import replace

    from pallas_kernels.paged_attention.cases import CASES

    mixed = next(case for case in CASES if case.name == "llama3-8b/mixed_64_1984")
    decode = next(case for case in CASES if case.name == "llama3-8b/decode_256")
    found = {case.name: (case, "bfloat16") for case in CASES}
    found |= {f"{case.name} {dtype}": (case, dtype) for dtype in TYPES for case in (mixed, decode)}
    of_size = {size: replace(mixed, block_size=size) for size in (16, 32, 128, 256)}
    found |= {f"{mixed.name} block {size}": (case, "bfloat16") for size, case in of_size.items()}
    return found


def case_reports(chosen: list[str], words: list[str], done: list[dict]) -> Iterator[dict]:
    for target in chosen:
        known = {report["case"] for report in done if report["target"] == target}
        left = [name for name in case_names() if name not in known and any(re.search(word, name) for word in words)]
        while left:
            command = [sys.executable, __file__, target, "--child", *left]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
                for line in child.stdout:
                    if line.startswith("{"):
                        left.pop(0)
                        yield json.loads(line)
            if left:
                yield {"case": left.pop(0), "target": target, "problem": f"the compiler died, status {child.returncode}"}


def compile_cases(target: str, names: list[str]) -> int:
    from tools import gpu_report

    gpu_report.prepare_environment()
    from pallas_kernels import targets

    cases, platform = case_names(), "gpu" if target in targets.GPU_TARGETS else "tpu"
    targets.devices(target)
    for name in names:
        report = {"case": name, "target": target}
        try:
            report |= compile_case(target, platform, *cases[name])
        except Exception as error:
            report["problem"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        print(json.dumps(report), flush=True)
    return 0


def compile_case(target: str, platform: str, case, dtype: str) -> dict:
    """One layer's attention in a step of the case's buckets, by the implementation that an engine would choose."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import targets
    from pallas_kernels.paged_attention import RaggedBatch, choose, layout, paged_attention, prepare
    from tools import gpu_report

    heads, spec = case.heads, case.spec
    pool_layout = layout(platform, heads.num_kv_heads, heads.head_dim, case.block_size, dtype)
    implementation = choose(platform, pool_layout, spec)
    optional = {"sinks": jnp.zeros(heads.num_heads)} if heads.has_sinks else {}
    if pool_layout.dtype.itemsize == 1:
        optional |= {"k_scale": jnp.ones(heads.num_kv_heads), "v_scale": jnp.ones(())}
    static = {"layout": pool_layout, "spec": spec, "implementation": implementation}

    def step(q, k, v, pool, layer, batch):
        metadata = prepare(batch, case.num_tokens, pool_layout, spec, implementation)
        return paged_attention(q, k, v, pool, layer, metadata, **static, **optional)

    i32 = lambda *size: jax.ShapeDtypeStruct(size, jnp.int32)
    compute = jnp.float32 if dtype == "float32" else jnp.bfloat16
    tokens = lambda count: jax.ShapeDtypeStruct((case.num_tokens, count, heads.head_dim), compute)
    q, kv = tokens(heads.num_heads), tokens(heads.num_kv_heads)
    pool = jax.ShapeDtypeStruct(pool_layout.shape(NUM_LAYERS, NUM_BLOCKS), pool_layout.storage_dtype)
    batch = RaggedBatch(i32(case.num_rows, 128), i32(case.num_rows), i32(case.num_rows + 1), i32())
    facts = gpu_report.run(
        lambda: (targets.compile_for(target, step, q, kv, kv, pool, i32(), batch, donate=(3,)), pool)
    )
    return {"implementation": implementation} | facts | {"problem": problem_of(facts, target, implementation)}


def problem_of(facts: dict, target: str, implementation: str) -> str | None:
    """What a compiled step should not be."""
    from pallas_kernels import targets

    kernels = facts["kernels"]
    wanted_ptx = targets.GPU_TARGETS[target].ptx_target if target in targets.GPU_TARGETS else None
    problems = {
        "the pool is not aliased": facts["alias_bytes"] != facts["pool_bytes"],
        f"{facts['pool_copies']} copies of the pool": facts["pool_copies"],
        "a pool's worth of temporaries": facts["temporary_bytes"] > facts["pool_bytes"] / 2,
        f"spills of {sum(kernel['spill_bytes'] for kernel in kernels)} bytes": any(k["spill_bytes"] for k in kernels),
        "another PTX target": any(kernel["ptx_target"] != wanted_ptx for kernel in kernels),
        "no kernel": implementation.startswith("mosaic") and not facts["kernel_calls"],
    }
    return "; ".join(name for name, holds in problems.items() if holds) or None


def step_reports(chosen: list[str], words: list[str], done: list[dict]) -> Iterator[dict]:
    known = {(report["target"], report["case"]) for report in done}
    for step in STEPS:
        target, case = step[0], " ".join(step[1:])
        is_asked = target in chosen and any(re.search(word, case) for word in words)
        if (target, case) in known or not is_asked:
            continue
        command, began = [sys.executable, str(ROOT / "tools" / "step_report.py"), *step], time.monotonic()
        facts = {"case": case, "target": target}
        try:
            finished = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            yield facts | {"problem": f"not compiled within {LIMIT_S} s"}
            continue
        programs = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
        facts |= {"programs": programs, "seconds": round(time.monotonic() - began)}
        last = (finished.stderr.strip().splitlines() or [""])[-1][:300]
        if finished.returncode == 2:
            facts["refused"] = last
        elif finished.returncode:
            facts["problem"] = f"status {finished.returncode}: {last}"
        yield facts


def tables(reports: list[dict]) -> Iterator[str]:
    kernels, steps = [r for r in reports if "seconds" not in r], [r for r in reports if "seconds" in r]
    if kernels:
        yield from case_table(kernels)
    if steps:
        yield ""
        yield from step_table(steps)


def case_table(reports: list[dict]) -> Iterator[str]:
    from pallas_kernels import targets

    order = [*targets.SINGLE_DEVICE_TARGETS, *targets.GPU_TARGETS]
    columns = sorted({report["target"] for report in reports}, key=order.index)
    known = {name: place for place, name in enumerate(case_names())}
    yield "| case | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    by_key = {(report["case"], report["target"]): report for report in reports}
    for case in sorted({report["case"] for report in reports}, key=lambda name: known.get(name, len(known))):
        yield f"| {case} | " + " | ".join(cell(by_key.get((case, column))) for column in columns) + " |"


def cell(report: dict | None) -> str:
    if report is None:
        return "not compiled"
    if report.get("problem"):
        vmem = re.search(r"Used \S+ of \S+ vmem", report["problem"])
        return f"**refused by the compiler: {vmem[0]}**" if vmem else report["problem"]
    return "kernel" if report["implementation"].startswith("mosaic") else report["implementation"]


def step_table(reports: list[dict]) -> Iterator[str]:
    yield "| model | target | program | attention | arguments | aliased (pool) | temporaries | exchanged | copies |"
    yield "|---" * 9 + "|"
    mib = lambda value: f"{value / 2**20:,.1f}"
    for report in reports:
        head = f"| {report['case']} | {report['target']} |"
        if report.get("refused") or report.get("problem"):
            text = re.sub(r"^.*?: ", "", report["refused"], count=1) if report.get("refused") else report["problem"]
            yield f"{head} {'refused before the compiler: ' if report.get('refused') else ''}{text} | | | | | | |"
        for program in report["programs"]:
            exchanged = ", ".join(f"{count} {kind}" for kind, count in sorted(program["collectives"].items())) or "none"
            copies = ", ".join(f"{count} of {name}" for name, count in program["copies"].items()) or "none"
            cells = (
                program["program"], program.get("attention", ""), mib(program["argument_bytes"]),
                mib(program["alias_bytes"]), mib(program["temporary_bytes"]), exchanged, copies,
            )  # fmt: skip
            yield f"{head} {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
