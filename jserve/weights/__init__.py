"""Checkpoints into parameters: `fetch` finds one, `checkpoint` opens it, `load` fills a model's spec tree from it.

`gguf` and `safetensors` turn their file formats into the same `StoredTensor`s under HF's names.
"""
