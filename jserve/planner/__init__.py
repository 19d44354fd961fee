"""Predicts a deployment before it is rented: memory, step times, chunks, buckets.  Pure arithmetic, no device, no jax.

`devices` and `shapes` are the facts, `roofline` the time of a step, `capacity` the memory, `plan` puts them together.
"""
