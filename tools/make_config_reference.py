"""Writes `docs/config.md`, every setting with its type and default: `python -m tools.make_config_reference`.

The dataclasses of `jserve.config` are the only source; a test compares the page with them.
"""

from __future__ import annotations

from pathlib import Path

from jserve.cli import config_file
from jserve.cli.config_file import Setting
from jserve.cli.flags import ALIASES

TARGET = Path(__file__).resolve().parents[1] / "docs" / "config.md"

HEAD = """\
# Settings

<!-- Generated from jserve/config.py: python -m tools.make_config_reference -->

A setting is a key of a TOML file given with `--config` (`[section]`, then `field = value`), or a flag
(`--section.field value`); common ones have a short flag too. A flag overrides the file, the file overrides the default.
An unknown key is an error that suggests the nearest. `auto` and `unset` are what a setting is when nobody sets it:
`auto` is resolved once at start, and GetServerInfo shows what it became. Ready-made files are in `configs/`.

```toml
[kv]
block_size = 64

[server]
port = 8000
```
"""


def reference() -> str:
    """The text of the page."""
    parts = [HEAD]
    for section in config_file.sections():
        parts.append(f"## [{section}]\n\n| key | type | default | flag | what it does |\n|---|---|---|---|---|")
        parts[-1] += "".join(f"\n{_row(setting)}" for setting in config_file.settings() if setting.section == section)
        parts[-1] += "\n"
    return "\n".join(parts)


def _row(setting: Setting) -> str:
    cells = (f"`{setting.name}`", _type(setting), _default(setting), _flags(setting), setting.doc)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(setting: Setting) -> str:
    return {bool: "true/false", int: "integer", float: "number", str: "string"}.get(setting.type, "list of integers")


def _default(setting: Setting) -> str:
    if setting.default is None:
        return "auto" if "auto" in setting.doc else "unset"
    if setting.default == "":
        return "empty"
    if isinstance(setting.default, bool):
        return f"`{str(setting.default).lower()}`"
    home = str(Path.home())  # the page must not depend on who writes it
    return f"`{str(setting.default).replace(home, '~')}`"


def _flags(setting: Setting) -> str:
    """The short spellings; the dotted one always works."""
    return ", ".join(f"`{flag}`" for alias in ALIASES if alias.key == setting.key for flag in alias.flags)


def main() -> None:
    TARGET.write_text(reference())
    print(TARGET)


if __name__ == "__main__":
    main()
