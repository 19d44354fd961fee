"""Kernels of jserve, one folder per op: `api`, `reference` (obvious, slow), `xla`, `mosaic_tpu`, `mosaic_gpu`, `triton`, `cases`.

`cpu` holds the CPU's own kernels, which Pallas does not reach.  Imports jax only (for the CPU also llvmlite, where there is
one) and knows nothing of requests, models or schedulers.  Called by model code and by the runner.
"""
