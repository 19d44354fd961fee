"""`bench kernels`: what must be read and computed is counted, and a run gives every point."""

from __future__ import annotations

import json

import pytest

from jserve.bench.kernels import render, work
from jserve.cli import main as cli
from pallas_kernels.paged_attention.cases import case


def test_bytes_and_operations_that_a_layer_cannot_avoid():
    """SmolLM2: 9 heads, 3 kv heads of 64."""
    decode = case("d", "smollm2-135m", [100, 50], decode_only=True)
    assert work(decode, 4) == (150 * 2 * 3 * 64 * 4, 4 * 150 * 9 * 64)
    chunk = case("c", "smollm2-135m", chunks=[(10, 4)])
    assert work(chunk, 2) == (14 * 2 * 3 * 64 * 2, 4 * (11 + 12 + 13 + 14) * 9 * 64)
    window = case("w", "gpt-oss-20b-local", [1000], decode_only=True)
    assert work(window, 2) == (128 * 2 * 8 * 64 * 2, 4 * 128 * 64 * 64)


def test_a_run_gives_every_point(capsys):
    pytest.importorskip("jax")
    flags = ["--batch", "2", "--context", "20", "--chunk", "16", "--layers", "2", "--repeats", "2"]
    assert cli.main(["bench", "kernels", *flags, "--implementation", "xla,reference", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(point["kind"], point["implementation"]) for point in answer["points"]] == [
        ("decode", "xla"), ("decode", "reference"), ("chunk", "xla"), ("chunk", "reference")
    ]
    assert all(point["ms_per_layer"] > 0 and point["kv_gb_per_s"] > 0 for point in answer["points"])
    assert answer["copy_gb_per_s"] > 0 and answer["mode"] == "kernels"
    assert render(answer).startswith("no accelerator here: ") and "no accelerator" not in render(answer | {"device": "TPU v4"})


@pytest.mark.parametrize("flags, code, message", [
    (["--implementation", "best"], 2, "expected some of reference"),
    (["--heads", "gpt-9"], 2, "invalid choice"),
    (["--implementation", "mosaic_tpu", "--batch", "1", "--chunk", "16"], 1, ""),
])
def test_what_cannot_be_measured_is_one_line(capsys, flags, code, message):
    assert cli.main(["bench", "kernels", *flags]) == code
    assert message in capsys.readouterr().err
