"""A Tokenizer from a Hugging Face model folder: tokenizer.json, tokenizer_config.json, the chat template.

The pipeline, and whether BOS or EOS is added, are tokenizer.json's own; tokenizer_config.json names special tokens.
(transformers 5 reads them so too, except that it rebuilds the pipeline of some families from its own idea of it.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from jserve.tokenizer.backend import component_state
from jserve.tokenizer.chat_template import ChatTemplate
from jserve.tokenizer.token_table import TokenizerError, build_table, spelling_of
from jserve.tokenizer.tokenizer import SpecialRules, Tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def from_folder(path: str | Path) -> Tokenizer:
    """The tokenizer of a model folder.  TokenizerError names the file that is missing or wrong."""
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{file} is missing" + _what_lies_there_instead(folder))
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{file} cannot be read: {error}") from None
    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
    _make_special(backend, [*named.values(), *_extra_special_tokens(config)])
    try:
        spelling = spelling_of(component_state(backend.decoder))
    except TokenizerError as error:
        raise TokenizerError(f"{file}: {error}") from None
    added = backend.get_added_tokens_decoder()
    table = build_table(
        backend.get_vocab(with_added_tokens=True),
        {token_id: token.content for token_id, token in added.items()},
        frozenset(token_id for token_id, token in added.items() if token.special),
        spelling,
    )
    return Tokenizer(backend, table, _special_rules(backend, named), _chat_template(folder, config, named))


def _special_rules(backend: tokenizers.Tokenizer, named: Mapping[str, str]) -> SpecialRules:
    bos, eos = (backend.token_to_id(named[name]) if name in named else None for name in ("bos_token", "eos_token"))
    prefix, suffix = _put_around_by_post_processor(backend)
    return SpecialRules(bos, frozenset() if eos is None else frozenset((eos,)), prefix, suffix)


def _put_around_by_post_processor(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    bare = backend.encode("a", add_special_tokens=False).ids
    around = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(around) - len(bare) + 1):
        if around[start : start + len(bare)] == bare:
            return tuple(around[:start]), tuple(around[start + len(bare) :])
    raise TokenizerError(f"the post-processor of tokenizer.json does more than put ids around a text")


def _named_tokens(config: Mapping) -> dict[str, str]:
    """bos_token, eos_token, ... as text, as far as they are given."""
    texts = {name: _token_text(config.get(name)) for name in _NAMED_TOKENS}
    return {name: text for name, text in texts.items() if text}


def _extra_special_tokens(config: Mapping) -> list[str]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    declared = [token for token in (config.get("added_tokens_decoder") or {}).values() if token.get("special")]
    texts = map(_token_text, [*(extra.values() if isinstance(extra, Mapping) else extra), *declared])
    return [text for text in texts if text]


def _token_text(token: str | Mapping | None) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token


def _make_special(backend: tokenizers.Tokenizer, texts: list[str]) -> None:
    """Marks tokens of the vocabulary as special.  A text outside the vocabulary has no row in the model: left out."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    new = [text for text in dict.fromkeys(texts) if text not in special and backend.token_to_id(text) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in new])


def _chat_template(folder: Path, config: Mapping, named: Mapping[str, str]) -> ChatTemplate | None:
    sources: dict[str, str] = {}
    written = config.get("chat_template")
    if isinstance(written, str):
        sources["default"] = written
    elif isinstance(written, list):
        sources |= {entry["name"]: entry["template"] for entry in written}
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = file.read_text(encoding="utf-8")
    if (file := folder / "chat_template.jinja").is_file():
        sources["default"] = file.read_text(encoding="utf-8")
    if "default" not in sources:
        return None
    return ChatTemplate(sources["default"], named, sources.get("tool_use"))


def _read_json(file: Path) -> dict:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from None


def _what_lies_there_instead(folder: Path) -> str:
    if not folder.is_dir():
        return f": {folder} is not a folder"
    others = [name for name in ("tokenizer.model", "vocab.json", "tiktoken.model") if (folder / name).is_file()]
    if not others:
        return ""
    return f" ({others[0]} alone is not built yet; save the tokenizer once with transformers' save_pretrained)"
