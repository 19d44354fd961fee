"""jserve: a serving engine for large language models on JAX.

`from jserve import LLM, SamplingParams` is the offline API.  Names load on first use, so `import jserve` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jserve.config import Config, ConfigError
    from jserve.llm import LLM
    from jserve.request import RequestError, SamplingParams
    from jserve.results import CompletionOutput, RequestOutput

__version__ = "0.1.0"

_HOMES = {
    "LLM": "jserve.llm",
    "RequestOutput": "jserve.results",
    "CompletionOutput": "jserve.results",
    "SamplingParams": "jserve.request",
    "RequestError": "jserve.request",
    "Config": "jserve.config",
    "ConfigError": "jserve.config",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'jserve' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__():
    return sorted(__all__)
