"""Bytes of a request -> message, or the RequestError that says what is wrong with them.

protobuf's own parser says only that it failed, and gRPC would answer INTERNAL; here a client learns which field.
Unknown fields are refused by number: what this server does not know it must not ignore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from google.protobuf import message as protobuf
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from jserve.request import Code, RequestError

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5


def decoder(descriptor: Descriptor) -> Callable[[bytes], protobuf.Message | RequestError]:
    """A gRPC request deserializer that returns an error instead of raising it."""
    message_class = GetMessageClass(descriptor)

    def decode(data: bytes) -> protobuf.Message | RequestError:
        try:
            message = message_class.FromString(data)
        except protobuf.DecodeError:
            return _explain(descriptor, data)
        try:
            refuse_unknown_fields(message)
        except RequestError as error:
            return error
        return message

    return decode


def refuse_unknown_fields(message: protobuf.Message, path: str = "") -> None:
    """Raises INVALID_ARGUMENT that names the number of a field which is not in this server's protos."""
    for unknown in UnknownFieldSet(message):
        name = f"{path}{unknown.field_number}"
        raise RequestError(
            Code.INVALID_ARGUMENT,
            f"{path.rstrip('.') or message.DESCRIPTOR.name}: field number {unknown.field_number} is not known to this"
            " server (is the client newer?)",
            field=name,
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if isinstance(value, protobuf.Message):
            refuse_unknown_fields(value, f"{path}{field.name}.")
        else:
            for index, item in enumerate(value):
                refuse_unknown_fields(item, f"{path}{field.name}[{index}].")


def _explain(descriptor: Descriptor, data: bytes) -> RequestError:
    path = _first_invalid_string(descriptor, data)
    if path is not None:
        return RequestError(Code.INVALID_ARGUMENT, f"{path}: not valid UTF-8", field=path)
    return RequestError(Code.INVALID_ARGUMENT, f"the request is not a valid {descriptor.full_name} message")


def _first_invalid_string(descriptor: Descriptor, data: bytes, path: str = "") -> str | None:
    """Path of the first string field that is not UTF-8; None where there is none before the message breaks."""
    seen: dict[int, int] = {}
    try:
        for number, value in _length_delimited_fields(data):
            field = descriptor.fields_by_number.get(number)
            if field is None:
                continue
            name = path + field.name
            if field.is_repeated:
                seen[number] = seen.get(number, -1) + 1
                name += f"[{seen[number]}]"
            if field.type == FieldDescriptor.TYPE_STRING:
                try:
                    value.decode()
                except UnicodeDecodeError:
                    return name
            elif field.type == FieldDescriptor.TYPE_MESSAGE:
                inner = _first_invalid_string(field.message_type, value, f"{name}.")
                if inner is not None:
                    return inner
    except (IndexError, ValueError):  # the bytes end early, or are no protobuf at all
        pass
    return None


def _length_delimited_fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(field number, payload) of the length-delimited fields, in wire order."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, position = _varint(data, position)
        elif wire_type == _FIXED64:
            position += 8
        elif wire_type == _FIXED32:
            position += 4
        elif wire_type == _LENGTH_DELIMITED:
            length, position = _varint(data, position)
            if length > len(data) - position:
                raise ValueError("the bytes end inside a field")
            yield tag >> 3, data[position:position + length]
            position += length
        else:
            raise ValueError(f"wire type {wire_type}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("a varint of more than ten bytes")
