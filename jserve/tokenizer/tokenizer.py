"""Text to token ids and back, over HF `tokenizers`; built by `from_folder` and `from_gguf`.

A Tokenizer never changes after it is built, so any thread may use it; encoding releases the GIL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import tokenizers

from jserve.tokenizer.backend import component_state, encode_ids, encode_spans, share
from jserve.tokenizer.chat_template import ChatTemplate, ChatTemplateError, ToolsRefused, plain_messages
from jserve.tokenizer.control_text import ControlText
from jserve.tokenizer.token_table import TokenTable

# Canonical composition (NFC) can make UTF-8 shorter, by less than this factor (a test walks all of Unicode).
_MAX_NFC_SHRINK = 6


_OPTIONAL_KEYS = {"name", "tool_calls", "tool_call_id"}
"""Keys of a message for which not every template has a place."""


class PromptTooLong(ValueError):
    """The text has more tokens than the caller's limit, seen without tokenizing it."""

    def __init__(self, at_least: int, max_tokens: int):
        super().__init__(f"the text has at least {at_least} tokens, more than {max_tokens}")
        self.at_least = at_least
        """Tokens that it has at the very least."""


@dataclass(frozen=True)
class SpecialRules:
    """What encoding adds around a text, and what ends an output."""

    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    prefix_ids: tuple[int, ...] = ()
    """Put before a text (BOS, mostly)."""
    suffix_ids: tuple[int, ...] = ()
    """Put after a text (some encoders' EOS)."""


