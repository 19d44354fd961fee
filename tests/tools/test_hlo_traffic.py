"""tools/hlo_traffic.py on programs small enough to count by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tools import hlo_traffic

KIB = 1024
HEAD = "HloModule step, is_scheduled=true\n\n"
LOOP = """%body (carry: (s32[], f32[256])) -> (s32[], f32[256]) {
  %carry = (s32[], f32[256]{0}) parameter(0)
  %index = s32[] get-tuple-element(%carry), index=0
  %values = f32[256]{0} get-tuple-element(%carry), index=1
  %doubled = f32[256]{0} add(%values, %values)
  ROOT %next = (s32[], f32[256]{0}) tuple(%index, %doubled)
}

%condition (carry.1: (s32[], f32[256])) -> pred[] {
  %carry.1 = (s32[], f32[256]{0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (first: (s32[], f32[256])) -> (s32[], f32[256]) {
  %first = (s32[], f32[256]{0}) parameter(0)
  ROOT %loop = (s32[], f32[256]{0}) while(%first), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"32"}}
}
"""
UPDATE = """%fused (param_1: bf16[1024,64], param_0: bf16[1,64], row: s32[]) -> bf16[1024,64] {
  %param_0 = bf16[1,64]{1,0} parameter(1)
  %param_1 = bf16[1024,64]{1,0} parameter(0)
  %row = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %updated = bf16[1024,64]{1,0} dynamic-update-slice(%param_1, %param_0, %row, /*index=3*/%zero)
}

%taken (table: bf16[1024,64], row.1: s32[]) -> bf16[1,64] {
  %table = bf16[1024,64]{1,0} parameter(0)
  %row.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  ROOT %one = bf16[1,64]{1,0} dynamic-slice(%table, %row.1, %zero.1), dynamic_slice_sizes={1,64}
}

ENTRY %main (pool: bf16[1024,64], new: bf16[1,64], at: s32[]) -> bf16[1,64] {
  %pool = bf16[1024,64]{1,0} parameter(0)
  %new = bf16[1,64]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %written = bf16[1024,64]{1,0} fusion(%pool, %new, %at), kind=kLoop, calls=%fused
  %kernel = (bf16[1024,64]{1,0}, f32[64]{0}) custom-call(%written, %new), custom_call_target="tpu_custom_call", output_to_operand_aliasing={{0}: (0, {})}
  ROOT %row.2 = bf16[1,64]{1,0} fusion(%written, %at), kind=kLoop, calls=%taken
}
"""
VECTOR_MEMORY = """ENTRY %main (weights: bf16[8,128]) -> bf16[8,128] {
  %weights = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %start = (bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, bf16[8,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%weights)
  %here = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%start)
  ROOT %sum = bf16[8,128]{1,0:T(8,128)(2,1)} add(%here, %here)
}
"""


def test_a_loop_counts_as_often_as_it_runs():
    assert hlo_traffic.moved_bytes(HEAD + LOOP) == {"add": 32 * 3 * KIB}
    assert hlo_traffic.moved_bytes(HEAD + LOOP, trips=False) == {"add": 3 * KIB}
    assert hlo_traffic.loops_of_unknown_length(LOOP) == 0
    untold = LOOP.replace("known_trip_count", "")
    assert hlo_traffic.loops_of_unknown_length(untold) == 1
    assert hlo_traffic.moved_bytes(HEAD + untold.replace("pred[] constant(true)", "s32[] constant(32)")) == {"add": 32 * 3 * KIB}


def test_what_is_updated_in_place_or_looked_up_counts_as_its_part():
    moved = hlo_traffic.moved_bytes(HEAD + UPDATE, kept_elements=1024 * 64)
    assert moved == {"written": 128 + 4 + 128, "row": 128 + 4 + 128, "tpu_custom_call": 128 + 256}, "the pool is the kernel's"


def test_only_what_leaves_the_core_counts():
    assert hlo_traffic.moved_bytes(HEAD + VECTOR_MEMORY) == {"copy-start": 2 * KIB, "add": 2 * KIB}
    assert hlo_traffic.moved_bytes(HEAD + VECTOR_MEMORY, every_memory=True).total() > 4 * KIB


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_agrees_with_a_compiler_that_tells(dtype):
    """Of a product that the compiler makes as it is: its operands and its result."""
    a, b = jax.ShapeDtypeStruct((256, 512), dtype), jax.ShapeDtypeStruct((512, 128), dtype)
    compiled = jax.jit(lambda a, b: jnp.tanh(a) @ b).lower(a, b).compile()
    moved = hlo_traffic.moved_bytes(compiled.as_text()).total()
    cost = compiled.cost_analysis()
    assert moved == pytest.approx(cost["bytes accessed"] if isinstance(cost, dict) else cost[0]["bytes accessed"], rel=0.05)


@pytest.mark.parametrize(("element", "bits"), [("pred", 8), ("s4", 4), ("f8e4m3fn", 8), ("bf16", 16), ("f64", 64), ("token", 0)])
def test_bits(element, bits):
    assert hlo_traffic.bits_of(element) == bits
