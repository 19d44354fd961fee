"""Run by test_engine in a process of its own, with four CPU devices: one model served on one device and on several.

    engine_on_devices.py FOLDER NUM_KV_HEADS ENGINE...     prints a JSON object: what each engine answered

An engine is a tensor_parallel_size and how preemption is done, and may be quantized: 1/swap, 4/recompute, 2/swap/int8.

Asks for everything that reads or writes across devices: chunks, decodes, a shared prefix, draws, penalties, a grammar,
prompt scores, beams, embeddings, preemption by recompute and by swap.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax

from tests.engine.test_preemption import preempt_every
from tests.support.engines import answers, request, running_engine
from tests.support.tiny_models import random_gguf

SMALL = dict(
    kv={"num_blocks": 24, "memory_bytes": None, "block_size": 8},
    scheduler={"max_num_batched_tokens": 16, "max_num_seqs": 4},
)
SHARED = [(5 * i) % 499 for i in range(26)]


def work() -> list:
    drawn = dict(temperature=1.0, seed=11, top_p=0.95, top_k=40, ignore_eos=True)
    greedy = [request(prompt, 10, ignore_eos=True, logprobs=2) for prompt in (SHARED, SHARED[:20] + [7, 8], [9])]
    return [
        *greedy,
        request(SHARED, 8, n=3, **drawn),
        request(SHARED[:9], 8, **drawn, repetition_penalty=1.3, presence_penalty=0.5),
        request(SHARED[:5], 8, temperature=1.0, seed=5, regex="[a-z]{4,6}"),
        request(SHARED[:12], 4, prompt_logprobs=1),
        request(SHARED[:7], 6, temperature=None, beam_width=3, n=3, ignore_eos=True),
    ]


def serve(path: Path, size: int, preemption: str, quantize: str = "none") -> dict:
    """Tokens and texts of every request, what the books say, and how arrays lie."""
    sections = dict(
        kv={**SMALL["kv"], "preemption": preemption},
        scheduler=SMALL["scheduler"],
        parallel={"tensor_parallel_size": size},
        model={"quantize": quantize},
    )
    with running_engine(path, **sections) as engine:
        preempt_every(engine, 5)
        got = answers(engine, work())
        loads = engine.loads()
        runner = engine._loop._runner
        arrays = {"pool": runner._pools[0]} | {
            name: jax.tree.leaves(getattr(runner._params.layers[0], name))[0] for name in ("qkv", "down")
        }
        return {
            "tokens": [
                [delta.token_ids for delta in sorted(update.outputs, key=lambda delta: delta.index)] for update in got
            ],
            "texts": [[delta.text for delta in update.outputs] for update in got],
            "num_preemptions": loads.num_preemptions,
            "num_swaps": loads.num_swap_preemptions,
            "prefix_hits": loads.prefix_cache_hit_tokens,
            "devices": len(engine.info.devices),
            "parts": {name: array.addressable_shards[0].data.shape for name, array in arrays.items()},
        }


def main() -> None:
    folder, num_kv_heads, *engines = sys.argv[1:]
    folder = Path(folder)
    path = random_gguf(folder / f"kv{num_kv_heads}.gguf", num_heads=4, num_kv_heads=int(num_kv_heads), head_dim=32)
    answer = {}
    for engine in engines:
        size, *how = engine.split("/")
        answer[engine] = serve(path, int(size), *how)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
