"""Schedules of the TPU kernels as the real compiler made them: bundles, spills and matrix work by loop, without a TPU.

    python tools/count_bundles.py decode --target v5e --target tpu7x --kv-heads 8 --group 4 --block-size 64
    python tools/count_bundles.py table            # the tables of docs/kernels-tpu.md, about 30 compiles

A bundle is one issue slot of the machine.  DMA time and waits are not in it: the counts compare kernels and hold a
budget, they are no latency.  One subprocess a compile, because the dump flags go to libtpu when it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pallas_kernels import targets  # noqa: E402

KERNELS = {"decode": "jserve_decode", "write": "jserve_write", "chunks": "jserve_chunks", "shipped": "ragged_paged"}
BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?P<label>L[HBE]|P[BF]|CT)?\s*:\s*(?P<depth>[> ]*)\{(?P<body>.*)")


@dataclass(frozen=True)
class Case:
    """One kernel at one shape."""

    kernel: str
    target: str
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    block_size: int = 64
    dtype: str = "bfloat16"
    window: int | None = None
    group_tokens: int | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        import jax.numpy as jnp

        return self.kv_heads * 2 * self.head_dim * jnp.dtype(self.dtype).itemsize


@dataclass
class Loop:
    """Bundles of a loop body, without those of the loops inside it."""

    depth: int
    bundles: int = 0
    spills: int = 0  # bundles that move a vector register to or from its spill slot
    matmuls: int = 0
    pushes: int = 0
    inner: list["Loop"] = field(default_factory=list)

    def walk(self) -> Iterator["Loop"]:
        yield self
        for loop in self.inner:
            yield from loop.walk()

    def describe(self) -> str:
        counts = f"{self.bundles} bundles, {self.spills} spill, {self.matmuls} matmul, {self.pushes} push"
        line = f"{'  ' * self.depth}loop: {counts}"
        return "\n".join([line] + [loop.describe() for loop in self.inner])


def parse(text: str) -> Loop:
    """The loop tree of a *-final_bundles.txt; the root is the code outside loops, its one large loop is the grid."""
    bundles = [match for match in map(BUNDLE.match, text.splitlines()) if match]
    depths = [match["depth"].count(">") for match in bundles]
    # Some bundles before a branch carry no depth mark: they belong to the shallower of their neighbours.
    marked = [index for index, depth in enumerate(depths) if depth]
    for before, after in zip(marked, marked[1:]):
        depths[before + 1 : after] = [min(depths[before], depths[after])] * (after - before - 1)
    root = Loop(0)
    stack = [root]
    for match, depth in zip(bundles, depths):
        starts = match["label"] == "LB"
        while stack[-1].depth > depth or (starts and stack[-1].depth == depth):
            stack.pop()
        if starts or stack[-1].depth < depth:
            loop = Loop(depth)
            stack[-1].inner.append(loop)
            stack.append(loop)
        body, loop = match["body"], stack[-1]
        loop.bundles += 1
        loop.spills += bool(re.search(r"\bv(?:ld|st)\b[^;]*_spill\]", body))
        loop.matmuls += len(re.findall(r"\bvmatmul\b[.\w]*", body))
        loop.pushes += len(re.findall(r"\b(?:vmatpush|vmatprep\.subr|vmatprep\.mubr)\b[.\w]*", body))
    return root


def compile_case(case: Case) -> Loop:
    """Compiles in a subprocess with dumps on and parses the kernel's final bundles."""
    with tempfile.TemporaryDirectory() as folder:
        environment = targets.ENVIRONMENT | os.environ
        environment["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, __file__, "--child", json.dumps(asdict(case))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{case}: {done.stderr[-2000:]}")
        dumps = [
            path
            for path in Path(folder).glob(f"*{KERNELS[case.kernel]}*-final_bundles.txt")
            if "schedule-analysis" not in path.name
        ]
        return parse(max(dumps, key=lambda path: path.stat().st_size).read_text())


