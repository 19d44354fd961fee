"""Which code runs which model family, and the refusal of what no family serves yet.

Adding a family is one module with the same three functions, one line here, and its names in `config`.
"""

from __future__ import annotations

from types import ModuleType

from jserve.models import llama
from jserve.models.config import ModelConfig, ModelError


def model_code(config: ModelConfig) -> ModuleType:
    """The module with `param_specs`, `forward` and `logits` of the config's family.

    ModelError where the config asks for what the family does not do yet.
    """
    match config.family:
        case "llama" | "qwen2" | "qwen3" | "gemma2" | "gemma3":
            return llama
        case _:
            raise ModelError(f"family = {config.family!r}: no code runs it")
