"""What whole steps become in the real TPU and GPU compilers, on one device or split over several, with none there.

    python tools/step_report.py v6e-8 llama3-8b --tp 8
    python tools/step_report.py tpu7x-8 llama3-70b --tp 8 --bucket smallest
    python tools/step_report.py v6e-8 llama3-70b --tp 8 --quantize int8 --table
    python tools/step_report.py v5e-8 llama3-70b --tp 8            refused by the memory arithmetic, with the numbers

Compiles the programs that the engine would: its memory plan sizes the pool (planner's figures of the device), its
compile plan the buckets, its ProgramSet lowers.  One JSON line a program; exits with 2 where the model does not divide
or fit.  `accessed_bytes` is the compiler's count (none on GPU); `moved_bytes` that of tools/hlo_traffic.py, loops as often as they
run; `counted_as_compiler` the same with loops once, all memories and no kernels, to compare with the first.  Needs libtpu or
jax's CUDA plugin (`pip install jserve[compile]`); one GPU target a process.  Runs nothing.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLLECTIVES = r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
NUM_TOKENS, NUM_ROWS, SMALLEST = 2048, 256, 8
BUCKETS = ("smallest", "largest", "head", "sampler")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--quantize", default="none", choices=("none", "int8"))
    parser.add_argument("--bucket", default="all", choices=("all", *BUCKETS), help="all: but the sampler")
    parser.add_argument("--layers", choices=("scan", "unrolled"), help="how run_layers compiles; unless the platform's way")
    parser.add_argument("--table", action="store_true", help="for people")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from pallas_kernels import targets

    targets.configure_environment()
    from jserve.config import ConfigError

    try:
        for report in reports(arguments.target, arguments.model, arguments.tp, arguments.quantize, arguments.bucket,
                              arguments.layers):
            print(table_row(report) if arguments.table else json.dumps(report), flush=True)
    except ConfigError as error:
        print(f"{arguments.model} on {arguments.target}: {error}", file=sys.stderr)
        return 2
    return 0


def reports(target: str, model: str, size: int = 1, quantize: str = "none", bucket: str = "all", layers: str | None = None):
    """A report of each program.  ConfigError, before anything is compiled, where the model does not divide or fit."""
    import jax

    from jserve.engine.build import make_programs
    from jserve.engine.pool_size import pool_layouts, size_pool
    from jserve.models.registry import model_code
    from jserve.models.spec import shapes
    from jserve.parallel.placement import on_devices
    from jserve.planner.devices import find_target
    from jserve.runner import forward
    from jserve.runner.compile_plan import make_compile_plan
    from pallas_kernels import targets

    device_bytes = int(find_target(target).memory_bytes)
    placement = on_devices(targets.devices(target, size)[:size])
    model_config = config_of(model)
    config = settings(model_config, placement, quantize)
    specs = model_code(model_config).param_specs(
        model_config, config.model.dtype, size, None if quantize == "none" else quantize
    )
    params = shapes(specs, placement)
    weight_bytes, plan = placement.bytes_per_device(params), make_compile_plan(config)
    memory = size_pool(model_config, weight_bytes, config, placement, plan, device_bytes=device_bytes)
    layouts = pool_layouts(model_config, config, placement)
    programs = make_programs(
        model_config, config, plan, layouts, tuple(group.num_blocks for group in memory.groups), model_config.vocab_size, 0,
        placement,
    )
    served = forward.ServedParams(params.replace(layers=None), params.layers)
    facts = {
        "target": target, "model": model, "num_devices": size, "quantize": quantize, "layers": layers,
        "weight_bytes": weight_bytes, "pool_bytes": memory.pool_bytes, "num_blocks": memory.num_blocks,
        "block_size": memory.block_size, "usable_bytes": memory.usable_bytes,
        "activation_bytes": memory.activation_bytes, "num_layers": model_config.num_layers,
        "attention": programs.implementation,
    }  # fmt: skip
    local_shapes = {
        "pool": layouts[0].shape(model_config.layer_groups[0].num_layers, memory.groups[0].num_blocks),
        **{
            f"weights {'x'.join(map(str, leaf.shape))}": leaf.sharding.shard_shape(leaf.shape)
            for leaf in jax.tree.leaves(params.layers)
            if leaf.ndim == 3
        },
    }
    with running_layers(layers):
        jobs = programs.jobs(served)
        for name, key in wanted(programs, bucket).items():
            started = time.process_time()
            with jax.set_mesh(placement.mesh):
                lowered = jobs[key]()
            compiled = lowered.compile(compiler_options=targets.step_compiler_options(target))
            seconds = round(time.process_time() - started, 1)
            yield {"program": name} | facts | measure(compiled, local_shapes) | {"cpu_seconds": seconds}


def wanted(programs, bucket: str) -> dict:
    """Program -> its key among ProgramSet's jobs."""
    from jserve.sampling.sampler import VARIANTS

    plan = programs.plan
    smallest, largest, head = plan.decode_shapes[0], plan.mixed_shapes[-1], plan.head_rows[-1]
    sampler = max(plan.sampler_shapes, key=lambda shape: (shape.num_rows, VARIANTS.index(shape.variant)))
    named = {
        "smallest": (f"forward {smallest}", (smallest, "forward")),
        "largest": (f"forward {largest}", (largest, "forward")),
        "head": (f"head[{head} rows]", ("head", head)),
        "sampler": (f"sampler[{sampler.num_rows} rows, {sampler.variant.kind.name.lower()}]", sampler),
    }
    return dict(found for name, found in named.items() if bucket == name or bucket == "all" and name != "sampler")


