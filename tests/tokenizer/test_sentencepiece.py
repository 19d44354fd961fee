"""SentencePiece vocabularies, from tokenizer.model and from a GGUF, against the sentencepiece library itself."""

import dataclasses
import io
import json

import pytest

from jserve.tokenizer import Detokenizer, TokenizerError, from_folder, from_gguf
from jserve.weights.checkpoint import open_checkpoint
from jserve.weights.hf_files import describing_files
from tests.support.texts import texts
from tests.support.tiny_models import random_gguf

sentencepiece = pytest.importorskip("sentencepiece")

LLAMA = dict(
    vocab_size=900, model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
    split_digits=True, allow_whitespace_only_pieces=True,
)  # fmt: skip
LINES = [line for line in texts(3000, seed=11) if "\x00" not in line]


def trained(**settings):
    """A small model; what `settings` do not say is as Llama 2's was trained."""
    out = io.BytesIO()
    lines = [line.replace("\n", " ") for line in texts(1500, seed=1, longest=20)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, character_coverage=0.98, num_threads=1, minloglevel=2,
        **{**LLAMA, **settings},
    )  # fmt: skip
    return out.getvalue()


@pytest.fixture(scope="module")
def model():
    return trained()


@pytest.fixture(scope="module")
def reference(model):
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def folder_of(path, model, **config):
    (path / "tokenizer.model").write_bytes(model)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def gguf_fields(reference, **changes):
    """As llama.cpp's converter writes them."""
    kinds = [("is_unknown", 2), ("is_control", 3), ("is_unused", 5), ("is_byte", 6)]
    ids = range(reference.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [reference.id_to_piece(index) for index in ids],
        "tokenizer.ggml.scores": [reference.get_score(index) for index in ids],
        "tokenizer.ggml.token_type": [
            next((kind for test, kind in kinds if getattr(reference, test)(index)), 1) for index in ids
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


@pytest.fixture(scope="module", params=["folder", "gguf"])
def tokenizer(request, model, reference, tmp_path_factory):
    if request.param == "folder":
        return from_folder(folder_of(tmp_path_factory.mktemp("model"), model))
    return from_gguf(gguf_fields(reference))


def test_ids_equal_the_library_on_thousands_of_lines(tokenizer, reference):
    assert sum(map(len, reference.encode(LINES))) > 40_000
    for line, ids in zip(LINES, reference.encode(LINES)):
        assert tokenizer.encode(line, add_special=True, parse_special=False) == [1, *ids], line


def test_text_equals_the_library_and_comes_back(tokenizer, reference):
    for line in LINES[:500]:
        ids = reference.encode(line)
        assert tokenizer.decode(ids) == reference.decode(ids) == line.replace("▁", " ")


def test_a_stream_is_the_text_byte_by_byte_and_keeps_the_first_blank(tokenizer, reference):
    """An output continues a prompt, so that the blank of its first word is text."""
    for line in [*LINES[:300], " x", "鬱", "😀 a"]:
        ids = reference.encode(line)
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push([token_id]) for token_id in ids]
        assert "".join(pieces) + detokenizer.finish() == " " + line.replace("▁", " ")
    ids = reference.encode("鬱")  # three bytes: nothing is sent before the last
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in ids] == [" ", "", "", "鬱"]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids[:-1]) + detokenizer.finish() == " \ufffd"


def test_facts_and_control_tokens(tokenizer, reference):
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.adds_bos) == (900, 1, True)
    assert tokenizer.eos_token_ids == {2}
    assert [token_id for token_id in range(900) if tokenizer.is_special(token_id)] == [0, 1, 2]
    assert tokenizer.token_bytes(3 + 0xE2) == b"\xe2"
    # Control tokens in text are control or ordinary, as asked; a text behind one has its blank.
    assert tokenizer.encode("<s>a</s>b", add_special=True) == [1, *reference.encode("a"), 2, *reference.encode("b")]
    ordinary = tokenizer.encode("<s>a</s>", add_special=False, parse_special=False)
    assert ordinary == reference.encode("<s>a</s>") and not {0, 1, 2} & set(ordinary)
    assert tokenizer.encode("<0x41>", add_special=False) == reference.encode("<0x41>")


def test_without_a_blank_in_front(reference):
    """Gemma's way; `add_space_prefix` in a GGUF."""
    model = trained(add_dummy_prefix=False)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = from_gguf(gguf_fields(library, add_space_prefix=False))
    for line in LINES[:500]:
        ids = library.encode(line)
        assert tokenizer.encode(line, add_special=False, parse_special=False) == ids, line
        assert tokenizer.decode(ids) == line.replace("▁", " ")