def decode_bundles_per_kib(tree: Loop, case: Case) -> float:
    """Of the loop over whole KV groups, the fetches of its blocks included."""
    if case.kernel == "shipped":  # one loop, whose fetches are unrolled
        tokens = case.group_tokens or 512
        group = max(tree.walk(), key=lambda loop: loop.pushes)
        return group.bundles / _kib(case, tokens)
    tokens = tiles_of(case).decode_group
    group = max((loop for loop in tree.walk() if loop.inner and loop.depth >= 2), key=lambda loop: loop.pushes)
    fetch = sum(loop.bundles for loop in group.inner)
    return (group.bundles + fetch * (tokens // case.block_size)) / _kib(case, tokens)


def _kib(case: Case, tokens: int) -> float:
    return tokens * case.kv_bytes_per_token / 1024


def layout_of(case: Case):
    from pallas_kernels.paged_attention import layout

    return layout("tpu", case.kv_heads, case.head_dim, case.block_size, case.dtype)


def tiles_of(case: Case):
    from pallas_kernels.paged_attention.mosaic_tpu_tiles import default_tiles

    return default_tiles(layout_of(case), case.group)


def build(case: Case) -> None:
    """In the child: lower and compile the one kernel."""
    import functools

    import jax
    import jax.numpy as jnp

    from pallas_kernels.paged_attention import AttentionSpec, mosaic_tpu_chunk, mosaic_tpu_decode, mosaic_tpu_write

    num_rows, num_tokens, max_blocks, num_blocks, num_items = 16, 512, 128, 512, 64
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    num_heads = case.kv_heads * case.group
    compile_for = functools.partial(targets.compile_for, case.target)
    if case.kernel == "shipped":
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

        function = functools.partial(
            ragged_paged_attention,
            num_kv_pages_per_block=(case.group_tokens or 512) // case.block_size,
            num_queries_per_block=8,
            vmem_limit_bytes=(50 if case.target == "tpu7x" else 100) << 20,
        )
        pages = bf16(num_blocks, case.block_size, 2 * case.kv_heads, case.head_dim)
        q = bf16(num_rows, num_heads, case.head_dim)
        compile_for(function, q, pages, i32(num_rows), i32(num_rows, max_blocks), i32(num_rows + 1), i32(1))
        return
    pool_layout = layout_of(case)
    spec = AttentionSpec(case.head_dim**-0.5, sliding_window=case.window)
    pool = jax.ShapeDtypeStruct(pool_layout.shape(2, num_blocks), pool_layout.storage_dtype)
    new = lambda count: jax.ShapeDtypeStruct((count, case.kv_heads, pool_layout.planes, 128), pool.dtype)
    tables = i32(num_rows, 1, max_blocks)
    static = {"layout": pool_layout, "spec": spec, "tiles": tiles_of(case)}
    if case.kernel == "decode":
        function = functools.partial(mosaic_tpu_decode.decode_attention, **static)
        q = bf16(num_rows, num_heads, case.head_dim)
        compile_for(function, q, new(num_rows), pool, i32(), tables, i32(num_rows), i32(), donate=(2,))
    elif case.kernel == "write":
        writes = mosaic_tpu_write.ChunkWrites(*(i32(num_items) for _ in range(4)), i32())
        function = functools.partial(mosaic_tpu_write.write_chunks, layout=pool_layout)
        compile_for(function, new(num_tokens), pool, i32(), writes, donate=(1,))
    else:
        chunks = mosaic_tpu_chunk.ChunkTiles(*(i32(num_items) for _ in range(5)), i32())
        function = functools.partial(mosaic_tpu_chunk.attend_chunks, **static)
        compile_for(function, bf16(num_tokens, num_heads, case.head_dim), pool, i32(), tables, chunks)


TABLE_SHAPES = {
    "Llama-3-8B, TP 1": {"kv_heads": 8, "group": 4, "block_size": 64},
    "Llama-3-8B, TP 8": {"kv_heads": 1, "group": 4, "block_size": 128},
    "Qwen3-30B-A3B, TP 1": {"kv_heads": 4, "group": 8, "block_size": 64},
    "Qwen3-32B, TP 8": {"kv_heads": 1, "group": 8, "block_size": 128},
}
TABLE_TARGETS = ("v5e", "v6e", "tpu7x")


def print_table() -> None:
    """Markdown rows, as they come."""
    for name, shape in TABLE_SHAPES.items():
        group_tokens = 512 if shape["kv_heads"] == 8 else 1024 if shape["kv_heads"] == 4 else 2048
        for target in TABLE_TARGETS:
            ours, shipped = (
                Case(kernel, target, **shape, group_tokens=group_tokens) for kernel in ("decode", "shipped")
            )
            trees = [compile_case(case) for case in (ours, shipped)]
            costs = [decode_bundles_per_kib(tree, case) for tree, case in zip(trees, (ours, shipped))]
            spills = [max(loop.spills for loop in tree.walk()) for tree in trees]
            print(
                f"| {name} | {target} | {tiles_of(ours).decode_group} | {costs[0]:.3f} | {spills[0]} "
                f"| {group_tokens} | {costs[1]:.3f} | {spills[1]} |",
                flush=True,
            )
    for name in ("Llama-3-8B, TP 1", "Llama-3-8B, TP 8"):
        for target in TABLE_TARGETS:
            tree = compile_case(Case("chunks", target, **TABLE_SHAPES[name]))
            main = max(tree.walk(), key=lambda loop: loop.matmuls)
            print(
                f"| {name} | {target} | {main.bundles} | {main.spills} | {main.matmuls} | {main.pushes} |", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments, _ = parser.parse_known_args()
    if arguments.child:
        build(Case(**json.loads(arguments.child)))
        return
    parser.add_argument("kernel", choices=[*KERNELS, "table"])
    parser.add_argument("--target", action="append", choices=targets.SINGLE_DEVICE_TARGETS)
    for name in ("kv_heads", "group", "head_dim", "block_size"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Case, name))
    parser.add_argument("--dtype", default=Case.dtype)
    parser.add_argument("--window", type=int)
    parser.add_argument("--group-tokens", type=int)
    arguments = parser.parse_args()
    options = {k: v for k, v in vars(arguments).items() if k not in ("child", "target")}
    if arguments.kernel == "table":
        print_table()
        return
    for target in arguments.target or targets.SINGLE_DEVICE_TARGETS:
        case = Case(target=target, **options)
        print(case, flush=True)
        tree = compile_case(case)
        print(tree.describe(), flush=True)
        if case.kernel in ("decode", "shipped"):
            print(f"{decode_bundles_per_kib(tree, case):.3f} bundles per KiB of KV in the group loop", flush=True)


if __name__ == "__main__":
    main()
