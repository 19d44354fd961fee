"""tokenizer.json folders against transformers, and what is refused."""

import json
import unicodedata

import pytest

from jserve.tokenizer import Detokenizer, PromptTooLong, TokenizerError, from_folder
from jserve.tokenizer.tokenizer import _MAX_NFC_SHRINK
from tests.support.texts import texts
from tests.support.tokenizer_folders import byte_level_folder, sentencepiece_folder


@pytest.fixture(scope="module", params=["legacy", "first", "byte-level"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "byte-level":
        return byte_level_folder(path, adds_bos=True)
    return sentencepiece_folder(path, request.param)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return from_folder(sentencepiece_folder(tmp_path_factory.mktemp("sentencepiece"), "legacy"))


def test_ids_and_text_equal_transformers(folder):
    transformers = pytest.importorskip("transformers")
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), from_folder(folder)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (len(reference), reference.bos_token_id)
    assert tokenizer.eos_token_ids == {reference.eos_token_id}
    for text in [*texts(500, seed=2), "", " x", "  x", "a</s> b", "a </s>b"]:
        ids = reference(text)["input_ids"]
        assert tokenizer.encode(text, add_special=True) == ids, text
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected, text


def test_control_text_can_be_ordinary(folder):
    tokenizer = from_folder(folder)
    ids = tokenizer.encode("a</s><s> b", add_special=False, parse_special=False)
    assert not any(map(tokenizer.is_special, ids))
    assert tokenizer.decode(ids) == "a</s><s> b"


def test_the_first_blank_belongs_to_the_tokenizer_and_later_ones_to_the_text(sentencepiece):
    for text in ("the quick", " the quick", "  the"):
        ids = sentencepiece.encode(text, add_special=True)
        assert sentencepiece.decode(ids) == text
        # An output continues a text, so its first blank is kept, too.
        detokenizer = Detokenizer(sentencepiece)
        assert "".join(detokenizer.push([token_id]) for token_id in ids) == " " + text


def test_byte_tokens_are_bytes(sentencepiece):
    ids = sentencepiece.encode("鬱", add_special=False)  # not in the alphabet: three bytes
    assert b"".join(sentencepiece.token_bytes(token_id) for token_id in ids[-3:]) == "鬱".encode()
    assert sentencepiece.decode(ids[:-1]) == "\ufffd"


def test_added_tokens_are_whole_and_special_only_when_they_say_so(tmp_path):
    tokenizer = from_folder(byte_level_folder(tmp_path))
    [think] = tokenizer.encode("<think>", add_special=False, parse_special=False)
    assert not tokenizer.is_special(think)
    assert tokenizer.token_bytes(think) == b"<think>"


def test_truncation_and_padding_of_the_file_do_not_count(tmp_path):
    folder = byte_level_folder(tmp_path)
    described = json.loads((folder / "tokenizer.json").read_text())
    described["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    described["padding"] = {
        **{"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"},
    }
    expected = from_folder(folder).encode("the quick brown fox", add_special=True)
    (folder / "tokenizer.json").write_text(json.dumps(described))
    assert from_folder(folder).encode("the quick brown fox", add_special=True) == expected


def test_special_tokens_named_by_the_config_only_are_special(tmp_path):
    folder = byte_level_folder(tmp_path)
    described = json.loads((folder / "tokenizer.json").read_text())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] == "<s>"]
    described["model"]["vocab"]["</s>"] = len(described["model"]["vocab"]) + 1
    (folder / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = from_folder(folder)
    [eos] = tokenizer.encode("</s>", add_special=False)
    assert tokenizer.eos_token_ids == {eos} and tokenizer.is_special(eos)


def test_a_prompt_that_cannot_fit_is_refused_early(folder):
    tokenizer = from_folder(folder)
    with pytest.raises(PromptTooLong):
        tokenizer.encode("x" * 10_000_000, add_special=True, max_tokens=100)
    for text in texts(100, seed=3):
        ids = tokenizer.encode(text, add_special=False)
        assert tokenizer.encode(text, add_special=False, max_tokens=len(ids)) == ids


def test_canonical_composition_shrinks_less_than_the_early_refusal_assumes():
    every = map(chr, [*range(0xD800), *range(0xE000, 0x110000)])
    characters = [character for character in every if not unicodedata.is_normalized("NFD", character)]
    longest_spelling = {}  # most bytes in one character that composition turns into the key
    for character in characters:
        composed = unicodedata.normalize("NFC", character)
        longest_spelling[composed] = max(longest_spelling.get(composed, 0), len(character.encode()))
    for character in characters:
        parts = unicodedata.normalize("NFD", character)
        longest = sum(longest_spelling.get(part, len(part.encode())) for part in parts)
        assert longest < _MAX_NFC_SHRINK * len(character.encode()), hex(ord(character))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer.json is missing: .*nowhere is not a folder"):
        from_folder(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"tokenizer.json is missing$"):
        from_folder(tmp_path)
    (tmp_path / "vocab.json").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"vocab.json alone is not built yet"):
        from_folder(tmp_path)


def test_a_broken_file_is_named(tmp_path):
    folder = byte_level_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="tokenizer_config.json is not valid JSON"):
        from_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="tokenizer.json cannot be read"):
        from_folder(folder)


@pytest.mark.parametrize(
    "decoder, message",
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, r"decoder WordPiece \(WordPiece\): not built yet"),
        ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}, "ByteFallback .* not built"),
        (None, "no decoder"),
    ],
)
def test_other_decoders_are_refused_by_name(tmp_path, decoder, message):
    folder = byte_level_folder(tmp_path)
    described = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**described, "decoder": decoder}))
    with pytest.raises(TokenizerError, match=message):
        from_folder(folder)
