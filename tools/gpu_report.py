"""What the GPU kernels and whole steps become in the real compilers, with no GPU: one JSON line a program.

    python tools/gpu_report.py h100                        every kernel case and block copies
    python tools/gpu_report.py h100 llama3-8b/mixed        some of them
    python tools/gpu_report.py h100 --step llama3-8b       the whole forward step, smallest and largest bucket
    python tools/gpu_report.py h100 --by triton            by an implementation that would not be chosen there
    python tools/gpu_report.py h100 --table                for people

Needs jax's CUDA plugin and ptxas (`pip install jserve[compile]`).  One target a process: Mosaic GPU keeps kernels
by their source, whatever the target.  A compile runs nothing.  What Mosaic GPU's compiler says of its own kernels is taken
from it; Triton's, which XLA compiles with all else, are assembled once more to ask ptxas.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DUMP = "MOSAIC_GPU_DUMP_TO"
INSTRUCTIONS = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync", "tma": "cp.async.bulk.tensor",
                "cp_async": "cp.async.cg"}
XLA_FOLDER = "xla"
"""Within what DUMP names."""
DUMP_EMITTERS = "--xla_dump_emitter_re=.*"
"""jax 0.12 writes the PTX of no kernel without it."""
NUM_LAYERS, NUM_BLOCKS = 2, 2048


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int = 64
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    dtype: str = "bfloat16"


SHAPES = {
    "llama3-8b": Shape(8, 4, 128),
    "smollm2-135m": Shape(3, 3, 64, block_size=32),
    "llama3-8b-tp8": Shape(1, 4, 128, block_size=128),
    "llama3-70b-tp8": Shape(1, 8, 128, block_size=256),
    "qwen3-30b-a3b": Shape(4, 8, 128, block_size=16),
    "gpt-oss-20b-local": Shape(8, 8, 64, sliding_window=128, has_sinks=True),
    "phi3-mini": Shape(32, 1, 96, block_size=16, sliding_window=2047),
    "heads-of-80-capped": Shape(8, 4, 80, soft_cap=30.0),
    "falcon-7b": Shape(1, 71, 64),
    "gemma3-12b-local": Shape(8, 2, 256, sliding_window=1024),
    "llama3-8b-int8": Shape(8, 4, 128, dtype="int8"),
    "llama3-8b-fp8": Shape(8, 4, 128, dtype="float8_e4m3fn"),
    "llama3-8b-float16": Shape(8, 4, 128, dtype="float16"),
    "smollm2-135m-fp8": Shape(3, 3, 64, block_size=32, dtype="float8_e5m2"),
    "gemma3-12b-int8": Shape(8, 2, 256, dtype="int8"),
    "gemma3-12b-fp8": Shape(8, 2, 256, dtype="float8_e4m3fn"),
}
BUCKETS = {"mixed": (512, 64, False), "decode_1": (1, 1, True), "decode_256": (256, 256, True)}
"""tokens, rows, decode only"""
CASES = [f"{shape}/mixed" for shape in SHAPES] + ["llama3-8b/decode_1", "llama3-8b/decode_256"]
COPIES = ("block_copy/copy", "block_copy/scatter", "block_copy/gather")
STEP_BUCKETS = {"smallest": (8, 8, True), "largest": (2048, 64, False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--step", action="append", default=[], help="a model's whole step; may be repeated")
    parser.add_argument("--by", help="an implementation [what `choose` takes for the target]")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    prepare_environment()
    of_implementation = functools.partial(compile_kernels, by=arguments.by), functools.partial(compile_step, by=arguments.by)
    cases = arguments.cases or ([] if arguments.step else [*CASES, *COPIES])
    programs = [(name, compile_copies if name in COPIES else of_implementation[0], (name,)) for name in cases]
    programs += [(f"{model}/{name}", of_implementation[1], (model, name)) for model in arguments.step for name in STEP_BUCKETS]
    for name, compile_program, its_arguments in programs:
        report = {"program": name, "target": arguments.target} | run(compile_program, arguments.target, *its_arguments)
        print(table_row(report) if arguments.table else json.dumps(report), flush=True)


def prepare_environment() -> None:
    """Before jax starts: what its compilers write, and that no device is looked for."""
    sys.path.insert(0, str(ROOT))
    from pallas_kernels import targets

    targets.configure_environment()
    os.environ |= {DUMP: tempfile.mkdtemp(prefix="mosaic-gpu.")}
    os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={os.environ[DUMP]}/{XLA_FOLDER} {DUMP_EMITTERS}"


def run(compile_program, *arguments) -> dict:
    """Compiles, and reads what the compilers wrote."""
    folder = Path(os.environ[DUMP])
    folder.mkdir(exist_ok=True)
    started = time.process_time()
    try:
        compiled, pool = compile_program(*arguments)
        memory, text = compiled.memory_analysis(), compiled.as_text()
        dimensions = ",".join(map(str, pool.shape))
        return {
            "cpu_seconds": round(time.process_time() - started, 1),
            "pool_bytes": pool.size * pool.dtype.itemsize,
            "alias_bytes": memory.alias_size_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "pool_copies": len(re.findall(rf"\[{dimensions}\]\S* (?:copy|copy-start)\(", text)),
            "kernel_calls": len(re.findall(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu|__gpu\$xla.gpu.triton)', text)),
            "kernels": read_kernels(folder),
        }
    finally:
        shutil.rmtree(folder)


def read_kernels(folder: Path) -> list[dict]:
    mosaic = map(read_mosaic_kernel, folder.glob("*.ptx"))
    files = [file for file in (folder / XLA_FOLDER).glob("*.ptx") if ".entry jserve_triton" in file.read_text()]
    triton = {kernel["name"]: kernel for kernel in map(read_triton_kernel, files)}  # of every layer that was compiled alike
    return sorted([*mosaic, *triton.values()], key=lambda kernel: kernel["name"])


def read_mosaic_kernel(ptx_file: Path) -> dict:
    """One kernel, out of its PTX and the assembler's log."""
    ptx, log = ptx_file.read_text(), ptx_file.with_suffix(".ptxas").read_text(errors="replace")
    passes = ptx_file.with_suffix(".mlir-passes.log").read_text(errors="replace")
    shared = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes)
    return read_kernel(re.sub(r"_\d+$", "", ptx_file.stem), ptx, log, int(shared[-1]) if shared else None)


