"""Reads SentencePiece's own file, tokenizer.model: a protobuf message of which jserve needs a dozen fields.

The message is described here, in a pool of its own: the sentencepiece package is not needed, and does no harm.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from jserve.tokenizer.sentencepiece_pieces import Pieces
from jserve.tokenizer.token_table import TokenizerError

_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_FIELD = descriptor_pb2.FieldDescriptorProto
# message -> {field: (number, type, default)}; the numbers are sentencepiece_model.proto's.
_MESSAGES = {
    "Piece": {"piece": (1, _FIELD.TYPE_STRING, ""), "score": (2, _FIELD.TYPE_FLOAT, "0"),
              "type": (3, _FIELD.TYPE_INT32, "1")},
    "Trainer": {"model_type": (3, _FIELD.TYPE_INT32, "1"), "blank_behind": (24, _FIELD.TYPE_BOOL, "false"),
                "bos_id": (41, _FIELD.TYPE_INT32, "1"), "eos_id": (42, _FIELD.TYPE_INT32, "2")},
    "Normalizer": {"precompiled_charsmap": (2, _FIELD.TYPE_BYTES, ""),
                   "add_dummy_prefix": (3, _FIELD.TYPE_BOOL, "true"),
                   "remove_extra_whitespaces": (4, _FIELD.TYPE_BOOL, "true"),
                   "escape_whitespaces": (5, _FIELD.TYPE_BOOL, "true")},
}  # fmt: skip


def read_model(file: Path, prefix_at_start_only: bool) -> tuple[Pieces, dict[str, str]]:
    """The pieces, and the texts of BOS and EOS (`bos_token`, `eos_token`) where there are any.

    TokenizerError names what is damaged or not built.
    """
    try:
        model = _message_class().FromString(file.read_bytes())
    except DecodeError:
        raise TokenizerError(f"{file} is not a SentencePiece model") from None
    if not model.pieces:
        raise TokenizerError(f"{file} is not a SentencePiece model: it has no pieces")
    kind = _KINDS.get(model.trainer.model_type, str(model.trainer.model_type))
    if kind != "bpe":
        raise TokenizerError(f"{file}: SentencePiece of kind {kind}: not built; bpe is")
    if model.trainer.blank_behind or not model.normalizer.escape_whitespaces:
        raise TokenizerError(f"{file}: blanks behind words, or as they are: not built")
    texts = [piece.piece for piece in model.pieces]
    ids = {"bos_token": model.trainer.bos_id, "eos_token": model.trainer.eos_id}
    pieces = Pieces(
        texts=texts,
        scores=[piece.score for piece in model.pieces],
        types=[piece.type for piece in model.pieces],
        adds_prefix=model.normalizer.add_dummy_prefix,
        prefix_at_start_only=prefix_at_start_only,
        removes_extra_blanks=model.normalizer.remove_extra_whitespaces,
        characters=model.normalizer.precompiled_charsmap,
    )
    return pieces, {name: texts[index] for name, index in ids.items() if 0 <= index < len(texts)}


@functools.cache
def _message_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="pieces.proto", package="pieces", syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, default) in fields.items():
            message.field.add(name=field, number=number, type=kind, label=_FIELD.LABEL_OPTIONAL, default_value=default)
    model = file.message_type.add(name="Model")
    for number, (field, name, label) in enumerate(
        (("pieces", "Piece", _FIELD.LABEL_REPEATED), ("trainer", "Trainer", _FIELD.LABEL_OPTIONAL),
         ("normalizer", "Normalizer", _FIELD.LABEL_OPTIONAL)), start=1
    ):  # fmt: skip
        model.field.add(name=field, number=number, type=_FIELD.TYPE_MESSAGE, type_name=f".pieces.{name}", label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pieces.Model"))
