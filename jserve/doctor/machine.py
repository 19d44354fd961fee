"""Memory, disk, open files, ports and who may call: what the operating system has to give."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import stat
import tempfile
from pathlib import Path

from jserve.config import Config, ConfigError
from jserve.doctor.finding import FAIL, OK, WARN, Finding

_LITTLE_MEMORY, _LITTLE_DISK = 2 * 2**30, 2 * 10**9


def check_memory() -> list[Finding]:
    from jserve.runner.memory import available_host_bytes

    available = available_host_bytes()
    limit = _cgroup_limit()
    text = f"{available / 2**30:.1f} GiB of host memory available"
    if limit is not None and limit < available:
        text += f"; the container may use {limit / 2**30:.1f} GiB"
    if min(available, limit or available) < _LITTLE_MEMORY:
        return [Finding("memory", WARN, text, "end what is not needed; `jserve plan` says what a model takes")]
    return [Finding("memory", OK, text)]


def check_cache(config: Config) -> list[Finding]:
    folder = Path(config.compile.cache_dir).expanduser()
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            file.write(b"jserve doctor")
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return [Finding("cache", WARN, f"{folder}: {error.strerror or error}: every start compiles again",
                        f"--cache-dir FOLDER, or chown {folder} to this user")]
    findings = []
    text = f"{folder} is writable, {free / 1e9:.1f} GB free"
    if free < _LITTLE_DISK:
        findings.append(Finding("cache", WARN, text, "free some, or --cache-dir on another disk"))
    else:
        findings.append(Finding("cache", OK, text))
    # Executables are pickles: whoever may write them may run code as this user.
    executables = folder / "executables"
    if executables.is_dir() and executables.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        findings.append(Finding("cache", WARN, f"{executables} can be written by others", f"chmod go-w {executables}"))
    return findings


def check_files(config: Config) -> list[Finding]:
    """The server raises the soft limit by itself, so the hard one counts."""
    from jserve.server.open_files import wanted_files

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted, streams = wanted_files(config.server), config.server.max_concurrent_streams
    if 0 <= hard < wanted:
        text = f"{hard} open files allowed at most; {streams} callers with a connection each need {wanted}"
        return [Finding("files", WARN, text, f"as root: ulimit -Hn {wanted}, or LimitNOFILE={wanted} in the systemd unit")]
    return [Finding("files", OK, f"{soft} open files allowed" + (f", {wanted} when asked" if 0 <= soft < wanted else ""))]


def check_server(config: Config) -> list[Finding]:
    """Ports, host, certificates and tokens, by the server's own checks."""
    from jserve.access.auth_file import read_auth_file
    from jserve.access.certificates import certificates
    from jserve.server import listen

    section, findings, used = config.server, [], []
    try:
        listen.check_host(section)
        for key in ("port", "http_port", "metrics_port"):
            port = getattr(section, key)
            if port:
                listen.check_port(f"server.{key}", section.host, port)
                used.append(str(port))
        findings += [Finding("server", WARN, text) for text in listen.warnings(section)]
    except ConfigError as error:
        findings.append(Finding("server", FAIL, str(error)))
    try:
        if (source := certificates(section)) is not None:
            source.current()
        if section.auth_file:
            read_auth_file(section.auth_file)
    except (ConfigError, OSError) as error:
        findings.append(Finding("server", FAIL, str(error)))
    for key in ("tls_key", "auth_file"):
        path = getattr(section, key)
        with contextlib.suppress(OSError):
            if path and Path(path).stat().st_mode & stat.S_IROTH:
                text = f"server.{key}: {path} can be read by everybody"
                step = f"chmod o-r {path}; owner or group must be the server's user"
                findings.append(Finding("server", WARN, text, step))
    if not findings:
        findings.append(Finding("server", OK, f"port {', '.join(used) or 'any'} on {section.host} free to listen on"))
    return findings


def check_model(config: Config) -> list[Finding]:
    """Headers only; nothing is fetched."""
    from jserve.models.config import ModelError
    from jserve.weights.checkpoint import open_checkpoint
    from jserve.weights.fetch import KNOWN, on_disk

    name = config.model.path
    path = on_disk(name, config.compile.cache_dir)
    if path is None:
        if name in KNOWN or name.startswith(("hf:", "gs://")):
            return [Finding("model", OK, f"{name} is not on disk yet", f"jserve fetch {name}")]
        return [Finding("model", FAIL, f"model.path = {name!r}: no such file or folder",
                        "name a GGUF file, a model folder, or smollm2-135m")]
    try:
        checkpoint = open_checkpoint(path)
    except (ModelError, OSError) as error:
        return [Finding("model", FAIL, str(error), "fetch or convert it again")]
    kind = "Orbax" if checkpoint.arrays else "GGUF" if path.is_file() else "safetensors"
    return [Finding("model", OK, f"{path}: {kind}, {checkpoint.config.architecture}, "
                                 f"context {checkpoint.config.context_length}")]


def _cgroup_limit() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
