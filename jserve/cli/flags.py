"""Command-line flags for every setting: `--section.field value`, and short names for the common ones.

A flag overrides a key of `--config`.  Knows argparse and nothing of what the settings do.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from dataclasses import dataclass

from jserve.cli import config_file
from jserve.config import Config, ConfigError
from jserve.config_ranges import check_ranges

NEAR = 0.6


@dataclass(frozen=True)
class Alias:
    """A short flag for one setting.  `fixed` is the value of a flag that takes none."""

    flags: tuple[str, ...]
    key: str
    metavar: str = ""
    help: str = ""
    fixed: bool | None = None
    group: str = "model and engine"


ALIASES = (
    Alias(("-m", "--model"), "model.path", "MODEL", "smollm2-135m, a GGUF file, a folder, hf:org/name, gs://bucket/folder"),
    Alias(("--dtype",), "model.dtype", "DTYPE", "weights and activations: float32 or bfloat16"),
    Alias(("--context",), "model.context_length", "TOKENS", "longest prompt + output"),
    Alias(
        ("--generation-config",), "model.generation_config", "auto|none", "none: ignore the model's sampling defaults"
    ),
    Alias(("--quantize",), "model.quantize", "none|int8", "int8: a quarter of the weight bytes, 8-bit products"),
    Alias(("--kv-dtype",), "kv.dtype", "DTYPE", "the KV cache: f32, f16, bf16, int8 or fp8"),
    Alias(("--kv-memory",), "kv.memory_bytes", "BYTES", "size of the KV cache"),
    Alias(("--no-prefix-cache",), "kv.prefix_cache", help="never reuse the KV of equal prefixes", fixed=False),
    Alias(("--max-num-seqs",), "scheduler.max_num_seqs", "N", "sequences that run at the same time"),
    Alias(("--max-num-batched-tokens",), "scheduler.max_num_batched_tokens", "N", "token budget of one step"),
    Alias(("--tensor-parallel-size", "--tp"), "parallel.tensor_parallel_size", "N", "devices that share the model"),
    Alias(("--no-overlap",), "scheduler.overlap", help="wait for each step before planning the next", fixed=False),
    Alias(("--policy",), "scheduler.policy", "NAME", "fcfs, priority, shortest-remaining, longest-prefix or fair"),
    Alias(("--target-tbt-ms",), "scheduler.target_tbt_ms", "MS", "gap between tokens that steps with prefill keep"),
    Alias(("--step-log",), "scheduler.step_log", "FILE", "log every decision of the scheduler, for `jserve replay`"),
    Alias(("--deterministic",), "compile.deterministic", help="the same bits in every batch; slower", fixed=True),
    Alias(("--forbid-compile",), "compile.forbid_compile", help="a compile after start is an error", fixed=True),
    Alias(("--bundle",), "compile.bundle", "FOLDER", "executables that `jserve compile` made: nothing is compiled"),
    Alias(("--cache-dir",), "compile.cache_dir", "FOLDER", "compiled programs and fetched models"),
    Alias(("--served-name",), "model.served_name", "NAME", "the name clients see", group="server"),
    Alias(("--host",), "server.host", "ADDRESS", "address to listen on", group="server"),
    Alias(("--port",), "server.port", "PORT", "gRPC port; 0 picks a free one", group="server"),
    Alias(("--http-port",), "server.http_port", "PORT", "OpenAI-compatible HTTP beside gRPC", group="server"),
    Alias(("--metrics-port",), "server.metrics_port", "PORT", "Prometheus page", group="server"),
    Alias(("--tls-cert",), "server.tls_cert", "FILE", "PEM certificate chain of the server", group="server"),
    Alias(("--tls-key",), "server.tls_key", "FILE", "PEM key of the certificate", group="server"),
    Alias(("--tls-client-ca",), "server.tls_client_ca", "FILE", "PEM CAs of client certificates: mutual TLS",
          group="server"),
    Alias(("--auth-file",), "server.auth_file", "FILE", "hashed bearer tokens, tenants and limits (`jserve token`)",
          group="server"),
    Alias(("--trusted-proxies",), "server.trusted_proxies", "NAMES", "client certificates that may name the tenant",
          group="server"),
    Alias(
        ("--insecure",),
        "server.insecure",
        help="listen beyond this machine without TLS or tokens",
        fixed=True,
        group="server",
    ),
)


class Parser(argparse.ArgumentParser):
    """argparse that suggests the nearest flag, never guesses abbreviations, and exits 2 with one line."""

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(*args, **kwargs)

    def parse_args(self, args=None, namespace=None):
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return namespace

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"unexpected argument {argument!r}"
        flag = argument.split("=", 1)[0]
        known = [option for option in self._option_string_actions if option.startswith("--")]
        near = difflib.get_close_matches(flag, known, n=1, cutoff=NEAR)
        same_field = [option for option in known if "." in flag and option.split(".")[-1] == flag.split(".")[-1]]
        found = near or same_field
        return f"unknown flag {flag}" + (f"; did you mean {found[0]}?" if found else f"; see `{self.prog} --help-all`")

    def error(self, message: str):
        print(f"{self.prog}: {message}", file=sys.stderr)
        print(f"try: {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog):
        super().__init__(prog, max_help_position=34, width=112)


def add_config_flags(parser: argparse.ArgumentParser, server: bool = False) -> None:
    """Adds --config, the short names, --help-all and `--section.field` for every setting to a command's parser."""
    parser.set_defaults(settings=())
    groups = {"model and engine": parser.add_argument_group("model and engine")}
    groups["model and engine"].add_argument("-c", "--config", metavar="FILE", help="TOML file; flags override its keys")
    if server:
        groups["server"] = parser.add_argument_group("server")
    for alias in ALIASES:
        if alias.group in groups:
            _add_alias(groups[alias.group], alias)
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="every setting, with its default")
    for setting in config_file.settings():
        names = _dotted(setting.key)
        parser.add_argument(
            *names, dest="settings", action=_Set, key=setting.key, help=argparse.SUPPRESS, metavar="VALUE"
        )


