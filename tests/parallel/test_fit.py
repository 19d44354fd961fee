"""What does not divide or does not fit is refused with the numbers, before weights are read and before a compiler starts."""

from __future__ import annotations

import dataclasses

import pytest

from jserve.config import ConfigError
from jserve.engine import build
from jserve.parallel import split
from jserve.weights import load
from jserve.weights.checkpoint import open_checkpoint
from tests.support.engines import config_for
from tests.support.tiny_models import random_gguf


@dataclasses.dataclass(frozen=True)
class Devices:
    """As many devices of a kind as a test likes, where nothing is placed on them."""

    platform: str
    device_kind: str
    bytes_limit: int

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.bytes_limit}


@pytest.mark.parametrize(
    "size, heads, kv_heads, d_ff, reason",
    [
        (8, 32, 8, 14336, None),
        (8, 64, 4, 25600, None),  # two devices keep each kv head
        (8, 9, 3, 1536, "9 heads and an ffn of 1536 must both divide by it"),
        (3, 9, 3, 1535, "9 heads and an ffn of 1535 must both divide by it"),
        (4, 12, 6, 64, "6 kv heads neither divide by it nor divide it"),
        (0, 9, 3, 1536, "must be at least 1"),
    ],
)
def test_which_sizes_divide(size, heads, kv_heads, d_ff, reason):
    assert split.why_not(size, num_heads=heads, num_kv_heads=kv_heads, d_ff=d_ff) == reason


def test_an_engine_refuses_before_it_reads_weights(tmp_path, monkeypatch):
    path = random_gguf(tmp_path / "model.gguf", num_heads=3)
    monkeypatch.setattr(load, "load_params", None)
    monkeypatch.setattr(build.jax, "local_devices", lambda: [Devices("cpu", "cpu", 0)] * 8)
    with pytest.raises(ConfigError, match="parallel.tensor_parallel_size = 2: 3 heads and an ffn of 128 must both divide"):
        build.build_engine(config_for(path, parallel={"tensor_parallel_size": 2}))


def test_an_accelerator_too_small_for_the_weights_is_refused_with_the_numbers(tmp_path, monkeypatch):
    path = random_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr(load, "load_params", None)
    monkeypatch.setattr(build.jax, "local_devices", lambda: [Devices("gpu", "NVIDIA H200", 2**20)])
    with pytest.raises(ConfigError, match=r"holds no block of [\d,]+ bytes .*0.00 GiB usable - weights 0.00 GiB"):
        build.build_engine(config_for(path, kv={"memory_bytes": None}, model={"path": str(path)}))
    assert open_checkpoint(path)  # the file is sound
