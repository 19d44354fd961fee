"""Bad words as token sequences: what the sampler must not complete.  Semantics of vLLM's `bad_words`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jserve.request import invalid


def token_sequences(words: Iterable[str], encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
    """The sequences of ids that spell the words: at the start of a text and after a blank.

    A word counts in the output only, and only where it is spelled in the tokens that the tokenizer gives it; the same
    letters in other tokens pass.
    """
    sequences: dict[tuple[int, ...], None] = {}  # in order, each once
    for index, word in enumerate(words):
        bare = word.lstrip() or word
        plain, spaced = tuple(encode(bare)), tuple(encode(" " + bare))
        if not plain:
            raise invalid(f"sampling_params.bad_words[{index}]", word, "the model's vocabulary cannot spell it")
        sequences[plain] = None
        if spaced[1:] != plain:  # otherwise a blank, and then the same tokens
            sequences[spaced] = None
    return tuple(sequences)
