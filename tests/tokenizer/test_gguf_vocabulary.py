"""GGUF vocabularies against HF's conversion of the same file and against a slow BPE written here."""

import random
import threading
import time

import gguf
import pytest

from jserve.tokenizer import PromptTooLong, TokenizerError, decode_with_offsets, from_gguf
from tests.support.texts import texts
from tests.tokenizer import slow_bpe

DIGITS_GPT2 = [r"\p{N}", slow_bpe.GPT2]


def test_smollm2_facts(smollm2):
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.adds_bos) == (1, frozenset({2}), False)
    assert [token_id for token_id in range(49152) if smollm2.is_special(token_id)] == list(range(17))


@pytest.mark.parametrize(
    "text, ids",
    [
        ("12345", [33, 34, 35, 36, 37]),
        ("a 42", [81, 216, 36, 34]),
        ("\U0001f600", [10813, 242, 218]),
        ("\U0001f923", [10813, 114, 113]),
        ("\u4f60\u597d\u4e16\u754c", [18645, 250, 48392, 138, 7906, 240, 178, 239, 230]),
        ("\u010f", [143, 233]),
        (" " * 15, [22754]),
        (" DEF", [44691]),
        ('."', [1270]),
        (" the", [260]),
        ("<|im_end|>", [2]),
        ("", []),
        ("\x04\x06\x13\x14\x16\x1d", []),  # bytes with no token vanish, as in HF
        ("a\x04b", [81, 82]),
    ],
)
def test_ids_known_from_elsewhere(smollm2, text, ids):
    assert smollm2.encode(text, add_special=True) == ids


def test_control_text_is_ordinary_where_special_is_not_parsed(smollm2):
    ordinary = [44, 108, 306, 79, 486, 108, 46]
    assert smollm2.encode("<|im_end|>", add_special=True, parse_special=False) == ordinary
    assert smollm2.decode(ordinary) == "<|im_end|>"


def test_ids_equal_hf_on_thousands_of_lines(smollm2, hf_smollm2):
    lines = texts(5000, seed=1)
    expected = hf_smollm2(lines, add_special_tokens=False)["input_ids"]
    for line, ids in zip(lines, expected):
        assert smollm2.encode(line, add_special=False) == ids, line


def test_ids_equal_a_slow_bpe(smollm2, smollm2_fields):
    slow_encode = slow_bpe.encoder(smollm2_fields, DIGITS_GPT2)
    for line in texts(300, seed=2):
        assert smollm2.encode(line, add_special=False) == slow_encode(line), line


@pytest.mark.parametrize(
    "name, expressions",
    [
        ("gpt-2", [slow_bpe.GPT2]),
        ("default", [r"[\p{P}\$\+<=>\^~\|]+", slow_bpe.GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
    ],
)
def test_other_pre_tokenizers_equal_a_slow_bpe(smollm2_fields, name, expressions):
    tokenizer = from_gguf({**smollm2_fields, "tokenizer.ggml.pre": name})
    slow_encode = slow_bpe.encoder(smollm2_fields, expressions)
    for line in [*texts(200, seed=3), "Hello, world 12345 $5.00"]:
        assert tokenizer.encode(line, add_special=False) == slow_encode(line), line


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "tekken", "smaug-bpe"])
def test_other_pre_tokenizers_equal_hf(smollm2_fields, name):
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    from tokenizers import normalizers

    described = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": name,
        "tokens": smollm2_fields["tokenizer.ggml.tokens"],
        "merges": smollm2_fields["tokenizer.ggml.merges"],
        "token_type": smollm2_fields["tokenizer.ggml.token_type"],
    }
    reference, _ = mapping.convert_gguf_tokenizer("llama", described)
    # What the families' own tokenizer.json says and the conversion leaves out.
    reference.model.ignore_merges = name in ("llama-bpe", "tekken")
    if name == "qwen2":
        reference.normalizer = normalizers.NFC()
    tokenizer = from_gguf({**smollm2_fields, "tokenizer.ggml.pre": name})
    for line in texts(500, seed=4):
        expected = reference.encode(line, add_special_tokens=False).ids
        assert tokenizer.encode(line, add_special=False) == expected, line


def test_a_megabyte_is_quick_and_right(smollm2, hf_smollm2):
    text = " ".join(texts(40_000, seed=5))[:1_000_000]
    start = time.process_time()
    ids = smollm2.encode(text, add_special=False)
    assert time.process_time() - start < 20  # a second or less on an idle core
    assert ids == hf_smollm2.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


