"""Stop strings across token borders: nothing sent that is taken back, nothing held longer than it must be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.tokenizer import Detokenizer, StopMatcher, TextPiece, TextStream


def run(stops, pieces, include=False):
    """(texts released by each piece, the stop, the text released at the end)."""
    matcher = StopMatcher(stops, include)
    released = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        released.append(text)
        if stop is not None:
            return released, stop, matcher.finish()
    return released, None, matcher.finish()


def test_a_stop_string_over_five_tokens_is_cut_out_whole():
    pieces = ["Here", " is", " DEF", "GH", "I", "J", " K"]
    assert run(["DEFGHIJ"], pieces) == (["Here", " is", " ", "", "", ""], "DEFGHIJ", "")


def test_a_near_miss_loses_nothing():
    pieces = ["Here", " is", " DEF", "GH", "I", "J", " K"]
    released, stop, rest = run(["DEFGHIX"], pieces)
    assert (released, stop, rest) == (["Here", " is", " ", "", "", "DEFGHIJ", " K"], None, "")


def test_held_text_is_flushed_at_the_end():
    assert run(["TRE\nAAAA"], ["UNO", " DUE", " TRE"]) == (["UNO", " DUE", " "], None, "TRE")


def test_the_stop_string_is_kept_when_asked_and_nothing_after_it():
    assert run(["<end>"], ["a<e", "nd>b"], include=True) == (["a", "<end>"], "<end>", "")


def test_a_failed_beginning_may_hide_another():
    assert run(["aab"], ["a", "a", "a", "b"])[:2] == (["", "", "a", ""], "aab")
    assert run(["abcd", "bcx"], ["ab", "c", "x"])[:2] == (["", "", "a"], "bcx")


def test_the_stop_that_completes_first_wins_and_of_two_the_longer():
    assert run(["abc", "b"], ["abc"])[:2] == (["a"], "b")
    assert run(["c", "abc", "bc"], ["xabc"])[:2] == (["x"], "abc")


def test_no_stop_strings_hold_nothing():
    assert run([], ["a", "", "b"]) == (["a", "", "b"], None, "")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_a_thousand_long_stops_cost_no_more_per_character():
    stops = [f"{'x' * 50}{number:04}" for number in range(1000)]
    released, stop, rest = run(stops, ["x" * 20] * 50 + ["0", "99", "9y"])
    assert stop == "x" * 50 + "0999"
    assert "".join(released) == "x" * 950


small_text = st.text(alphabet="ab\u00e9", max_size=30)
some_stops = st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text, stops):
    """The first match by definition: smallest end, then the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@given(small_text, some_stops, st.lists(st.integers(0, 30), max_size=6), st.booleans())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_however_the_text_is_cut_the_result_is_the_definition(text, stops, cuts, include):
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in zip(bounds, bounds[1:])]
    released, stop, rest = run(stops, pieces, include)
    match = naive(text, stops)
    if match is None:
        assert stop is None and "".join(released) + rest == text
    else:
        end, expected = match
        assert (stop, rest) == (expected, "")
        assert "".join(released) == (text[:end] if include else text[: end - len(expected)])


@given(small_text, some_stops)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_what_is_held_is_the_longest_beginning_of_a_stop_and_no_more(text, stops):
    matcher, sent = StopMatcher(stops), ""
    for count, character in enumerate(text, 1):
        released, stop = matcher.push(character)
        sent += released
        if stop is not None:
            return
        seen = text[:count]
        longest = max(
            (length for s in stops for length in range(1, len(s)) if seen.endswith(s[:length])), default=0
        )
        assert sent == seen[: count - longest]


# Token by token, with floors and ends


class Words:
    """A tokenizer whose ids are positions in a list of texts; the last is special."""

    def __init__(self, *words):
        self.words = words

    def token_bytes(self, token_id):
        word = self.words[token_id]
        return word if isinstance(word, bytes) else word.encode()

    def is_special(self, token_id):
        return token_id == len(self.words) - 1


def text_stream(words, stops, **options):
    return TextStream(Detokenizer(Words(*words)), stops, **options)


