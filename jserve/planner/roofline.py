"""The least time that a step can take: bytes over bandwidth or operations over matrix rate, whichever is more.

Conventions, those of the source document: a step reads all weights once and the KV of every row's context once; a
token costs two operations a matrix parameter, and its attention 4 x heads x head_dim a token that it looks at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jserve.parallel.split import stored_kv_heads
from jserve.planner.devices import DeviceSpec
from jserve.planner.shapes import ModelShape

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8": 1}
KV_BYTES_OF = {**BYTES_OF, "f32": 4, "bf16": 2, "f16": 2, "fp8": 1}
"""By the names that `serve --kv-dtype` takes, too.  The 2 bytes a scale of 8-bit pools on CPU are left out."""


@dataclass(frozen=True)
class StepCost:
    """One step on one device; `seconds` is the lower bound."""

    bytes: float
    flops: float
    seconds: float


@dataclass(frozen=True)
class Roofline:
    """Step times of a model on `tensor_parallel_size` devices that share every layer."""

    model: ModelShape
    device: DeviceSpec
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    tensor_parallel_size: int = 1
    compute_efficiency: float = 1.0
    """Share of the matrix rate that is reached."""
    bandwidth_efficiency: float = 1.0
    """Share of the memory bandwidth that is reached."""
    overhead_s: float = 0.0
    """What every step costs besides."""

    @property
    def weight_bytes(self) -> int:
        """Of the whole model."""
        return self.model.num_parameters * BYTES_OF[self.dtype]

    @property
    def weight_bytes_per_device(self) -> float:
        """Kv heads of which there are fewer than devices are on several of them."""
        model, devices = self.model, self.tensor_parallel_size
        repeated = stored_kv_heads(model.num_kv_heads, devices) - model.num_kv_heads
        more = model.num_layers * 2 * repeated * model.head_dim * model.d_model
        return (self.weight_bytes + more * BYTES_OF[self.dtype]) / devices

    @property
    def kv_bytes_per_token(self) -> tuple[int, ...]:
        """Of each layer group, on one device: both halves of what the pool stores, its padding included."""
        heads = stored_kv_heads(self.model.num_kv_heads, self.tensor_parallel_size) // self.tensor_parallel_size
        one_layer = heads * stored_width(self.device.platform, self.model.head_dim) * KV_BYTES_OF[self.kv_dtype]
        return tuple(group.num_layers * one_layer for group in self.model.groups)

    def step(self, num_scheduled: np.ndarray, past: np.ndarray, num_tokens: int | None = None) -> StepCost:
        """A step that computes `num_scheduled[i]` tokens of row i, behind `past[i]` computed ones.

        Args:
          num_tokens: tokens of the compiled step, padding included; None: no padding.
        """
        granted = np.asarray(num_scheduled, float)
        past = np.asarray(past, float)
        end = past + granted
        model, devices = self.model, self.tensor_parallel_size
        count = float(granted.sum()) if num_tokens is None else num_tokens
        flops = 2 * model.matrix_parameters * count + 2 * model.vocab_size * model.d_model * len(granted)
        moved = self.weight_bytes_per_device
        for group, bytes_per_token in zip(model.groups, self.kv_bytes_per_token):
            seen = _tokens_seen(end, group.window) - _tokens_seen(past, group.window)
            flops += 4 * model.num_heads * model.head_dim * group.num_layers * float(seen.sum())
            read = end if group.window is None else np.minimum(past, group.window) + granted
            moved += bytes_per_token * float(read.sum())
        flops /= devices
        seconds = max(
            flops / (self.device.flops_per_s * self.compute_efficiency),
            moved / (self.device.bytes_per_s * self.bandwidth_efficiency),
        )
        return StepCost(moved, flops, seconds + self._exchange_s(count) + self.overhead_s)

    def prefill(self, num_tokens: int, past: int = 0) -> StepCost:
        """A chunk of one prompt, alone."""
        return self.step(np.array([num_tokens]), np.array([past]))

    def decode(self, batch: int, context: int) -> StepCost:
        """A step of `batch` rows of one token, each of which reads `context` tokens."""
        return self.step(np.ones(batch), np.full(batch, context - 1))

    @property
    def balanced_tokens(self) -> int:
        """Tokens from which a step is bound by arithmetic, not by reading the weights."""
        rate = self.device.flops_per_s * self.compute_efficiency
        return int(rate * BYTES_OF[self.dtype] / 2 / (self.device.bytes_per_s * self.bandwidth_efficiency))

    def _exchange_s(self, num_tokens: float) -> float:
        """Two sums over all devices a layer, their bytes alone."""
        devices, model = self.tensor_parallel_size, self.model
        if devices == 1 or not self.device.link_bytes_per_s:
            return 0.0
        one_sum = num_tokens * model.d_model * BYTES_OF[self.dtype] * 2 * (devices - 1) / devices
        return 2 * model.num_layers * one_sum / self.device.link_bytes_per_s


def stored_width(platform: str, head_dim: int) -> int:
    """Numbers that the pool stores for one token and head, key and value, padded as the kernels' layout pads them."""
    if platform == "tpu":
        return 128 if head_dim <= 64 else 2 * 128 * -(-head_dim // 128)
    if platform == "gpu":
        unit = 64 if head_dim <= 64 else 128
        return 2 * unit * -(-head_dim // unit)
    return 2 * head_dim


def _tokens_seen(length: np.ndarray, window: int | None) -> np.ndarray:
    """Tokens that positions 0 .. length - 1 look at in sum, the half of each one's own left out: length^2 / 2."""
    if window is None:
        return length**2 / 2
    inside = np.minimum(length, window)
    return inside**2 / 2 + (length - inside) * window