@pytest.mark.parametrize("name", ["smollm", "llama-bpe", "default"])
@pytest.mark.parametrize("text", [" ", "a", "\n", "!", " \n", " " * 300_000 + "x"])
def test_monotonous_text_is_no_trap(smollm2_fields, name, text):
    tokenizer = from_gguf({**smollm2_fields, "tokenizer.ggml.pre": name})
    text = text * (300_000 // len(text) or 1)
    start = time.process_time()
    ids = tokenizer.encode(text, add_special=False)
    assert time.process_time() - start < 20
    assert tokenizer.decode(ids) == text


def without_untokened(text):
    """Text without characters that have a byte with no token."""
    return "".join(character for character in text if character not in "\x04\x06\x13\x14\x16\x1d")


def test_decoding_gives_the_text_back(smollm2):
    for line in texts(500, seed=6):
        kept = without_untokened(line)
        assert smollm2.decode(smollm2.encode(kept, add_special=False), skip_special_tokens=False) == kept


def test_decoding_puts_no_blank_between_added_tokens(smollm2):
    assert smollm2.decode([1, 2, 1195], skip_special_tokens=False) == "<|im_start|><|im_end|>the"
    assert smollm2.decode([0, 16, 260], skip_special_tokens=False) == "<|endoftext|><empty_output> the"
    assert smollm2.decode([1, 2, 1195], skip_special_tokens=True) == "the"


def test_ids_beyond_the_tokenizer_have_no_bytes(smollm2):
    assert smollm2.token_bytes(49152) == smollm2.token_bytes(-1) == smollm2.token_bytes(2**40) == b""
    assert smollm2.decode([49152, 1195, 10**9]) == "the"


def test_single_tokens_for_logprobs(smollm2):
    assert (smollm2.token_text(2), smollm2.token_bytes(2)) == ("<|im_end|>", b"<|im_end|>")
    assert (smollm2.token_text(260), smollm2.token_bytes(260)) == (" the", b" the")
    assert (smollm2.token_text(242), smollm2.token_bytes(242)) == ("\ufffd", b"\x98")


def test_offsets_cover_the_text_in_order(smollm2):
    for line in texts(300, seed=7):
        line = without_untokened(line)
        ids, offsets = smollm2.encode_with_offsets(line, add_special=False)
        assert ids == smollm2.encode(line, add_special=False)
        assert len(ids) == len(offsets)
        for token_id, (start, end) in zip(ids, offsets):
            assert smollm2.token_bytes(token_id) in line[start:end].encode()
    assert smollm2.encode_with_offsets("hi 😀 the<|im_end|>", add_special=False)[1] == [
        (0, 2), (2, 4), (3, 4), (4, 8), (8, 18)
    ]  # fmt: skip


def test_each_token_brings_the_characters_that_it_completes(smollm2):
    for line in texts(300, seed=8):
        ids = smollm2.encode(line, add_special=False) + [2, 242]  # a control token, and a byte that is no character
        for skip in (False, True):
            text, offsets = decode_with_offsets(smollm2, ids, skip)
            assert text == smollm2.decode(ids, skip) == "".join(text[start:end] for start, end in offsets)
            for token_id, (start, end) in zip(ids, offsets):
                whole = smollm2.token_bytes(token_id).decode("utf-8", "ignore")
                assert not whole.isascii() or text[start:end].endswith("" if skip and token_id == 2 else whole)
    assert decode_with_offsets(smollm2, [6004, 10813, 242, 218, 260], True)[1][1:] == [(2, 2), (2, 2), (2, 3), (3, 7)]


def test_text_surely_too_long_is_refused_without_tokenizing(smollm2):
    text = "x" * 10_000_000  # seconds to tokenize
    start = time.process_time()
    with pytest.raises(PromptTooLong) as refused:
        smollm2.encode(text, add_special=True, max_tokens=8192)
    assert time.process_time() - start < 1
    assert 8192 < refused.value.at_least <= 10_000_000


def test_text_that_fits_is_never_refused(smollm2):
    longest = max(range(49152), key=lambda token_id: len(smollm2.token_bytes(token_id)))
    text = smollm2.token_bytes(longest).decode() * 50
    assert smollm2.encode(text, add_special=False, max_tokens=50) == [longest] * 50
    assert smollm2.encode("\x04" * 1_000_000 + "a", add_special=False, max_tokens=1) == [81]


def test_lone_surrogates_are_refused_by_name(smollm2):
    with pytest.raises(ValueError, match=r"U\+D83D at 3"):
        smollm2.encode("abc\ud83d", add_special=False)
    with pytest.raises(ValueError, match=r"U\+D83D at 0"):
        smollm2.encode_with_offsets("\ud83d", add_special=False)


def test_encoding_lets_other_threads_run(smollm2):
    """The engine's thread must not stand still while a long prompt is tokenized."""
    text = " ".join(texts(20_000, seed=8))
    encoding = threading.Thread(target=lambda: smollm2.encode(text, add_special=False))
    encoding.start()
    ticks = 0
    while encoding.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 5  # one or two where encoding holds the GIL


def test_encoding_in_many_threads_agrees(smollm2):
    lines = texts(200, seed=9)
    expected = [smollm2.encode(line, add_special=False, parse_special=False) for line in lines]
    results = {}

    def work(worker):
        order = random.Random(worker).sample(range(len(lines)), len(lines))
        for index in order:
            smollm2.encode(lines[index], add_special=False)
        results[worker] = [smollm2.encode(line, add_special=False, parse_special=False) for line in lines]

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[worker] == expected for worker in range(4))


