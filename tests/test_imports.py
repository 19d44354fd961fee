"""The arrows between packages point down (the floors of the design), and what must do without jax does."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FLOORS = (
    ("jserve.config", "jserve.clock", "jserve.request", "jserve.strict_json", "jserve.metrics", "jserve.tokenizer",
     "jserve.proto_gen", "pallas_kernels"),
    ("jserve.kv", "jserve.parallel", "jserve.sampling", "jserve.grammar", "jserve.router", "jserve.access",
     "jserve.config_ranges"),
    ("jserve.scheduler", "jserve.models"),
    ("jserve.runner", "jserve.weights", "jserve.tiers"),
    ("jserve.lora", "jserve.speculative"),
    ("jserve.engine", "jserve.planner"),
    (
        "jserve.server",
        "jserve.http",
        "jserve.llm",
        "jserve.results",
        "jserve.local_engine",
        "jserve.loop_thread",
        "jserve.bench",
        "jserve.simulator",
        "jserve.doctor",
        "jserve.cli",
    ),
    ("tools",),
)
FLOOR_OF = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
ENTRANCE = "jserve"
"""`jserve/__init__.py`: hands out names of every floor, lazily."""


def test_every_package_has_a_floor():
    packages = {package_of(module_of(path)) for path in source_files()} - {ENTRANCE}
    assert packages <= set(FLOOR_OF)


def test_imports_point_down():
    upward = [
        f"{source} imports {target}"
        for source, target in arrows()
        if FLOOR_OF[package_of(target)] > FLOOR_OF[package_of(source)]
    ]
    assert upward == []


def test_packages_of_one_floor_do_not_import_each_other_in_a_circle():
    edges = {(package_of(source), package_of(target)) for source, target in arrows()}
    edges = {(source, target) for source, target in edges if source != target}
    reachable = edges
    while True:
        longer = reachable | {(a, d) for a, b in reachable for c, d in edges if b == c}
        if longer == reachable:
            break
        reachable = longer
    assert sorted(package for package, other in reachable if package == other) == []


def test_kernels_know_nothing_of_the_engine():
    assert [f"{source} imports {target}" for source, target in arrows() if source.startswith("pallas_kernels")] == []


WITHOUT_JAX = (
    "jserve.config",
    "jserve.request",
    "jserve.kv",
    "jserve.scheduler",
    "jserve.grammar",
    "jserve.planner.report",
    "jserve.planner.bucket_choice",
    "jserve.cli.main",
)


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_imports_without_jax(module):
    if not (ROOT / module.replace(".", "/")).is_dir() and not (ROOT / f"{module.replace('.', '/')}.py").exists():
        pytest.skip(f"{module} is not built yet")
    modules = loaded_by(f"import {module}")
    assert "jax" not in modules
    assert "grpc" not in modules


def test_import_jserve_loads_nothing_heavy():
    modules = loaded_by("import jserve; jserve.__version__")
    assert not modules & {"jax", "numpy", "grpc", "asyncio", "flax", "tokenizers", "rich"}


def test_public_names_load_on_first_use():
    assert "jserve.request" in loaded_by("from jserve import SamplingParams")
    assert "jserve.llm" in loaded_by("from jserve import LLM")


def test_an_unknown_name_of_jserve_is_an_attribute_error():
    import jserve

    with pytest.raises(AttributeError, match="LMM"):
        _ = jserve.LMM


def arrows() -> list[tuple[str, str]]:
    """(importing module, imported module) for every import between our packages, those inside functions included."""
    found = []
    for path in source_files():
        source = module_of(path)
        if source == ENTRANCE:
            continue
        for target in imported_by(ast.parse(path.read_text()), source):
            if package_of(target) != package_of(source) and package_of(target) in FLOOR_OF:
                found.append((source, target))
    assert found
    return found


def imported_by(tree: ast.AST, source: str) -> list[str]:
    if isinstance(tree, ast.If) and ast.unparse(tree.test).endswith("TYPE_CHECKING"):
        return []
    if isinstance(tree, ast.Import):
        return [alias.name for alias in tree.names]
    if isinstance(tree, ast.ImportFrom):
        if tree.level:
            return [source]  # relative: within its own package
        # `from jserve import kv` names a package, `from jserve.kv import BlockPool` is in one.
        return [f"{tree.module}.{alias.name}" for alias in tree.names]
    return [name for child in ast.iter_child_nodes(tree) for name in imported_by(child, source)]


def source_files() -> list[Path]:
    return [path for folder in ("jserve", "pallas_kernels", "tools") for path in (ROOT / folder).rglob("*.py")]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """jserve.kv of jserve.kv.block_pool; pallas_kernels of anything in it."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "jserve" else parts[0]


def loaded_by(statement: str) -> set[str]:
    """Names of the modules that a fresh python has after `statement`."""
    code = f"{statement}\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())
