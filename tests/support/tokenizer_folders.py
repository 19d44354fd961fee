"""Hugging Face tokenizer folders made on the spot, of the kinds that Llama-family models are published with."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.support.texts import texts

SPECIAL = ["<unk>", "<s>", "</s>"]


def sentencepiece_folder(folder: Path, style: str, adds_bos: bool = True, **config) -> Path:
    """As Llama 2's: `▁` for blanks, bytes as fallback.  style: `legacy` puts a `▁` before every piece between control
    tokens (TinyLlama), `first` before the text only."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if style == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
        limit_alphabet=80,
        max_token_length=8,
    )
    tokenizer.train_from_iterator([" ".join(texts(300, seed=1))], trainer)
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in SPECIAL]
    described["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return _write(folder, described, adds_bos, config)


def byte_level_folder(folder: Path, adds_bos: bool = False, **config) -> Path:
    """As Llama 3's: byte-level, control tokens outside the model's own vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False, max_token_length=8)
    tokenizer.train_from_iterator([" ".join(texts(300, seed=1))], trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return _write(folder, json.loads(tokenizer.to_str()), adds_bos, config)


def tiny_byte_level_tokenizer(folder: Path, vocab_size: int = 96) -> None:
    """A tokenizer.json of as many single bytes, beside a tiny model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab_size]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def _write(folder: Path, described: dict, adds_bos: bool, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = {"Sequence": {"id": "A", "type_id": 0}}
    bos_id = next(token["id"] for token in described["added_tokens"] if token["content"] == "<s>")
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text] if adds_bos else [text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [bos_id], "tokens": ["<s>"]}} if adds_bos else {},
    }
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    eos = {"__type": "AddedToken", "content": "</s>", **flags}
    named = {"bos_token": "<s>", "eos_token": eos, "unk_token": "<unk>"}
    written = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(written), encoding="utf-8")
    return folder
