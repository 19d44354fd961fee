"""The HF `tokenizers` objects behind a Tokenizer: one that parses control tokens in text, and ones that do not.

They share one model (vocabulary, merges, cache), so the second and third cost no memory.  None of them adds BOS,
truncates or pads: `Tokenizer` does the first, nobody the others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True)
class Backend:
    """`parsing` finds control tokens in text; `plain` takes them as ordinary text; `inner` is `plain` for text that
    does not stand at the start (it differs where only the first piece gets a leading `▁`)."""

    parsing: tokenizers.Tokenizer
    plain: tokenizers.Tokenizer
    inner: tokenizers.Tokenizer


def share(parsing: tokenizers.Tokenizer) -> Backend:
    """The three views of one tokenizer.  Changes `parsing`: no post-processor, truncation or padding any more."""
    parsing.post_processor = None
    parsing.no_truncation()
    parsing.no_padding()
    plain = _plain_view(parsing)
    inner_state = _without_first_prefix(component_state(parsing.pre_tokenizer))
    if inner_state is None:
        return Backend(parsing, plain, plain)
    inner = _plain_view(parsing)
    inner.pre_tokenizer = pre_tokenizer_from_state(inner_state)
    return Backend(parsing, plain, inner)


def encode_ids(view: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    """Ids of each text.  The batch call, also for one text: it releases the GIL and computes no offsets."""
    try:
        return [encoding.ids for encoding in view.encode_batch_fast(texts, add_special_tokens=False)]
    except TypeError:
        refuse_surrogates(texts)
        raise


def encode_spans(view: tokenizers.Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and (start, end) character offsets of one text."""
    try:
        [encoding] = view.encode_batch([text], add_special_tokens=False)
    except TypeError:
        refuse_surrogates([text])
        raise
    return encoding.ids, encoding.offsets


def refuse_surrogates(texts: list[str]) -> None:
    """ValueError where a text holds half a surrogate pair (JSON can spell one; UTF-8 cannot)."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise ValueError(f"text is not valid Unicode: a lone surrogate U+{code:04X} at {error.start}") from None


def component_state(component) -> dict | None:
    """A normalizer, pre-tokenizer or decoder as tokenizer.json spells it."""
    return None if component is None else json.loads(component.__getstate__())


def pre_tokenizer_from_state(state: dict) -> tokenizers.pre_tokenizers.PreTokenizer:
    component = tokenizers.pre_tokenizers.Sequence([])
    component.__setstate__(json.dumps(state).encode())
    return component


def _plain_view(parsing: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    view = tokenizers.Tokenizer(parsing.model)
    if parsing.normalizer is not None:
        view.normalizer = parsing.normalizer
    if parsing.pre_tokenizer is not None:
        view.pre_tokenizer = parsing.pre_tokenizer
    added = parsing.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        if token.special:
            view.add_special_tokens([token])
        else:
            view.add_tokens([token])
    if view.get_added_tokens_decoder().keys() != added.keys():
        # Ids of added tokens with holes between them cannot be given again; a whole copy keeps them.
        view = tokenizers.Tokenizer.from_str(parsing.to_str())
    view.encode_special_tokens = True
    return view


def _without_first_prefix(state: dict | None) -> dict | None:
    """The pre-tokenizer for text that follows something, or None where it is the same one."""
    if state is None:
        return None
    if state["type"] == "Metaspace" and state.get("prepend_scheme") == "first":
        return {**state, "prepend_scheme": "never"}
    if state["type"] == "Sequence":
        inner = [_without_first_prefix(step) for step in state["pretokenizers"]]
        if any(inner):
            return {**state, "pretokenizers": [new or old for new, old in zip(inner, state["pretokenizers"])]}
    return None
