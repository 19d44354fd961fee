"""Log-probabilities in the two forms of OpenAI: lists side by side for completions, objects for chat."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from jserve.request import PositionLogprobs, TokenLogprob


class CompletionLogprobs:
    """`logprobs` of one choice of /v1/completions, piece by piece: `text_offset` goes on where the last piece ended."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def piece(
        self, positions: Iterable[tuple[PositionLogprobs | None, bool]], first_token: tuple[str, bytes] = ("", b"")
    ) -> dict:
        """`positions` with whether the choice's text leaves out their token (BOS, EOS and their like).

        `first_token` is the text and bytes of a prompt's first token, which has no logprob.
        """
        piece: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for position, is_hidden in positions:
            if position is None:
                text, data, logprob, top = _shown(*first_token), first_token[1], None, None
            else:
                chosen = position.chosen
                text, data, logprob = _shown(chosen.text, chosen.bytes), chosen.bytes, chosen.logprob
                # Two ids with one text: the first, more probable one keeps its place.
                top = {}
                for entry in position.top:
                    top.setdefault(_shown(entry.text, entry.bytes), entry.logprob)
            piece["tokens"].append(text)
            piece["token_logprobs"].append(logprob)
            piece["top_logprobs"].append(top)
            piece["text_offset"].append(self._num_characters)
            if not is_hidden:
                self._num_characters += len(self._decoder.decode(data))
        return piece


def chat_logprobs(positions: Sequence[PositionLogprobs], k: int) -> dict:
    """`logprobs` of a choice of /v1/chat/completions, with the k most probable tokens at each position."""
    return {
        "content": [{**_entry(position.chosen), "top_logprobs": [_entry(entry) for entry in position.top[:k]]}
                    for position in positions],
        "refusal": None,
    }


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> list[dict | None]:
    """As vLLM shows them: an object of token id to logprob, rank and text for each prompt token, null for the first."""
    return [
        None if position is None else {
            str(entry.token_id): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.text}
            for entry in (*position.top, position.chosen)
        }
        for position in positions
    ]


def _entry(entry: TokenLogprob) -> dict:
    return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.bytes)}


def _shown(text: str, data: bytes) -> str:
    """A token as a key: bytes that are no whole character are spelled out, so that different tokens differ."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text
