"""The GPU kernels and whole steps through the real GPU compilers (XLA, Mosaic GPU, ptxas).  Nothing runs.

One subprocess a target (tools/gpu_report.py): Mosaic GPU keeps kernels by their source, whatever the target.  Asserted besides
acceptance: the PTX target and the instructions, no spills, registers and shared memory within the card's limits, the pool
aliased to the byte, temporaries far smaller than it, no copy of its shape.
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
KERNELS = (
    "llama3-8b", "smollm2-135m", "gpt-oss-20b-local", "phi3-mini", "llama3-70b-tp8", "gemma3-12b-local",
    "llama3-8b-int8", "llama3-8b-fp8", "gemma3-12b-int8",
)  # fmt: skip
B200_KERNELS = ("llama3-8b", "llama3-8b-fp8")
MORE_KERNELS = (
    "llama3-8b-tp8", "qwen3-30b-a3b", "heads-of-80-capped", "falcon-7b", "llama3-8b-float16", "smollm2-135m-fp8",
    "gemma3-12b-fp8",
)  # fmt: skip
MORE_B200_KERNELS = ("smollm2-135m", "gpt-oss-20b-local", "phi3-mini", "llama3-70b-tp8", "falcon-7b", "llama3-8b-int8")
TRITON_KERNELS = ("llama3-8b", "smollm2-135m", "gemma3-12b-local")
MORE_TRITON_KERNELS = (
    "llama3-8b-float16", "heads-of-80-capped", "phi3-mini", "gpt-oss-20b-local", "llama3-70b-tp8", "qwen3-30b-a3b", "falcon-7b",
)  # fmt: skip
MIB = 1 << 20
REGISTERS_PER_CORE = 65536
SHARED_BYTES_PER_CORE, RESERVED_PER_PROGRAM = 228 * 1024, 1024
"""Of Hopper."""

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not targets.has_gpu_compiler(), reason="needs jax's CUDA plugin: pip install jserve[compile]"),
    pytest.mark.xdist_group("gpu"),
]


@functools.cache
def reports(*arguments: str) -> dict[str, dict]:
    command = [sys.executable, str(ROOT / "tools" / "gpu_report.py"), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert finished.returncode == 0, finished.stderr[-3000:]
    lines = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    return {report["program"]: report for report in lines}


def h100_kernels() -> dict[str, dict]:
    return reports("h100", *(f"{name}/mixed" for name in KERNELS), "llama3-8b/decode_1", "llama3-8b/decode_256")


def assert_pool_stays(report: dict) -> None:
    assert report["alias_bytes"] == report["pool_bytes"]
    assert report["pool_copies"] == 0


def assert_good_kernel(kernel: dict, target: str = "h100") -> None:
    assert kernel["ptx_target"] == targets.GPU_TARGETS[target].ptx_target
    assert kernel["tma"] > 0
    assert kernel["tcgen05" if target == "b200" else "wgmma"] > 0
    assert kernel["spill_bytes"] == kernel["stack_bytes"] == 0
    assert kernel["warnings"] == []
    assert kernel["registers"] * kernel["threads"] <= REGISTERS_PER_CORE
    assert kernel["shared_bytes"] <= targets.GPU_TARGETS[target].shared_bytes_per_block


def programs_a_core(kernel: dict) -> int:
    by_shared_memory = SHARED_BYTES_PER_CORE // (kernel["shared_bytes"] + RESERVED_PER_PROGRAM)
    registers = -(-kernel["registers"] // 8) * 8  # granted in steps of 8 a thread
    return min(by_shared_memory, REGISTERS_PER_CORE // (registers * kernel["threads"]))


@pytest.mark.parametrize("name", KERNELS)
def test_mixed_step(name):
    report = h100_kernels()[f"{name}/mixed"]
    assert [kernel["name"] for kernel in report["kernels"]] == ["jserve_chunks", "jserve_decode"]
    for kernel in report["kernels"]:
        assert_good_kernel(kernel)
    if not name.startswith("gemma3"):  # heads of 256 take twice the room
        assert programs_a_core(report["kernels"][1]) >= 2, "one program's softmax should hide behind another's copies"
    assert_pool_stays(report)
    assert report["temporary_bytes"] < report["pool_bytes"] / 8


@pytest.mark.parametrize("bucket", ["decode_1", "decode_256"])
def test_decode_step(bucket):
    report = h100_kernels()[f"llama3-8b/{bucket}"]
    assert [kernel["name"] for kernel in report["kernels"]] == ["jserve_decode"]
    assert_good_kernel(report["kernels"][0])
    assert_pool_stays(report)
    assert report["temporary_bytes"] < 32 * MIB, "partial results of the splits"


def test_h200_takes_the_same_kernels():
    report = reports("h200", "llama3-8b/mixed")["llama3-8b/mixed"]
    for kernel in report["kernels"]:
        assert_good_kernel(kernel)
    assert_pool_stays(report)


@pytest.mark.parametrize("name", B200_KERNELS)
def test_mixed_step_on_blackwell(name):
    report = reports("b200", *(f"{name}/mixed" for name in B200_KERNELS))[f"{name}/mixed"]
    assert [kernel["name"] for kernel in report["kernels"]] == ["jserve_chunks", "jserve_decode"]
    for kernel in report["kernels"]:
        assert_good_kernel(kernel, "b200")
    assert_pool_stays(report)


def assert_good_triton_kernels(report: dict, target: str) -> None:
    assert [kernel["name"] for kernel in report["kernels"]] == ["jserve_triton_chunks", "jserve_triton_decode"]
    gpu = targets.GPU_TARGETS[target]
    for kernel in report["kernels"]:
        assert kernel["ptx_target"] == gpu.ptx_target
        assert kernel["spill_bytes"] == kernel["stack_bytes"] == 0
        assert kernel["registers"] * kernel["threads"] <= REGISTERS_PER_CORE
        assert (kernel["shared_bytes"] or 0) <= gpu.shared_bytes_per_block
        if target in ("a100", "l4"):
            assert kernel["mma"] > 0 and kernel["cp_async"] > 0
    assert_pool_stays(report)
    assert report["temporary_bytes"] < report["pool_bytes"] / 8


@pytest.mark.parametrize("target", ["a100", "l4"])
@pytest.mark.parametrize("name", TRITON_KERNELS)
def test_mixed_step_by_triton(name, target):
    report = reports(target, *(f"{name}/mixed" for name in TRITON_KERNELS))[f"{name}/mixed"]
    assert_good_triton_kernels(report, target)


def test_heads_of_256_on_blackwell_go_to_triton():
    assert_good_triton_kernels(reports("b200", "gemma3-12b-local/mixed")["gemma3-12b-local/mixed"], "b200")


@pytest.mark.soak
@pytest.mark.parametrize("target", ["a100", "l4"])
@pytest.mark.parametrize("name", MORE_TRITON_KERNELS)
def test_more_shapes_by_triton(name, target):
    report = reports(target, *(f"{name}/mixed" for name in MORE_TRITON_KERNELS))[f"{name}/mixed"]
    assert_good_triton_kernels(report, target)


@pytest.mark.parametrize("name", ["copy", "scatter", "gather"])
def test_block_copies_by_xla(name):
    """A loop moves 16 blocks of all layers, one at a time through a temporary: the pool of 256 stays where it is."""
    report = reports("h100", *(f"block_copy/{name}" for name in ("copy", "scatter", "gather")))[f"block_copy/{name}"]
    assert report["alias_bytes"] == (0 if name == "gather" else report["pool_bytes"])
    assert report["pool_copies"] == 0
    assert report["temporary_bytes"] < report["pool_bytes"] / 256 + 4096


@pytest.mark.soak
@pytest.mark.parametrize("name", MORE_KERNELS)
def test_more_shapes(name):
    report = reports("h100", *(f"{name}/mixed" for name in MORE_KERNELS))[f"{name}/mixed"]
    for kernel in report["kernels"]:
        assert_good_kernel(kernel)
    assert_pool_stays(report)


@pytest.mark.soak
@pytest.mark.parametrize("name", MORE_B200_KERNELS)
def test_more_shapes_on_blackwell(name):
    report = reports("b200", *(f"{name}/mixed" for name in MORE_B200_KERNELS))[f"{name}/mixed"]
    for kernel in report["kernels"]:
        assert_good_kernel(kernel, "b200")
    assert_pool_stays(report)


# Temporaries of the largest bucket: the ffn's activations of 2,048 tokens and 64 rows of logits.
LARGEST_TEMPORARIES = {"smollm2-135m": 128 * MIB, "llama3-8b": 512 * MIB}


def assert_good_step(report: dict, target: str, model: str, bucket: str) -> None:
    assert_pool_stays(report)
    assert report["temporary_bytes"] < (32 * MIB if bucket == "smallest" else LARGEST_TEMPORARIES[model])
    assert report["argument_bytes"] < targets.GPU_TARGETS[target].memory_bytes, "this compiler refuses nothing"
    kind = "jserve_triton" if target in ("a100", "l4") else "jserve"
    names = {kernel["name"] for kernel in report["kernels"]}
    assert names == ({f"{kind}_decode"} if bucket == "smallest" else {f"{kind}_decode", f"{kind}_chunks"})
    for kernel in report["kernels"]:
        assert kernel["spill_bytes"] == kernel["stack_bytes"] == 0
        if kind == "jserve":
            assert_good_kernel(kernel, target)


@pytest.mark.parametrize("model", LARGEST_TEMPORARIES)
@pytest.mark.parametrize("bucket", ["smallest", "largest"])
def test_whole_step(model, bucket):
    assert_good_step(reports("h100", "--step", model)[f"{model}/{bucket}"], "h100", model, bucket)


@pytest.mark.soak
@pytest.mark.parametrize(("target", "model"), [
    ("h200", "smollm2-135m"), ("h200", "llama3-8b"), ("a100", "smollm2-135m"), ("l4", "smollm2-135m"),
])  # fmt: skip
@pytest.mark.parametrize("bucket", ["smallest", "largest"])
def test_whole_step_on_more_cards(target, model, bucket):
    assert_good_step(reports(target, "--step", model)[f"{model}/{bucket}"], target, model, bucket)