class Tokenizer:
    """One model's tokenizer.

    `vocab_size` is the number of ids that it knows; an embedding may have more rows, which stand for nothing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        table: TokenTable,
        rules: SpecialRules,
        chat_template: ChatTemplate | None = None,
    ):
        self.vocab_size = len(table.token_bytes)
        self.bos_token_id = rules.bos_token_id
        self.eos_token_ids = rules.eos_token_ids
        self.adds_bos = rules.bos_token_id is not None and rules.prefix_ids[:1] == (rules.bos_token_id,)
        self.chat_template = chat_template
        self._rules = rules
        self._table = table
        self._num_bytes_per_token = _longest_text_of_a_token(backend, table)
        self._untokened_bytes = _bytes_without_token(table)
        added = backend.get_added_tokens_decoder()
        self._control = ControlText({token_id: token for token_id, token in added.items() if token.special})
        self._backend = share(backend)

    # Text to ids

    def encode(
        self, text: str, *, add_special: bool, parse_special: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Ids of `text`.

        add_special puts around it what the model expects (BOS), but never a second BOS before a text that spells one.
        parse_special reads control tokens spelled in the text as control; otherwise they are ordinary text.
        max_tokens raises PromptTooLong, in milliseconds, where the text is so long that it surely has more tokens (its
        bytes over the longest token's); a text that may fit is tokenized and can still come out longer.
        A byte for which the vocabulary has no token vanishes, as in HF.  ValueError: a lone surrogate.
        """
        if max_tokens is not None:
            self._refuse_surely_longer(text, max_tokens)
        view = self._backend.parsing if parse_special else self._backend.plain
        [ids] = encode_ids(view, [text])
        return self._with_special(ids) if add_special else ids

    def encode_with_offsets(
        self, text: str, *, add_special: bool, parse_special: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and for each the (start, end) characters of `text` it covers.

        Tokens that hold parts of one character all cover that character; added BOS or EOS cover (0, 0) or the end.
        In a word with a byte that has no token the offsets after it are early by it, as HF's are.
        """
        view = self._backend.parsing if parse_special else self._backend.plain
        ids, offsets = encode_spans(view, text)
        if not add_special:
            return ids, offsets
        prefix, suffix = self._missing_special(ids)
        end = (len(text), len(text))
        return [*prefix, *ids, *suffix], [(0, 0)] * len(prefix) + offsets + [end] * len(suffix)

    def encode_chat(
        self,
        messages: Sequence[object],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Ids of a conversation in the model's chat template; messages have `role` and `content` (objects or mappings).

        The template's control tokens are control; the same characters in a message are ordinary text.  Where no
        message spells any, the ids are those of the rendered text.  One BOS stands in front where the template writes
        it or the tokenizer adds it.  ChatTemplateError (a ValueError) where there is no template, or it refuses.
        """
        if self.chat_template is None:
            raise ChatTemplateError("the model has no chat template; send the text as prompt, or prompt_token_ids")
        conversation = plain_messages(messages)
        rendering = self.chat_template.start(add_generation_prompt)
        text = rendering(conversation, tools)
        if tools and text == rendering(conversation, None):
            raise ToolsRefused("tools: the model's chat template has no place for tools", "tools")
        for index, message in enumerate(conversation):
            if not self.chat_template.knows_role(message["role"]):
                field = f"messages[{index}].role"
                raise ChatTemplateError(
                    f"{field} = {message['role']!r}: the model's chat template knows no such role", field
                )
            for key in _OPTIONAL_KEYS & message.keys():
                without = [dict(one) for one in conversation]
                del without[index][key]
                if text == rendering(without, tools):
                    field = f"messages[{index}].{key}"
                    raise ChatTemplateError(
                        f"{field} = {message[key]!r:.200}: the model's chat template has no place for {key}", field
                    )
        if max_tokens is not None:
            self._refuse_surely_longer(text, max_tokens)
        shield = self._control.shield(text, conversation, tools)
        if shield is None:
            [ids] = encode_ids(self._backend.parsing, [text])
        else:
            protected = shield.positions(rendering(shield.messages, shield.tools), text)
            ids = self._encode_pieces(text, protected)
        if self.adds_bos and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    # Ids to text

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids from a text's start: their bytes joined, invalid UTF-8 as U+FFFD, no blank put in.

        A SentencePiece tokenizer's first blank is dropped as HF does; `Detokenizer`, which continues a text, keeps it.
        """
        special = self._table.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in special)
        decoded = text.decode("utf-8", "replace")
        for _ in range(self._table.num_leading_blanks_dropped):
            decoded = decoded.removeprefix(" ")
        return decoded

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one id; empty where the tokenizer has no such id (a padded vocabulary's rows)."""
        return self._table.token_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """One token as text, for logprobs; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def to_json(self) -> str:
        """As HF's tokenizer.json: the same ids for the same text; adding BOS stays with whoever reads it."""
        return self._backend.parsing.to_str()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._table.special_ids

    # Inside

    def _with_special(self, ids: list[int]) -> list[int]:
        prefix, suffix = self._missing_special(ids)
        return [*prefix, *ids, *suffix] if prefix or suffix else ids

    def _missing_special(self, ids: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        prefix, suffix = self._rules.prefix_ids, self._rules.suffix_ids
        has_prefix = bool(prefix) and tuple(ids[: len(prefix)]) == prefix
        has_suffix = bool(suffix) and tuple(ids[-len(suffix) :]) == suffix
        return (() if has_prefix else prefix), (() if has_suffix else suffix)

    def _encode_pieces(self, text: str, protected: Sequence[int]) -> list[int]:
        """Ids of a rendered chat in which the characters at `protected` are no part of a control token."""
        pieces = self._control.split(text, protected)
        texts = [piece for piece in pieces if isinstance(piece, str)]
        starts_with_text = bool(pieces) and isinstance(pieces[0], str)
        first = encode_ids(self._backend.plain, texts[:1]) if starts_with_text else []
        encoded = iter(first + encode_ids(self._backend.inner, texts[len(first) :]))
        return [
            token_id for piece in pieces for token_id in (next(encoded) if isinstance(piece, str) else [piece])
        ]

    def _refuse_surely_longer(self, text: str, max_tokens: int) -> None:
        # A character has one byte or more, so most texts are done here.
        if self._num_bytes_per_token is None or 4 * len(text) <= max_tokens * self._num_bytes_per_token:
            return
        data = text.encode("utf-8", "replace")
        num_bytes = len(data.translate(None, delete=self._untokened_bytes))
        at_least = -(-num_bytes // self._num_bytes_per_token)
        if at_least > max_tokens:
            raise PromptTooLong(at_least, max_tokens)


def _longest_text_of_a_token(backend: tokenizers.Tokenizer, table: TokenTable) -> int | None:
    """Bytes of text that one token can stand for at most; None where that has no bound that we know."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE) or (model.unk_token is not None and _bytes_without_token(table)):
        return None  # one unknown token may stand for a whole run
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # such a token swallows any number of blanks
    shrink = _max_shrink(component_state(backend.normalizer))
    longest = max(map(len, table.token_bytes), default=0)
    return longest * shrink if shrink and longest else None


def _max_shrink(normalizer: dict | None) -> int | None:
    """How many times shorter, at most, a normalizer can make a text's UTF-8."""
    match normalizer:
        case None:
            return 1
        case {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
            return 1
        case {"type": "NFC"}:
            return _MAX_NFC_SHRINK
        case {"type": "Sequence", "normalizers": steps} if all(_max_shrink(step) == 1 for step in steps):
            return 1
    return None


def _bytes_without_token(table: TokenTable) -> bytes:
    single = {token[0] for token in table.token_bytes if len(token) == 1}
    return bytes(byte for byte in range(256) if byte not in single)