def config_from(arguments: argparse.Namespace) -> Config:
    """The defaults, the file over them, the flags over both.  Raises ConfigError."""
    config = config_file.load(arguments.config) if arguments.config else Config()
    config = config_file.override(config, dict(arguments.settings))
    check_ranges(config)
    return config


def config_to_flags(arguments: argparse.Namespace) -> list[str]:
    """The flags that give another process the same config."""
    config = ["--config", arguments.config] if arguments.config else []
    return config + [f"--{key}={_text(value)}" for key, value in arguments.settings]


def every_setting() -> str:
    """The text of --help-all: settings by section, each with its default and its line of doc."""
    lines = [
        "Every setting, as a key of a --config file ([section] field = value) or as a flag (--section.field value):"
    ]
    for section in config_file.sections():
        lines.append(f"\n[{section}]")
        for setting in config_file.settings():
            if setting.section == section:
                lines.append(f"  --{setting.key} (default {_default(setting)})\n      {setting.doc}")
    return "\n".join(lines)


class _Set(argparse.Action):
    """Appends (key, value) to `settings`, so that the last flag wins and unset ones leave the file's value."""

    def __init__(self, *args, key: str, fixed: bool | None = None, **kwargs):
        self.key, self.fixed = key, fixed
        super().__init__(*args, nargs=None if fixed is None else 0, **kwargs)

    def __call__(self, parser, namespace, text, option_string=None):
        try:
            value = config_file.parsed(config_file.find(self.key), text) if self.fixed is None else self.fixed
        except ConfigError as error:
            named = option_string in _dotted(self.key)
            parser.error(str(error) if named else f"{option_string}: {error}")
        namespace.settings = (*namespace.settings, (self.key, value))


class _HelpAll(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        parser.print_help()
        print("\n" + every_setting())
        parser.exit()


def _add_alias(group, alias: Alias) -> None:
    default = "" if alias.fixed is not None else f" [{_default(config_file.find(alias.key))}]"
    group.add_argument(
        *alias.flags,
        dest="settings",
        action=_Set,
        key=alias.key,
        fixed=alias.fixed,
        help=(alias.help + default).replace("%", "%%"),
        **({"metavar": alias.metavar} if alias.metavar else {}),
    )


def _dotted(key: str) -> tuple[str, ...]:
    """`--kv.block_size`, and with hyphens, as flags usually are."""
    return tuple(dict.fromkeys((f"--{key}", f"--{key.replace('_', '-')}")))


def _default(setting: config_file.Setting) -> str:
    if setting.default is None and "auto" not in setting.doc:
        return "unset"
    return _text(setting.default)


def _text(value: object) -> str:
    """A value as a flag spells it."""
    if value is None:
        return config_file.AUTO
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
