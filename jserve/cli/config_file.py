"""Settings from a TOML file or from flag texts into a `Config`: what exists, of which type, and what to say when not.

The dataclasses in `jserve.config` are the only list of settings; keys, types and help texts are read from there.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jserve import config as config_module
from jserve.config import BadUsage, Config, ConfigError

AUTO = "auto"


@dataclass(frozen=True)
class Setting:
    """One field of one section: `kv.block_size`."""

    section: str
    name: str
    type: type
    """bool, int, float, str, or tuple (of ints)."""
    optional: bool
    """True where None (`auto`) is a value."""
    default: object
    doc: str

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def expected(self) -> str:
        """What a value has to be, in words: `an integer or "auto"`."""
        word = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}.get(
            self.type, "a list of integers"
        )
        return f'{word} or "{AUTO}"' if self.optional and self.type is not str else word


def load(path: str | Path) -> Config:
    """The file's settings over the defaults.  Raises ConfigError naming file, key, value and what would do."""
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadUsage(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise BadUsage(f"{path}: cannot read the config file: {error.strerror}") from None
    try:
        return from_tables(tables)
    except ConfigError as error:
        raise BadUsage(f"{path}: {error}") from None


def from_tables(tables: Mapping[str, object]) -> Config:
    """A Config from `{section: {field: value}}`, as TOML gives it."""
    return override_tables(Config(), tables)


def override_tables(config: Config, tables: Mapping[str, object]) -> Config:
    """A copy of `config` with the tables' fields set; ConfigError for what does not exist or has a wrong type."""
    values = {}
    for section, table in tables.items():
        if section not in sections():
            raise BadUsage(f"unknown section [{section}]{_suggest(section, sections())}")
        if not isinstance(table, Mapping):
            raise BadUsage(f"{section} = {table!r}: expected a section, [{section}] and its keys below it")
        for name, value in table.items():
            setting = find(f"{section}.{name}")
            values[setting.key] = checked(setting, value)
    return override(config, values)


def override(config: Config, values: Mapping[str, object]) -> Config:
    """A copy of `config` with `{"section.field": checked value}` set."""
    by_section: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, name = key.split(".", 1)
        by_section.setdefault(section, {})[name] = value
    for section, fields in by_section.items():
        config = config.replace(section, **fields)
    return config


def find(key: str) -> Setting:
    """The setting called `section.field`; ConfigError with the nearest names where there is none."""
    for setting in settings():
        if setting.key == key:
            return setting
    raise BadUsage(f"unknown key {key}{_suggest(key, [setting.key for setting in settings()])}")


def checked(setting: Setting, value: object) -> object:
    """The value as the field wants it (a list becomes a tuple, 1 a float); ConfigError for a wrong type."""
    if setting.optional and (value is None or value == AUTO):
        return None
    if setting.type is tuple:
        if isinstance(value, (list, tuple)) and all(_is_integer(item) for item in value):
            return tuple(value)
    elif setting.type is float:
        if (_is_integer(value) or isinstance(value, float)) and math.isfinite(value):
            return float(value)
    elif setting.type is int:
        if _is_integer(value):
            return value
    elif isinstance(value, setting.type):
        return value
    raise BadUsage(f"{setting.key} = {_shown(value)}: expected {setting.expected}")


def parsed(setting: Setting, text: str) -> object:
    """The value that a flag's text spells: `512`, `true`, `16,64,512`, `auto`."""
    if setting.optional and text == AUTO:
        return None
    try:
        if setting.type is bool:
            return {"true": True, "false": False}[text.lower()]
        if setting.type is tuple:
            inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
            return tuple(int(part) for part in inside.split(","))
        return checked(setting, setting.type(text))
    except (KeyError, ValueError):
        raise BadUsage(f"{setting.key} = {text!r}: expected {setting.expected}") from None


@functools.cache
def sections() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(Config))


@functools.cache
def settings() -> tuple[Setting, ...]:
    """Every setting, in the order of `jserve.config`."""
    defaults, docs, found = Config(), _docs(), []
    for section in sections():
        section_default = getattr(defaults, section)
        hints = typing.get_type_hints(type(section_default))
        for field in dataclasses.fields(section_default):
            plain, optional = _unwrapped(hints[field.name])
            found.append(
                Setting(
                    section=section,
                    name=field.name,
                    type=plain,
                    optional=optional,
                    default=getattr(section_default, field.name),
                    doc=docs[type(section_default).__name__].get(field.name, ""),
                )
            )
    return tuple(found)


def _docs() -> dict[str, dict[str, str]]:
    """{class name: {field: the docstring line under it}}: python keeps no docstrings of fields, so read the source."""
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(config_module)).body:
        if isinstance(node, ast.ClassDef):
            docs[node.name] = {
                field.target.id: " ".join(text.value.value.split())
                for field, text in itertools.pairwise(node.body)
                if isinstance(field, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            }
    return docs


def _unwrapped(hint: object) -> tuple[type, bool]:
    """(plain type, whether None is allowed): `int | None` -> (int, True), `tuple[int, ...]` -> (tuple, False)."""
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        optional, hint = len(members) < len(typing.get_args(hint)), members[0]
    return typing.get_origin(hint) or hint, optional


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean kv.block_size?`, or the whole list where nothing is near and the list is short."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    # kv.max_num_seqs exists, but in another section.
    same_field = [key for key in known if key.split(".")[-1] == name.split(".")[-1] and "." in key]
    if same_field or near:
        return f"; did you mean {(same_field or near)[0]}?"
    return f"; known: {', '.join(known)}" if len(known) < 12 else "; `jserve serve --help-all` lists every setting"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
