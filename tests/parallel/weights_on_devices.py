"""Run by test_engine in a process of its own, with four CPU devices: a checkpoint in each format, restored into its parts.

    weights_on_devices.py FOLDER     prints a JSON object
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np

from jserve.parallel.placement import Placement, on_devices
from jserve.weights.convert import convert
from jserve.weights.load import load_model
from tests.support.tiny_models import random_gguf


def main() -> None:
    folder = Path(sys.argv[1])
    source = random_gguf(folder / "model.gguf", num_heads=4, num_kv_heads=2, head_dim=32)
    hf = convert(source, folder / "hf", "hf", shard_bytes=200_000).path
    orbax = convert(hf, folder / "orbax", "orbax").path
    placement = on_devices(jax.devices())
    answer = {}
    for quantize in (None, "int8"):
        models = [load_model(path, "float32", quantize=quantize, placement=placement) for path in (source, hf, orbax)]
        first, *others = [jax.tree.leaves(model.params) for model in models]
        answer[f"formats agree, {quantize}"] = all(
            a.dtype == b.dtype and a.sharding == b.sharding and np.array_equal(a, b)
            for other in others
            for a, b in zip(first, other, strict=True)
        )
        Placement.copies = True  # as on devices with memory of their own: a layer at a time
        by_layer = jax.tree.leaves(load_model(source, "float32", quantize=quantize, placement=placement).params)
        Placement.copies = property(lambda self: False)
        answer[f"a layer at a time, {quantize}"] = all(
            a.dtype == b.dtype and a.sharding == b.sharding and np.array_equal(a, b)
            for a, b in zip(first, by_layer, strict=True)
        )
    whole, params = load_model(source, "float32").params, models[0].params
    answer["columns in order"] = np.array_equal(
        load_model(source, "float32", placement=placement).params.layers.down, whole.layers.down
    )
    answer["bytes of int8"] = [placement.bytes_per_device(params), sum(leaf.nbytes for leaf in jax.tree.leaves(params))]
    matrices = params.embedding, params.layers.qkv, params.layers.attention_out, params.layers.gate_up, params.layers.down
    answer["parts of int8"] = [
        [matrix.values.shape, matrix.values.addressable_shards[0].data.shape, matrix.scales.addressable_shards[0].data.shape]
        for matrix in matrices
    ]
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
