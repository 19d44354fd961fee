"""What tools/compile_matrix.py calls a problem and writes into a table; what compiles is tests/compile's."""

from __future__ import annotations

import pytest

from tools import compile_matrix

GOOD = {
    "pool_bytes": 1000, "alias_bytes": 1000, "temporary_bytes": 10, "pool_copies": 0, "kernel_calls": 2,
    "kernels": [{"spill_bytes": 0, "ptx_target": "sm_90a"}],
}  # fmt: skip


def test_every_case_has_a_name_of_its_own():
    names = compile_matrix.case_names()
    assert len(names) == 42 and {dtype for _, dtype in names.values()} == {"bfloat16", *compile_matrix.TYPES}


@pytest.mark.parametrize(("change", "problem"), [
    ({}, None),
    ({"alias_bytes": 0}, "the pool is not aliased"),
    ({"pool_copies": 2}, "2 copies of the pool"),
    ({"temporary_bytes": 501}, "a pool's worth of temporaries"),
    ({"kernels": [{"spill_bytes": 16, "ptx_target": "sm_90a"}]}, "spills of 16 bytes"),
    ({"kernels": [{"spill_bytes": 0, "ptx_target": "sm_100a"}]}, "another PTX target"),
    ({"kernel_calls": 0}, "no kernel"),
])  # fmt: skip
def test_problems_are_found(change, problem):
    assert compile_matrix.problem_of(GOOD | change, "h100", "mosaic_gpu") == problem


def test_tables():
    c0, c1, *_ = compile_matrix.case_names()
    reports = [
        {"case": c0, "target": "v5e", "implementation": "mosaic_tpu", "problem": None},
        {"case": c0, "target": "l4", "implementation": "xla", "problem": None},
        {"case": c1, "target": "v5e", "problem": "spills of 16 bytes"},
        {"case": "m --tp 8", "target": "v5e-8", "programs": [], "seconds": 3, "refused": "m on v5e-8: too large"},
    ]
    assert list(compile_matrix.tables(reports)) == [
        "| case | v5e | l4 |", "|---|---|---|",
        f"| {c0} | kernel | xla |", f"| {c1} | spills of 16 bytes | not compiled |", "",
        "| model | target | program | attention | arguments | aliased (pool) | temporaries | exchanged | copies |",
        "|---|---|---|---|---|---|---|---|---|",
        "| m --tp 8 | v5e-8 | refused before the compiler: too large | | | | | | |",
    ]  # fmt: skip