def test_the_id_that_completes_a_stop_is_the_last_one_used():
    stream = text_stream(["a", " b", "c", " d", "<eos>"], ["bc"])
    assert stream.push([0, 1, 2, 3]) == TextPiece("a ", 3, "bc")
    assert stream.finish() == ""


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_steps_of_any_size_give_the_same_output(step):
    words = ["x", "st", "o", "p here", " more", " text", "<eos>"]
    ids = list(range(6))
    stream, text, used = text_stream(words, ["stop"]), "", 0
    for start in range(0, 6, step):
        piece = stream.push(ids[start : start + step])
        text, used = text + piece.text, used + piece.num_tokens_used
        if piece.matched_stop:
            break
    assert (text + stream.finish(), used, piece.matched_stop) == ("x", 4, "stop")


def test_a_stop_below_the_floor_is_text_and_a_later_one_stops():
    words = ["a", "STOP", "b", "c", "d", "STOP", "e", "<eos>"]
    stream = text_stream(words, ["STOP"], min_tokens=4)
    assert stream.push([0, 1, 2, 3, 4, 5, 6]) == TextPiece("aSTOPbcd", 6, "STOP")


@pytest.mark.parametrize("min_tokens, used", [(0, 2), (1, 2), (2, 4), (3, 4), (4, 5)])
def test_a_stop_counts_when_its_last_token_lies_beyond_the_floor(min_tokens, used):
    stream = text_stream(["S", "T", "S", "T", "<eos>"], ["ST"], min_tokens=min_tokens)
    pieces = [stream.push([0]), stream.push([1]), stream.push([2, 3]), stream.push([0, 1])]
    total = 0
    for piece in pieces:
        total += piece.num_tokens_used
        if piece.matched_stop:
            break
    assert total == (used if min_tokens < 4 else 6)


def test_a_stop_may_begin_below_the_floor():
    stream = text_stream(["x", "S", "T", "<eos>"], ["ST"], min_tokens=2)
    assert stream.push([0, 1]) == TextPiece("x", 2)
    assert stream.push([2]) == TextPiece("", 1, "ST")


def test_a_stop_completed_below_the_floor_can_begin_another():
    stream = text_stream(["a", "a", "a", "<eos>"], ["aa"], min_tokens=2)
    assert [stream.push([0]).text, stream.push([1]).text] == ["", "a"]
    assert stream.push([2]) == TextPiece("", 1, "aa")


def test_the_ids_that_end_an_output_have_no_text_unless_included():
    for include, text in ((False, "ab"), (True, "abend")):
        stream = text_stream(["a", "b", "end", "<eos>"], ["zz"], include=include)
        piece = stream.push([0, 1, 2], ended=True)
        assert (piece.text + stream.finish(), piece.num_tokens_used) == (text, 3)


def test_eos_flushes_what_is_held():
    stream = text_stream(["UNO", " DUE", " TRE", "<eos>"], ["TRE\nAAAA"])
    texts = [stream.push([0]).text, stream.push([1]).text, stream.push([2, 3], ended=True).text, stream.finish()]
    assert texts == ["UNO", " DUE", " ", "TRE"]


def test_the_end_id_completes_no_stop_string():
    stream = text_stream(["a", "b", "<eos>"], ["ab"], include=True)
    assert stream.push([0, 1], ended=True).matched_stop is None
    assert stream.finish() == ""


def test_a_stop_before_the_end_id_wins():
    stream = text_stream(["a", "b", "<eos>"], ["b"])
    assert stream.push([0, 1, 2], ended=True) == TextPiece("a", 2, "b")


def test_a_character_cut_off_at_the_end_is_replaced_after_what_was_held():
    stream = text_stream(["T", b"\xf0\x9f", "<eos>"], ["TX"])
    assert stream.push([0, 1]) == TextPiece("", 2)
    assert stream.finish() == "T\ufffd"


def test_without_stops_everything_passes():
    stream = text_stream(["a", "b", "<eos>"], [])
    assert stream.push([0, 1, 0]) == TextPiece("aba", 3)
    assert stream.push([1, 0], ended=True) == TextPiece("b", 2)
    assert stream.push([]) == TextPiece("", 0)


def test_real_tokens_with_a_stop_inside_a_word(smollm2):
    """Stop at DEFGHIJ through the tokens ` DEF`, `GH`, `I`, `J`."""
    ids = smollm2.encode("Here is DEFGHIJ K", add_special=False)
    stream = TextStream(Detokenizer(smollm2), ["DEFGHIJ"])
    pieces = [stream.push([token_id]) for token_id in ids[:-1]]
    assert "".join(piece.text for piece in pieces) == "Here is "
    assert [piece.matched_stop for piece in pieces] == [None] * (len(ids) - 2) + ["DEFGHIJ"]
