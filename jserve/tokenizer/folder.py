"""A Tokenizer from a Hugging Face model folder: tokenizer.json or tokenizer.model, tokenizer_config.json, the template.

The pipeline, and whether BOS or EOS is added, are tokenizer.json's own; tokenizer_config.json names special tokens.
(transformers 5 reads them so too, except that it rebuilds the pipeline of some families from its own idea of it.)
Beside a tokenizer.model alone, tokenizer_config.json says the rest, by the defaults of transformers' LlamaTokenizer.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from jserve.tokenizer.backend import component_state
from jserve.tokenizer.chat_template import ChatTemplate
from jserve.tokenizer.sentencepiece_model import read_model
from jserve.tokenizer.sentencepiece_pieces import backend_of, table_of
from jserve.tokenizer.token_table import TokenizerError, build_table, spelling_of
from jserve.tokenizer.tokenizer import SpecialRules, Tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def from_folder(path: str | Path) -> Tokenizer:
    """The tokenizer of a model folder.  TokenizerError names the file that is missing or wrong."""
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        if (folder / "tokenizer.model").is_file():
            return _from_sentencepiece(folder)
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


def _from_sentencepiece(folder: Path) -> Tokenizer:
    file, config = folder / "tokenizer.model", _read_json(folder / "tokenizer_config.json")
    pieces, own = read_model(file, prefix_at_start_only=config.get("legacy") is False)
    try:
        backend = backend_of(pieces)
    except TokenizerError as error:
        raise TokenizerError(f"{file}: {error}") from None
    _add_beyond(backend, folder, config, len(pieces.texts))
    named = {**own, **_named_tokens({**_read_json(folder / "special_tokens_map.json"), **config})}
    _make_special(backend, [*named.values(), *_extra_special_tokens(config)])
    added = backend.get_added_tokens_decoder()
    table = table_of(pieces)
    beyond = {token_id: token.content.encode() for token_id, token in added.items() if token_id >= len(pieces.texts)}
    table = dataclasses.replace(
        table,
        token_bytes=(*table.token_bytes, *(beyond[token_id] for token_id in sorted(beyond))),
        special_ids=table.special_ids | {token_id for token_id, token in added.items() if token.special},
    )
    bos, eos = (backend.token_to_id(named[name]) if name in named else None for name in ("bos_token", "eos_token"))
    around = [
        (token_id,) if config.get(flag, default) and token_id is not None else ()
        for flag, default, token_id in (("add_bos_token", True, bos), ("add_eos_token", False, eos))
    ]
    rules = SpecialRules(bos, frozenset() if eos is None else frozenset((eos,)), *around)
    return Tokenizer(backend, table, rules, _chat_template(folder, config, named))


def _add_beyond(backend: tokenizers.Tokenizer, folder: Path, config: Mapping, num_pieces: int) -> None:
    """Tokens that were added behind the model's own pieces."""
    declared = {int(token_id): token for token_id, token in (config.get("added_tokens_decoder") or {}).items()}
    flat = {token_id: text for text, token_id in _read_json(folder / "added_tokens.json").items()}
    for token_id in sorted(token_id for token_id in {*declared, *flat} if token_id >= num_pieces):
        token = declared.get(token_id, {})
        text = token.get("content", flat.get(token_id))
        backend.add_tokens([tokenizers.AddedToken(text, normalized=False, special=token.get("special", False))])
        if backend.token_to_id(text) != token_id:
            raise TokenizerError(f"{folder}: added token {text!r} has id {token_id}, not the next one: not built")


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
    others = [name for name in ("vocab.json", "tiktoken.model") if (folder / name).is_file()]
    if not others:
        return ""
    return f" ({others[0]} alone is not built yet; save the tokenizer once with transformers' save_pretrained)"
