"""Which packages are there, in which versions, and combinations that are known not to work together."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Mapping

from jserve.doctor.finding import FAIL, OK, WARN, Finding

SHOWN = ("jax", "jaxlib", "flax", "orbax-checkpoint", "numpy", "grpcio", "protobuf", "tokenizers", "libtpu")
_CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_OLDEST_PYTHON = (3, 11)


def check_python() -> list[Finding]:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < _OLDEST_PYTHON:
        return [Finding("python", FAIL, text, "jserve needs Python 3.11 or newer: make PYTHON=python3.12 serve")]
    return [Finding("python", OK, text)]


def check_packages() -> list[Finding]:
    versions = installed()
    shown = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    unmet = _unmet(versions)
    findings = [Finding("packages", OK, shown)] if not unmet else []
    for requirement, found in unmet:
        findings.append(Finding(
            "packages", FAIL, f"{requirement} is required, {found or 'none'} is installed",
            f"{sys.executable} -m pip install '{requirement}'",
        ))
    return findings + combinations(versions)


def combinations(versions: Mapping[str, str]) -> list[Finding]:
    """What is wrong with packages that are each fine by themselves."""
    findings = []
    jax, jaxlib = versions.get("jax"), versions.get("jaxlib")
    if jax and jaxlib and _minor(jax) != _minor(jaxlib):
        findings.append(Finding(
            "packages", FAIL, f"jax {jax} with jaxlib {jaxlib}: they are released together",
            f"pip install --upgrade 'jax=={jax}' 'jaxlib=={jax}'",
        ))
    plugins = [name for name in _CUDA_PLUGINS if name in versions]
    if len(plugins) > 1:
        findings.append(Finding(
            "packages", FAIL, f"{' and '.join(plugins)} are both installed: jax loads either",
            f"pip uninstall {plugins[0]} {plugins[0].replace('plugin', 'pjrt')}",
        ))
    for name in plugins:
        if jaxlib and _minor(versions[name]) != _minor(jaxlib):
            findings.append(Finding(
                "packages", FAIL, f"{name} {versions[name]} with jaxlib {jaxlib}: jax leaves the GPU unused",
                f"pip install '{name}=={jaxlib}' '{name.replace('plugin', 'pjrt')}=={jaxlib}'",
            ))
    for name in ("grpcio-status", "grpcio-health-checking", "grpcio-reflection"):
        if name in versions and "grpcio" in versions and _minor(versions[name]) > _minor(versions["grpcio"]):
            findings.append(Finding(
                "packages", WARN, f"{name} {versions[name]} is newer than grpcio {versions['grpcio']}",
                f"pip install 'grpcio>={versions[name]}'",
            ))
    return findings


def installed() -> dict[str, str]:
    """{name as pip spells it, lower case: version} of everything installed."""
    found = {}
    for one in importlib.metadata.distributions():
        name = one.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), one.version)
    return found


def _unmet(versions: Mapping[str, str]) -> list[tuple[str, str | None]]:
    """(requirement, installed version) of jserve's own requirements that are not met."""
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(text) for text in importlib.metadata.requires("jserve") or ()]
    except (ImportError, importlib.metadata.PackageNotFoundError):  # run from a checkout that pip does not know
        return []
    unmet = []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = versions.get(requirement.name.lower().replace("_", "-"))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            unmet.append((f"{requirement.name}{requirement.specifier}", version))
    return unmet


def _minor(version: str) -> tuple[int, ...]:
    """(0, 10) of 0.10.2."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
