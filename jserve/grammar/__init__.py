"""Structured output: what a client asks for, compiled to a grammar over the model's own tokens, and followed token by token.

Built on llguidance; knows no array library but numpy, no scheduler and no device.
"""

from jserve.grammar.compiler import Grammar, GrammarCompiler
from jserve.grammar.matcher import Matcher

__all__ = ["Grammar", "GrammarCompiler", "Matcher"]
