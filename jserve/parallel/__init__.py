"""Tensor parallelism: which devices share a model, and how its arrays and programs are split over them.

`split` is the arithmetic (no jax), `placement` the arrays and programs.
"""