def test_characters_that_are_replaced_and_blanks_that_vanish(tmp_path):
    model = trained(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = from_folder(folder_of(tmp_path, model))
    for line in ["a  b ", "  Ⅷ １２ ½", "naïve e\u0301", "\t x \u3000 y", "", " "]:
        assert tokenizer.encode(line, add_special=False) == library.encode(line), line


def test_without_bytes_what_is_unknown_is_one_id(tmp_path):
    model = trained(byte_fallback=False)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = from_folder(folder_of(tmp_path, model))
    for line in ["鬱鬱 a", "x \U0010ffff", "鬱 鬱"]:
        assert tokenizer.encode(line, add_special=False) == library.encode(line), line


def test_the_folders_config_names_and_adds_tokens(tmp_path, model, reference):
    added = {"900": {"content": "<|im_end|>", "special": True}, "901": {"content": "<tool>", "special": False}}
    folder = folder_of(
        tmp_path, model, added_tokens_decoder=added, eos_token="<|im_end|>", add_bos_token=False,
        chat_template="{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
    )  # fmt: skip
    tokenizer = from_folder(folder)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.adds_bos) == (902, {900}, False)
    assert tokenizer.is_special(900) and not tokenizer.is_special(901)
    assert tokenizer.encode("a<|im_end|><tool>", add_special=True) == [*reference.encode("a"), 900, 901]
    chat = tokenizer.encode_chat([{"role": "user", "content": "a <|im_end|> b"}])
    assert chat == [*reference.encode("a <|im_end|> b"), 900]
    assert tokenizer.decode([900, 901], skip_special_tokens=False) == "<|im_end|><tool>"


def test_legacy_false_puts_a_blank_before_the_first_text_only(tmp_path, model, reference):
    tokenizer = from_folder(folder_of(tmp_path, model, legacy=False))
    [blank, *rest] = [tokenizer.encode("a</s>b", add_special=False)[-1], *reference.encode("b")]
    assert tokenizer.token_bytes(blank) == b"b"
    assert tokenizer.encode("a b", add_special=False) == reference.encode("a b")


def test_ids_equal_transformers(tmp_path, model):
    transformers = pytest.importorskip("transformers")
    folder = folder_of(tmp_path, model, tokenizer_class="LlamaTokenizer", legacy=True, add_bos_token=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), from_folder(folder)
    for line in ["Hello the world", "the quick  Brown", "鬱 😀"]:  # (" a" is one blank there, two in the library)
        assert ours.encode(line, add_special=True) == theirs(line)["input_ids"], line


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(model_type="unigram", byte_fallback=False, vocab_size=300), "SentencePiece of kind unigram: not built"),
        (dict(treat_whitespace_as_suffix=True), "blanks behind words"),
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path, settings, message):
    with pytest.raises(TokenizerError, match=rf"tokenizer\.model: .*{message}"):
        from_folder(folder_of(tmp_path, trained(**settings)))


def test_what_is_broken_is_named(tmp_path, reference):
    with pytest.raises(TokenizerError, match=r"tokenizer\.model is not a SentencePiece model"):
        from_folder(folder_of(tmp_path, b"\xff\xff\xff"))
    with pytest.raises(TokenizerError, match=r"tokenizer\.model is not a SentencePiece model: it has no pieces"):
        from_folder(folder_of(tmp_path, b""))
    with pytest.raises(TokenizerError, match="tokenizer.ggml.scores has 1 entries for 900 tokens"):
        from_gguf(gguf_fields(reference, scores=[0.0]))
    fields = gguf_fields(reference)
    del fields["tokenizer.ggml.scores"]
    with pytest.raises(TokenizerError, match="tokenizer.ggml.scores is missing in the GGUF"):
        from_gguf(fields)


@pytest.mark.parametrize("adds_prefix", [True, False])
def test_a_gguf_becomes_a_folder_with_the_same_ids_and_text(reference, tmp_path, adds_prefix):
    fields = gguf_fields(reference, add_space_prefix=adds_prefix)
    checkpoint = open_checkpoint(random_gguf(tmp_path / "m.gguf", num_heads=4, num_kv_heads=2))
    config = dataclasses.replace(checkpoint.config, bos_token_id=1, eos_token_ids=(2,))
    checkpoint = dataclasses.replace(checkpoint, config=config, eos_token_ids=(2,), tokenizer_source=fields)
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, content in describing_files(checkpoint, "float32").items():
        (folder / name).write_bytes(content)
    ours, theirs = from_gguf(fields), from_folder(folder)
    assert (theirs.bos_token_id, theirs.adds_bos, theirs.vocab_size) == (1, True, 900)
    for line in LINES[:300]:
        ids = ours.encode(line, add_special=True)
        assert theirs.encode(line, add_special=True) == ids
        assert theirs.decode(ids) == ours.decode(ids)
