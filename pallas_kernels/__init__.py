"""Kernels of jserve, one folder per op: `api`, `reference` (obvious, slow), `xla`, `mosaic_tpu`, `mosaic_gpu`, `cases`.

Imports jax only and knows nothing of requests, models or schedulers.  Called by model code and by the runner.
"""
