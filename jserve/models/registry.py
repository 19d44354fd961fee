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
    if config.sliding_window is not None and config.sliding_window < config.context_length:
        raise ModelError(
            f"sliding_window = {config.sliding_window} is shorter than the context of {config.context_length}: windows "
            f"are not built yet (a context_length of {config.sliding_window} or less needs none)"
        )
    match config.family:
        case "llama":
            return llama
        case _:
            raise ModelError(f"family = {config.family!r}: no code runs it")
