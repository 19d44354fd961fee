"""Streamed text is exactly the text of all bytes, and leaves as early as it can."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.tokenizer import Detokenizer


class Bytes:
    """A tokenizer whose ids are given by their bytes; ids in `special` are special."""

    def __init__(self, *token_bytes, special=()):
        self._token_bytes, self._special = token_bytes, special

    def token_bytes(self, token_id):
        return self._token_bytes[token_id]

    def is_special(self, token_id):
        return token_id in self._special


SINGLE_BYTES = Bytes(*(bytes([byte]) for byte in range(256)))


def stream(tokenizer, groups, skip_special_tokens=True):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.push(group) for group in groups), detokenizer.finish()]


def test_a_character_waits_for_its_bytes_and_blanks_do_not(smollm2):
    assert stream(smollm2, [[10813], [242], [218], [260]]) == ["", "", "😀", " the", ""]


def test_a_cut_character_becomes_one_replacement_character(smollm2):
    assert "".join(stream(smollm2, [[260], [10813]])).endswith("\ufffd")
    assert stream(SINGLE_BYTES, [b"\xf0\x9f\x98"]) == ["", "\ufffd"]


def test_bytes_that_cannot_become_a_character_do_not_wait():
    assert stream(SINGLE_BYTES, [b"\xe2\x82", b"a"]) == ["", "\ufffda", ""]
    assert stream(SINGLE_BYTES, [b"\xff", b"\x80", b"\xc0"]) == ["\ufffd", "\ufffd", "\ufffd", ""]
    assert stream(SINGLE_BYTES, [b"\xed", b"\xa0", b"\x80"]) == ["", "\ufffd\ufffd", "\ufffd", ""]  # a surrogate


def test_ascii_is_delivered_at_once(smollm2):
    ids = smollm2.encode("Plain ASCII text, with 3 digits; and\n\ttabs.", add_special=False)
    assert stream(smollm2, [[token_id] for token_id in ids]) == [*map(smollm2.token_text, ids), ""]


def test_special_tokens_are_left_out_only_when_asked(smollm2):
    assert "".join(stream(smollm2, [[1, 1195], [2]])) == "the"
    assert "".join(stream(smollm2, [[1, 1195], [2]], skip_special_tokens=False)) == "<|im_start|>the<|im_end|>"


def test_a_skipped_special_token_does_not_break_a_character():
    tokenizer = Bytes(b"\xc3", b"<special>", b"\xa9", special={1})
    assert stream(tokenizer, [[0], [1], [2]]) == ["", "", "é", ""]


def test_the_313_tokens_that_are_not_text_alone(smollm2):
    """10,000 random sequences of the tokens that are not valid UTF-8 by themselves."""

    def is_text(token_id):
        try:
            smollm2.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return False
        return True

    broken = [token_id for token_id in range(smollm2.vocab_size) if not is_text(token_id)]
    assert len(broken) == 313
    random_source = random.Random(0)
    for _ in range(10_000):
        ids = random_source.choices(broken, k=random_source.randint(1, 12))
        whole = b"".join(map(smollm2.token_bytes, ids)).decode("utf-8", "replace")
        assert "".join(stream(smollm2, [[token_id] for token_id in ids])) == whole


@given(st.lists(st.binary(max_size=5), max_size=12), st.data())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_any_bytes_in_any_groups_give_the_same_text(tokens, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    ids = list(range(len(tokens)))
    groups = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(tokens)])]
    pieces = stream(Bytes(*tokens), groups)
    assert "".join(pieces) == b"".join(tokens).decode("utf-8", "replace")


@given(st.binary(max_size=40))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_only_what_can_still_become_a_character_waits(data):
    """After each byte, what was sent is all that later bytes cannot change."""
    detokenizer = Detokenizer(SINGLE_BYTES)
    sent = ""
    for count, byte in enumerate(data, 1):
        sent += detokenizer.push([byte])
        endings = [b"", b"a", b"\x80", b"\x80\x80\x80", b"\x90\x80\x80", b"\xbf\xbf\xbf"]
        texts = [(data[:count] + ending).decode("utf-8", "replace") for ending in endings]
        assert all(text.startswith(sent) for text in texts)
        certain = len(data[:count].decode("utf-8", "replace"))
        # At most one character waits, and only where some continuation completes it.
        assert certain - len(sent) in (0, 1)
        if certain > len(sent):
            assert any(text[len(sent)] != "\ufffd" for text in texts)


@pytest.mark.parametrize("seed", range(4))
def test_streams_do_not_share_state(smollm2, seed):
    """16 streams, each in the middle of a character, taken in turns."""
    random_source = random.Random(seed)
    texts = [chr(random_source.choice([0x1F600, 0x4F60, 0x10F, 0x41]) + index) * 5 + " the" for index in range(16)]
    ids = [smollm2.encode(text, add_special=False) for text in texts]
    detokenizers = [Detokenizer(smollm2) for _ in texts]
    received = ["" for _ in texts]
    for step in range(max(map(len, ids))):
        for index in random_source.sample(range(16), 16):
            received[index] += detokenizers[index].push(ids[index][step : step + 1])
    assert [text + detokenizer.finish() for text, detokenizer in zip(received, detokenizers)] == texts
