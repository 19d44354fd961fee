"""Several devices give what one gives.  Each in a process of its own: the number of CPU devices is fixed when jax starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jserve.config import ConfigError
from jserve.engine.build import build_engine
from tests.support.engines import config_for
from tests.support.tiny_models import random_gguf

HERE = Path(__file__).parent


def on_four_devices(script: str, *arguments: str) -> dict:
    root = HERE.parents[1]
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(root),
    }
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# Kv heads of four query heads -> engines: tensor_parallel_size / preemption / quantization.
ENGINES = {
    4: ("1/swap", "4/swap"),
    2: ("1/recompute", "2/swap", "4/swap"),  # four devices: two keep each kv head
    1: ("1/recompute/int8", "4/recompute/int8"),
}


@pytest.mark.parametrize("num_kv_heads", ENGINES)
def test_as_many_devices_as_one_likes_give_the_same_tokens(tmp_path, num_kv_heads):
    """Greedy, drawn, shaped, structured and scored requests and beams, with prefix hits and preemption of both kinds."""
    names = ENGINES[num_kv_heads]
    alone, *together = on_four_devices("engine_on_devices.py", str(tmp_path), str(num_kv_heads), *names).values()
    for name, answer in zip(names[1:], together, strict=True):
        size = int(name[0])
        assert answer["devices"] == size
        assert answer["tokens"] == alone["tokens"] and answer["texts"] == alone["texts"]
        assert answer["num_preemptions"] > 5 and answer["prefix_hits"] > 0
        assert (answer["num_swaps"] > 5) == ("swap" in name)
        stored = max(num_kv_heads, size)
        assert answer["parts"]["pool"][2] == stored // size, "kv heads of the pool that a device has"
        assert answer["parts"]["qkv"] == [(4 + 2 * stored) * 32 // size, 64]
        assert answer["parts"]["down"] == [64, 128 // size]


def test_every_format_is_restored_into_its_parts(tmp_path):
    answer = on_four_devices("weights_on_devices.py", str(tmp_path))
    assert answer["formats agree, None"] and answer["formats agree, int8"] and answer["columns in order"]
    assert answer["a layer at a time, None"] and answer["a layer at a time, int8"]
    on_one_device, together = answer["bytes of int8"]
    assert together / 4 < on_one_device < together / 3, "norms, and scales of matrices split along their rows, are whole"
    embedding, qkv, attention_out, gate_up, down = answer["parts of int8"]
    assert embedding == [[512, 64], [128, 64], [128]]
    assert qkv == [[2, 3 * 128, 64], [2, 96, 64], [2, 96]], "a query head, and a key and a value that two devices keep"
    assert attention_out == [[2, 64, 128], [2, 64, 32], [2, 64]]
    assert gate_up == [[2, 256, 64], [2, 64, 64], [2, 64]]
    assert down == [[2, 64, 128], [2, 64, 32], [2, 64]]


def test_more_devices_than_there_are_are_refused_by_name(tmp_path):
    path = random_gguf(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"parallel.tensor_parallel_size = 9: this machine has \d cpu devices"):
        build_engine(config_for(path, parallel={"tensor_parallel_size": 9}))
    with pytest.raises(ConfigError, match=r"parallel.tensor_parallel_size = 0: must be at least 1"):
        build_engine(config_for(path, parallel={"tensor_parallel_size": 0}))
