"""From what a client asks to the token that is drawn.

`validate` (no jax) turns SamplingParams into Sampling or refuses; `sampler` and `prompt_scores` are the device side.
Nothing is imported here, so that the validator never pulls jax in.
"""