def read_triton_kernel(ptx_file: Path) -> dict:
    """Its shared memory is asked for at launch, and stands in XLA's plan of launches."""
    ptx = ptx_file.read_text()
    name, target = re.search(r"\.entry (\w+)", ptx)[1], re.search(r"\.target (\S+?),?\s", ptx)[1]
    command = [str(ptxas()), "-v", "--gpu-name", target, str(ptx_file), "-o", os.devnull]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    plans = "".join(file.read_text() for file in ptx_file.parent.glob("*.thunk_sequence.txt"))
    shared = re.findall(rf"{name}\b.*?shmem_bytes\W+(\d+)", plans)
    return read_kernel(re.sub(r"_\d+$", "", name), ptx, finished.stderr, int(shared[-1]) if shared else None)


def ptxas() -> Path:
    """Of the CUDA wheels, or of the PATH."""
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations if package else ():
        for found in Path(folder).glob("*/bin/ptxas"):
            return found
    return Path(shutil.which("ptxas") or "ptxas")


def read_kernel(name: str, ptx: str, log: str, shared_bytes: int | None) -> dict:
    return {
        "name": name,
        "ptx_target": re.search(r"\.target (\S+?),?\s", ptx)[1],
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill stores", log))),
        "stack_bytes": sum(map(int, re.findall(r"(\d+) bytes stack frame", log))),
        "warnings": re.findall(r"warning.*", log),
        "shared_bytes": shared_bytes,
        "threads": int(re.search(r"\.(?:req|max)ntid (\d+)", ptx)[1]),
        **{name: ptx.count(opcode) for name, opcode in INSTRUCTIONS.items()},
    }


