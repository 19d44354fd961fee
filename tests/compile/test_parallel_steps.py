"""Whole steps split over eight devices, through the real TPU and GPU compilers: the engine's own programs and memory plan.

A subprocess each (tools/step_report.py).  Asserted: the pool aliased to the byte, no copy of it or of a weight stack,
temporaries bounded, the collectives that the split needs and no others, an eighth of everything on each device.  What
cannot fit is refused with the numbers before a compiler starts.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import targets

ROOT = Path(__file__).resolve().parents[2]
MIB, GIB = 1 << 20, 1 << 30
pytestmark = pytest.mark.compile
needs_tpu = pytest.mark.skipif(not targets.has_tpu_compiler(), reason="needs libtpu: pip install jax[tpu]")
needs_gpu = pytest.mark.skipif(not targets.has_gpu_compiler(), reason="needs jax's CUDA plugin: pip install jserve[compile]")


def report_of(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools" / "step_report.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=800)


@functools.cache
def steps(target: str, model: str, *more: str) -> dict[str, dict]:
    """smallest and largest forward step and the head, by those names."""
    done = report_of(target, model, "--tp", "8", *more)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(("smallest", "largest", "head"), reports, strict=True))


CASES = [
    pytest.param("v5e-8", "llama3-8b", marks=needs_tpu),
    pytest.param("v6e-8", "llama3-8b", marks=needs_tpu),
    pytest.param("tpu7x-8", "llama3-70b", marks=[needs_tpu, pytest.mark.soak]),
    pytest.param("v6e-8", "llama3-70b", "--quantize", "int8", marks=[needs_tpu, pytest.mark.soak]),
    pytest.param("h200", "llama3-70b", marks=[needs_gpu, pytest.mark.soak]),
]
CASES = [pytest.param((*case.values,), marks=case.marks, id="-".join(case.values).replace("--quantize-", "")) for case in CASES]


@pytest.mark.parametrize("case", CASES)
def test_whole_step(case):
    """`soak`: a 70B shape compiles for minutes on a GPU, where layers are unrolled."""
    reports = steps(*case)
    is_unrolled = case[0] in targets.GPU_TARGETS
    for name, report in reports.items():
        if name == "head":
            assert report["collectives"] == {"all-gather": 1}, "logits"
            continue
        copies_of_layer = report["num_layers"] if is_unrolled else 1
        assert report["collectives"] == {"all-reduce": 1 + 2 * copies_of_layer}, "embedding; attention and ffn of a layer"
        assert report["alias_bytes"] == report["pool_bytes"]
        assert report["copies"] == {}
        kept = report["pool_bytes"] + report["weight_bytes"]
        assert kept * 0.95 < report["argument_bytes"] < kept * 1.01, "the head is a program of its own"
        assert report["argument_bytes"] + report["temporary_bytes"] < report["usable_bytes"]
        assert report["temporary_bytes"] < (32 * MIB if name == "smallest" else 512 * MIB)
        assert report["temporary_bytes"] < report["activation_bytes"], "our estimate is an upper one"


@needs_gpu
@pytest.mark.soak
@pytest.mark.parametrize("target", ["a100", "l4"])
def test_cards_without_hopper_instructions_take_triton(target):
    """Whole steps of SmolLM2, smallest bucket: still in place, and the kernel is called in every layer."""
    done = report_of(target, "smollm2-135m", "--bucket", "smallest")
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert report["attention"] == "triton" and report["kernel_calls"] == report["num_layers"]
    assert report["alias_bytes"] == report["pool_bytes"] and report["copies"] == {}
    assert report["temporary_bytes"] < 32 * MIB


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("v5e-8", "llama3-70b", "--tp", "8"), "on each of 8 devices 13.41 GiB usable - weights 16."),
        (("v5e", "llama3-8b"), "13.41 GiB usable - weights 14."),
        (("h100", "llama3-70b"), "67.06 GiB usable - weights 131."),
        (("a100", "llama3-70b", "--tp", "2"), "on each of 2 devices 67.06 GiB usable - weights 65."),
        (("l4", "llama3-70b", "--tp", "4"), "on each of 4 devices 20.12 GiB usable - weights 32."),
        (("h100", "llama3-70b", "--tp", "3"), "tensor_parallel_size = 3: 64 heads and an ffn of 28672 must both divide by it"),
    ],
    ids=["70b-v5e-8", "8b-v5e", "gpu-70b-h100", "gpu-70b-two-a100", "gpu-70b-four-l4", "gpu-three-h100"],
)
def test_what_cannot_fit_is_refused_before_a_compiler_starts(arguments, message):
    """Both compilers are spared; that for GPUs would refuse nothing."""
    if not (targets.has_gpu_compiler() if arguments[0] in targets.GPU_TARGETS else targets.has_tpu_compiler()):
        pytest.skip("needs the target's compiler, for a description of its devices")
    done = report_of(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr
