"""SmolLM2-135M-Instruct, the real model that the tests share: its GGUF on disk, fetched once."""

from pathlib import Path

from jserve.weights.fetch import locate


def smollm2_gguf() -> Path:
    """Path of the GGUF, in the cache that `jserve serve` uses too."""
    return locate("smollm2-135m", Path.home() / ".cache" / "jserve")
