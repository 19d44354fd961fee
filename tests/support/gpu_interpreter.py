"""Steps for the GPU kernels under JAX's GPU interpreter on CPU, compared with the float32 reference.

The interpreter models TMA copies, barriers and warpgroups as threads; memory that nobody wrote is NaN, reads out of bounds
raise.  Pools come from `cases.build(poison=True)`: everything that no sequence owns is NaN.
"""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from pallas_kernels.paged_attention import mosaic_gpu, paged_attention, prepare, triton
from pallas_kernels.paged_attention.cases import Case, Inputs, build
from pallas_kernels.paged_attention.mosaic_gpu_tiles import GpuTiles

PLAIN = InterpretGPUParams()
# With one TMA thread (the default) a wait for any barrier would count as a wait for every earlier copy.
RACES = InterpretGPUParams(detect_races=True, num_tma_threads_per_device=16)
QUICK = {"xla_backend_optimization_level": 0}
LAYER, NUM_LAYERS = 1, 2


class RaceFound(AssertionError):
    """The interpreter's race detector fired."""


def make_inputs(case: Case, **options) -> Inputs:
    arguments = {"dtype": "bfloat16", "compute_dtype": "bfloat16", "num_layers": NUM_LAYERS, "poison": True}
    return build(case, "gpu", **(arguments | options))


def run_kernel(inputs: Inputs, interpret=PLAIN, tiles: GpuTiles | None = None, spec=None):
    """(out, pool) of the GPU kernels.  RaceFound if the detector fired."""
    spec = spec or inputs.case.spec

    def step(q, k, v, pool, batch, extras):
        metadata = prepare(batch, q.shape[0], inputs.layout, spec, "mosaic_gpu")
        return mosaic_gpu.attend(
            q, k, v, pool, LAYER, metadata, layout=inputs.layout, spec=spec, tiles=tiles, interpret=interpret, **extras
        )

    try:
        arguments = inputs.q, inputs.k, inputs.v, inputs.pool, inputs.batch, inputs.extras
        out, pool = jax.block_until_ready(jax.jit(step, compiler_options=QUICK)(*arguments))
        if interpret.detect_races and gpu_callbacks.get_races().races_found:
            raise RaceFound("the interpreter's race detector fired; it printed where")
    except Exception:
        gpu_callbacks.reset_gpu_interpret_mode_state()
        raise
    return out, pool


def run_reference(inputs: Inputs) -> tuple[np.ndarray, jax.Array]:
    """(out in float32, pool)."""

    def step(q, k, v, pool, batch, extras):
        metadata = prepare(batch, q.shape[0], inputs.layout, inputs.case.spec, "reference")
        options = {"layout": inputs.layout, "spec": inputs.case.spec, "implementation": "reference"}
        return paged_attention(q, k, v, pool, LAYER, metadata, **options, **extras)

    q, k, v = (x.astype(jnp.float32) for x in (inputs.q, inputs.k, inputs.v))
    out, pool = jax.jit(step, compiler_options=QUICK)(q, k, v, inputs.pool, inputs.batch, inputs.extras)
    return np.asarray(out), pool


def run_triton(inputs: Inputs, spec=None):
    """(out, pool) of the Triton kernels, interpreted program by program."""
    spec = spec or inputs.case.spec

    def step(q, k, v, pool, batch, extras):
        metadata = prepare(batch, q.shape[0], inputs.layout, spec, "triton")
        options = {"layout": inputs.layout, "spec": spec, "interpret": True}
        return triton.attend(q, k, v, pool, LAYER, metadata, **options, **extras)

    arguments = inputs.q, inputs.k, inputs.v, inputs.pool, inputs.batch, inputs.extras
    return jax.jit(step, compiler_options=QUICK)(*arguments)


def check(inputs: Inputs, tolerance: float, reference: Inputs | None = None, run=run_kernel, **options) -> None:
    """Live rows are the reference's, padding rows are 0, and the pool is bit for bit the reference's but for the dead block."""
    out, pool = run(inputs, **options)
    expected, expected_pool = run_reference(reference or inputs)
    out = np.asarray(out.astype(jnp.float32))
    assert np.isfinite(out).all(), "NaN reached an output"
    assert not out[~inputs.live].any()
    np.testing.assert_allclose(out[inputs.live], expected[inputs.live], atol=tolerance, rtol=0)
    np.testing.assert_array_equal(*(np.asarray(x).view(f"u{x.dtype.itemsize}")[:, 1:] for x in (pool, expected_pool)))


def compile_threads_once(monkeypatch) -> None:
    """The interpreter lowers and compiles a kernel for each warpgroup of each program; here once, which is 20 times quicker."""
    programs, lock = {}, threading.Lock()

    def run(jaxpr, consts, *arguments):
        with lock:
            if id(jaxpr) not in programs:
                evaluate = lambda consts, *arguments: (jax.core.eval_jaxpr(jaxpr, consts, *arguments), None)[1]
                compiled = jax.jit(evaluate).lower(consts, *arguments).compile(compiler_options=QUICK)
                programs[id(jaxpr)] = jaxpr, compiled  # the jaxpr too: its id must not be given to another
        programs[id(jaxpr)][1](consts, *arguments)

    monkeypatch.setattr(thread_map, "_run_jaxpr", run)