def compile_kernels(target: str, case: str, by: str | None = None):
    """One layer's attention: (compiled, pool)."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import targets
    from pallas_kernels.paged_attention import AttentionSpec, RaggedBatch, choose, layout, paged_attention, prepare

    targets.devices(target)  # the kernels now know what they are compiled for
    name, bucket = case.split("/")
    shape, (num_tokens, num_rows, decode_only) = SHAPES[name], BUCKETS[bucket]
    pool_layout = layout("gpu", shape.num_kv_heads, shape.head_dim, shape.block_size, shape.dtype)
    fields = shape.sliding_window, shape.soft_cap, shape.has_sinks, decode_only
    spec = AttentionSpec(shape.head_dim**-0.5, *fields)
    implementation = choose("gpu", pool_layout, spec, by)
    optional = {"sinks": jnp.zeros(shape.num_kv_heads * shape.group)} if shape.has_sinks else {}
    if pool_layout.dtype.itemsize == 1:
        optional |= {"k_scale": jnp.ones(shape.num_kv_heads), "v_scale": jnp.ones(())}

    def step(q, k, v, pool, layer, batch):
        metadata = prepare(batch, num_tokens, pool_layout, spec, implementation)
        static = {"layout": pool_layout, "spec": spec, "implementation": implementation}
        return paged_attention(q, k, v, pool, layer, metadata, **static, **optional)

    i32 = lambda *size: jax.ShapeDtypeStruct(size, jnp.int32)
    tokens = lambda heads: jax.ShapeDtypeStruct((num_tokens, heads, shape.head_dim), jnp.bfloat16)
    q, kv = tokens(shape.num_kv_heads * shape.group), tokens(shape.num_kv_heads)
    pool = jax.ShapeDtypeStruct(pool_layout.shape(NUM_LAYERS, NUM_BLOCKS), pool_layout.storage_dtype)
    batch = RaggedBatch(i32(num_rows, 128), i32(num_rows), i32(num_rows + 1), i32())
    return targets.compile_for(target, step, q, kv, kv, pool, i32(), batch, donate=(3,)), pool


def compile_copies(target: str, name: str):
    """Copies of 16 blocks within a pool, or from and to a staging buffer: (compiled, pool)."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import targets
    from pallas_kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
    from pallas_kernels.paged_attention import layout

    pool_layout = layout("gpu", 8, 128, 64, "bfloat16")
    pool = jax.ShapeDtypeStruct(pool_layout.shape(32, 256), pool_layout.storage_dtype)
    staging = jax.ShapeDtypeStruct((16, 32, *pool.shape[2:]), pool.dtype)
    ids, count = jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    function, operands = {
        "copy": (copy_blocks, (pool, ids, ids, count)),
        "scatter": (scatter_blocks, (pool, ids, staging, count)),
        "gather": (gather_blocks, (pool, ids, count)),
    }[name.split("/")[1]]
    run = lambda *operands: function(*operands, platform="gpu")
    return targets.compile_for(target, run, *operands, donate=() if function is gather_blocks else (0,)), pool


def compile_step(target: str, model: str, bucket: str, by: str | None = None):
    """Forward, logits of one row a sequence, greedy ids; the pool donated: (compiled, pool)."""
    import jax
    import jax.numpy as jnp

    from jserve.models import llama
    from jserve.models.inputs import AttentionPlan, ForwardInputs
    from pallas_kernels import targets
    from pallas_kernels.paged_attention import AttentionSpec, RaggedBatch, choose, layout

    targets.devices(target)
    config, (num_tokens, num_rows, decode_only) = model_config(model), STEP_BUCKETS[bucket]
    pool_layout = layout("gpu", config.num_kv_heads, config.head_dim, 64, "bfloat16")
    implementation = choose("gpu", pool_layout, AttentionSpec(config.head_dim**-0.5), by)
    plan = AttentionPlan(implementation, (pool_layout,), decode_only)

    def step(params, pool, inputs, sampled_rows):
        hidden, (pool,) = llama.forward(params, config, (pool,), inputs, plan)
        return jnp.argmax(llama.logits(params, config, hidden[sampled_rows]), -1), pool

    i32 = lambda *size: jax.ShapeDtypeStruct(size, jnp.int32)
    placeholder = lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    params = jax.tree.map(placeholder, llama.param_specs(config, "bfloat16"))
    batch = RaggedBatch(i32(num_rows, 128), i32(num_rows), i32(num_rows + 1), i32())
    pool = jax.ShapeDtypeStruct(pool_layout.shape(config.num_layers, 1024), pool_layout.storage_dtype)
    inputs = ForwardInputs(i32(num_tokens), i32(num_tokens), (batch,))
    return targets.compile_for(target, step, params, pool, inputs, i32(num_rows), donate=(1,)), pool


def model_config(name: str):
    from jserve.models.config import from_hf

    common = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    return from_hf(common | {
        "smollm2-135m": {
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000.0,
            "tie_word_embeddings": True,
        },
        "llama3-8b": {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
            "tie_word_embeddings": False,
        },
    }[name])  # fmt: skip


def table_row(report: dict) -> str:
    lines = []
    for kernel in report["kernels"]:
        products, copies = ("wgmma", "tcgen05", "mma"), ("tma", "cp_async")
        found = (next((kernel[name] for name in names if kernel[name]), 0) for names in (products, copies))
        facts = (kernel[name] for name in ("threads", "registers", "spill_bytes", "shared_bytes"))
        cells = report["program"], report["target"], kernel["name"], kernel["ptx_target"], *found, *facts
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    mib = lambda name: f"{report[name] / 2**20:.1f} MiB"
    lines.append(
        f"  pool {mib('pool_bytes')}, aliased {mib('alias_bytes')}, copies {report['pool_copies']}, "
        f"temporaries {mib('temporary_bytes')}, arguments {mib('argument_bytes')}, {report['cpu_seconds']} s of CPU"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