# Small vocabularies


def small_fields(**changes):
    """Bytes only, then three tokens: control, user-defined, padding."""
    alphabet = [slow_bpe.ALPHABET[byte] for byte in range(256)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*alphabet, "<s>", "<think>", "[PAD258]"],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 4, 5],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 256,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def test_user_defined_tokens_are_whole_but_not_special():
    tokenizer = from_gguf(small_fields())
    assert tokenizer.encode("a<think>", add_special=False, parse_special=False) == [97, 257]
    assert not tokenizer.is_special(257)
    assert tokenizer.decode([97, 257, 256]) == "a<think>"


def test_padding_tokens_are_no_tokens():
    tokenizer = from_gguf(small_fields())
    assert tokenizer.vocab_size == 258
    assert tokenizer.token_bytes(258) == b""
    assert tokenizer.encode("[PAD258]", add_special=False) == list(b"[PAD258]")


@pytest.mark.parametrize(
    "pre, flag, adds",
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_who_adds_bos(pre, flag, adds):
    tokenizer = from_gguf(small_fields(pre=pre, **({} if flag is None else {"add_bos_token": flag})))
    assert tokenizer.adds_bos is adds
    assert tokenizer.encode("a", add_special=True) == [256] * adds + [97]
    assert tokenizer.encode("a", add_special=False) == [97]
    assert tokenizer.encode("<s>a", add_special=True) == [256, 97]  # never two
    assert tokenizer.encode_with_offsets("a", add_special=True)[1] == [(0, 0)] * adds + [(0, 1)]


def test_end_of_turn_ids_end_an_output_too():
    assert from_gguf(small_fields(eot_token_id=257)).eos_token_ids == {256, 257}


def test_a_path_does_as_well(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    fields = small_fields()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(fields["tokenizer.ggml.tokens"])
    writer.add_token_types(fields["tokenizer.ggml.token_type"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(TokenizerError, match="merges do not fit"):  # `ab` is no token
        from_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and nothing")
    with pytest.raises(TokenizerError, match="broken.gguf cannot be read as GGUF"):
        from_gguf(tmp_path / "broken.gguf")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "t5"}, r"tokenizer.ggml.model = 't5': not built yet"),
        ({"model": None}, r"tokenizer.ggml.model = it has none"),
        ({"pre": "deepseek-llm"}, r"tokenizer.ggml.pre = 'deepseek-llm': not built yet; known: default, "),
        ({"token_type": [1]}, r"tokenizer.ggml.token_type has 1 entries for 259 tokens"),
        ({"merges": ["Ġ x"]}, r"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens"),
        ({"bos_token_id": 259}, r"tokenizer.ggml.bos_token_id = 259: there are 259 tokens"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes, message):
    with pytest.raises(TokenizerError, match=message):
        from_gguf(small_fields(**changes))


def test_missing_tokens_are_named():
    fields = small_fields()
    del fields["tokenizer.ggml.merges"]
    with pytest.raises(TokenizerError, match="tokenizer.ggml.merges is missing"):
        from_gguf(fields)
