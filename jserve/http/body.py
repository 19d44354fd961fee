"""The JSON object of a request's body, and `Fields`, from which every key must be taken: none is silently ignored."""

from __future__ import annotations

import difflib
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from jserve.http.errors import HttpRefusal
from jserve.request import Code, RequestError, invalid
from jserve.strict_json import without_duplicates

_MISSING = object()


async def read_fields(request: Request, max_bytes: int) -> Fields:
    """The body's fields.  HttpRefusal or RequestError where it is too large or no JSON object."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also what keeps a web page of another origin from posting here without the browser asking first.
        raise HttpRefusal(415, f"content-type {kind or 'unset'!r}: send the body as application/json")
    data = await _read(request, max_bytes)
    try:
        body = json.loads(data, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise RequestError(Code.INVALID_ARGUMENT, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(Code.INVALID_ARGUMENT, f"the body must be a JSON object, not {type(body).__name__}")
    return Fields(body)


class Fields:
    """Keys of one JSON object.  null counts as unset, as in OpenAI's API.  `finish` refuses what nobody took."""

    def __init__(self, values: dict[str, Any], path: str = ""):
        self._left = {name: value for name, value in values.items() if value is not None}
        self._path = path
        self._known: list[str] = []
        self.spelled: dict[str, str] = {}
        """Fields of SamplingParams that the body set by other names: how it called them."""

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *kinds: type, default: Any = None) -> Any:
        """The value, of one of `kinds` where any are given; `default` where it is unset."""
        self._known.append(name)
        value = self._left.pop(name, _MISSING)
        if value is _MISSING:
            return default
        if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            words = " or ".join(_WORDS[kind] for kind in kinds)
            raise invalid(self._path + name, value, f"must be {words}, not {type(value).__name__}")
        return value

    def take_object(self, name: str) -> Fields | None:
        value = self.take(name, dict)
        return None if value is None else Fields(value, f"{self._path}{name}.")

    def take_rest(self, kind: type) -> None:
        """Takes every key, whatever it is called; each value must be of this kind."""
        for name in list(self._left):
            self.take(name, kind)

    def take_neutral(self, name: str, *neutral: object) -> None:
        """Refuses the field unless its value asks for nothing."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            allowed = f"; only {' or '.join(map(repr, neutral))} is" if neutral else ""
            raise invalid(self._path + name, value, f"is not supported{allowed}")

    def finish(self) -> None:
        for name, value in self._left.items():
            near = difflib.get_close_matches(name, self._known, n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise invalid(self._path + name[:100], value, f"is not a field that this server supports{hint}")


_WORDS = {bool: "true or false", str: "a string", int: "an integer", dict: "an object", list: "a list"}


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = HttpRefusal(413, f"the body is larger than {max_bytes} bytes (server.max_message_bytes)")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise too_large
            parts.append(part)
    except ClientDisconnect:
        raise RequestError(Code.CANCELLED, "the client left before its request was complete") from None
    return b"".join(parts)


def take_prompts(fields: Fields, name: str, most: int) -> list[str] | list[list[int]]:
    """OpenAI's four forms of a field: a text, texts, token ids, lists of token ids."""
    given = fields.take(name, str, list)
    if given is None:
        raise RequestError(Code.INVALID_ARGUMENT, f"{name}: must be set", field=name)
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid(name, given, "must not be empty")
    if not isinstance(given[0], (str, list)):
        return [given]  # the validator refuses what is no token id
    if len(given) > most:
        raise invalid(name, f"{len(given)} {name}s", f"at most {most} are allowed in one call")
    for index, item in enumerate(given):
        if type(item) is not type(given[0]):
            raise invalid(f"{name}[{index}]", item, f"must be of the same kind as the first {name}")
    return given
