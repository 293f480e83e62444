"""The house: imports point one way, and the doors are light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "verl"
RANKS = [
    {"config"},
    {"columns", "layout", "batch", "seats", "metrics"},
    {"algorithms", "data", "models", "cluster", "dataflow"},
    {"rewards", "engines", "rollout", "checkpoint"},
    {"hybrid"},
    {"workers", "planner"},
    {"runtime"},
    {"trainer"},
    {"cli", "utils", "__init__"},
]
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
ONE_RANK_TOGETHER = {"columns", "layout", "batch", "seats"}  # single files of rank 1, not packages
FILES = sorted(PACKAGE.rglob("*.py"))


def room(module: str) -> str:
    """The room an import enters; names of the package itself (``verl.__version__``) are its doors."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in RANK else "__init__"


def imports(path: Path) -> list[tuple[str, bool]]:
    """Imported modules of our own, and whether only a type checker sees the import."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    found = []
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = [f"{module}.{a.name}" for a in node.names] if module == "verl" else [module]
        found += [(name, id(node) in typing_only) for name in names if name.split(".")[0] == "verl"]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_to_lower_ranks(path: Path):
    relative = path.relative_to(PACKAGE)
    own = relative.parts[0].removesuffix(".py")
    if own == "__init__":
        return  # the doors open every room, lazily
    assert own in RANK, f"room {own} has no rank"
    for module, typing_only in imports(path):
        other = room(module)
        if other == own or other == "__init__" or typing_only:
            continue
        lower = RANK[other] < RANK[own]
        beside = RANK[other] == RANK[own] and {other, own} <= ONE_RANK_TOGETHER | {"metrics"}
        assert lower or beside, f"{relative} (rank {RANK[own]}) imports {module} (rank {RANK[other]})"


@pytest.mark.parametrize(
    "module", ["verl", "verl.config.load", "verl.dataflow.graph", "verl.dataflow.nodes", "verl.seats", "verl.cli.main"]
)
def test_light_modules_load_neither_torch_nor_ray(module: str):
    code = f"import sys, {module}; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_importing_the_package_takes_less_than_300_ms():
    code = "import time; t = time.perf_counter(); import verl; print(time.perf_counter() - t)"
    best = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    )
    assert best < 0.3