def settings(model, placement, quantize: str):
    """The config that an engine would resolve, with one mixed bucket and the smallest and largest of decodes."""
    from jserve.config import Config, ConfigError
    from jserve.engine.settings import resolve_automatic, resolve_block_size
    from jserve.models.config import ModelError

    platform = placement.devices[0].platform
    config = Config().replace("model", dtype="bfloat16", quantize=quantize)
    config = config.replace("parallel", tensor_parallel_size=placement.num_shards)
    config = config.replace("scheduler", max_num_batched_tokens=NUM_TOKENS, max_num_seqs=NUM_ROWS)
    config = config.replace("compile", token_buckets=(NUM_TOKENS,), sequence_buckets=(SMALLEST, NUM_ROWS))
    config = resolve_automatic(config, platform)
    try:
        return resolve_block_size(config, model.shard(placement.num_shards, placement.axis), platform)
    except ModelError as error:
        raise ConfigError(f"parallel.{error}") from None


def measure(compiled, local_shapes: dict[str, tuple[int, ...]]) -> dict:
    """Bytes of one device, copies of anything that must stay where it is, and what devices exchange."""
    from tools import hlo_traffic

    memory, text = compiled.memory_analysis(), compiled.as_text()
    moved = hlo_traffic.moved_bytes(text, math.prod(local_shapes["pool"]))
    as_compiler = hlo_traffic.moved_bytes(text, every_memory=True, trips=False)
    outside_fusions = without_fusions(text)
    copies = {
        name: count
        for name, shape in local_shapes.items()
        if (count := len(re.findall(rf"\[{','.join(map(str, shape))}\]\S* (?:copy|copy-start)\(", outside_fusions)))
    }
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "accessed_bytes": int(cost_of(compiled).get("bytes accessed", 0)),
        "counted_as_compiler": sum(count for kind, count in as_compiler.items() if kind != "tpu_custom_call"),
        "moved_bytes": moved.total(),
        "moved_by": dict(moved.most_common(6)),
        "loops_of_unknown_length": hlo_traffic.loops_of_unknown_length(text),
        "copies": copies,
        "collectives": dict(collections.Counter(re.findall(rf" ({COLLECTIVES})(?:-start)?\(", text))),
        "kernel_calls": len(re.findall(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu|__gpu\$xla.gpu.triton)', text)),
    }


def cost_of(compiled) -> dict[str, float]:
    """What XLA expects of a program: operations and bytes, a loop's body once."""
    cost = compiled.cost_analysis() or {}
    return cost[0] if isinstance(cost, list) else cost


def without_fusions(text: str) -> str:
    """The HLO text without the computations that fusions call: a copy within one says in which order something is read."""
    fused = set(re.findall(r"calls=(%[\w.-]+)", text))
    return re.sub(r"(?ms)^(%[\w.-]+) [^\n]*{$.*?^}$", lambda found: "" if found[1] in fused else found[0], text)


def config_of(name: str):
    """The sizes of a real model; no weights."""
    from jserve.models.config import from_hf

    common = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "max_position_embeddings": 8192,
    }  # fmt: skip
    llama3 = {"num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "tie_word_embeddings": False}
    return from_hf(common | {
        "smollm2-135m": {
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "vocab_size": 49152, "rope_theta": 100000.0, "tie_word_embeddings": True,
        },
        "llama3-8b": llama3 | {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        },
        "llama3-70b": llama3 | {
            "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        },
    }[name])  # fmt: skip


class running_layers:
    """run_layers in another way than the platform's, to compare what they become; None leaves it."""

    def __init__(self, way: str | None):
        self._platform = {None: None, "scan": "tpu", "unrolled": "gpu"}[way]

    def __enter__(self) -> None:
        from jserve.models import llama

        self._original = run_layers = llama.run_layers
        if self._platform is not None:
            llama.run_layers = lambda layer, carry, weights, groups, platform: run_layers(
                layer, carry, weights, groups, self._platform
            )

    def __exit__(self, *error) -> None:
        from jserve.models import llama

        llama.run_layers = self._original


def table_row(report: dict) -> str:
    mib = lambda name: f"{report[name] / 2**20:,.1f}"
    exchanged = ", ".join(f"{count} {kind}" for kind, count in sorted(report["collectives"].items())) or "none"
    copies = ", ".join(f"{count} of {name}" for name, count in report["copies"].items()) or "none"
    cells = (
        f"{report['model']}{' int8' if report['quantize'] == 'int8' else ''}", report["target"], report["num_devices"],
        report["program"], mib("weight_bytes"), mib("pool_bytes"), mib("argument_bytes"), mib("alias_bytes"),
        mib("temporary_bytes"), exchanged, copies, report["cpu_seconds"],
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    sys.exit(main())
