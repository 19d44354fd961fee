"""What every test shares: the platform and how slow tests are left out.  Fixtures live in tests/support, by piece."""

import os
from pathlib import Path

# Before anything imports jax.  A TPU or GPU run names its platform itself: `JAX_PLATFORMS=tpu pytest ...`.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest

SELECTED_BY_NAME_ONLY = ("soak", "compile")


def pytest_addoption(parser):
    minutes = float(os.environ.get("JSERVE_SOAK_MINUTES", 15))
    parser.addoption("--soak-minutes", type=float, default=minutes, help="length of each long soak test")


def pytest_collection_modifyitems(config, items):
    """Leaves soak and compile tests out unless -m names them (`-m soak`)."""
    expression = config.getoption("markexpr") or ""
    left_out = [name for name in SELECTED_BY_NAME_ONLY if name not in expression]
    dropped = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


@pytest.fixture(scope="session")
def repository_root():
    return Path(__file__).resolve().parents[1]
