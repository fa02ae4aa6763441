"""Which package may import which (architecture, section 2). Every import counts, also one inside a function or for
types only.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "src" / "isthmus"
BASE = frozenset({"compiling", "errors", "tensors", "seeds", "records", "registry"})
ENGINES = "federation.engines"

MAY_IMPORT: dict[str, frozenset[str]] = {
    "graph": frozenset(),
    "privacy": frozenset(),
    "metrics": frozenset(),
    "data": frozenset({"graph"}),
    "nn": frozenset({"graph"}),
    "federation": frozenset({"privacy", "data"}),
    "methods": frozenset({"graph", "privacy", "metrics", "data", "nn", "federation"}),
    "preparation": frozenset({"federation", "data", "privacy"}),
    "experiments": frozenset({"preparation", "methods", "federation", "data", "metrics"}),
    "deploy": frozenset({"preparation", "experiments", "methods", "federation", "privacy", "data"}),
    "papers": frozenset({"experiments", "metrics"}),
    "report": frozenset({"metrics"}),
    "api": frozenset({"experiments", "papers", "report", "methods", "federation", "nn", "data", "metrics"}),
}
ANYTHING = frozenset({"cli", "testing", ""})
"""``cli`` and ``testing`` see all; the package itself (``""``) hands out what users call."""
NO_ENGINE = frozenset({"methods"})


def _package(module: str) -> str:
    """The package of ``isthmus.nn.gcn`` is ``nn``; of ``isthmus`` itself, the empty name."""
    return module.split(".")[1] if "." in module else ""


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _known(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def _imports(tree: ast.AST, module: str, *, package: bool) -> list[tuple[int, str]]:
    """Line and full name of every isthmus module that is imported; relative imports resolved."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            anchor = module.split(".")[: len(module.split(".")) - node.level + package] if node.level else []
            base = ".".join([*anchor, *([node.module] if node.module else [])])
            # `from isthmus import federation` imports a package; `from isthmus import __version__` imports a name of
            # the package.
            found += [
                (node.lineno, f"{base}.{alias.name}" if _known(f"{base}.{alias.name}") else base)
                for alias in node.names
            ]
    return sorted({(line, name) for line, name in found if name.split(".")[0] == "isthmus"})


def _allowed(module: str, imported: str) -> bool:
    package, other = _package(module), _package(imported)
    if package in ANYTHING or other == package or other == "":
        return package not in BASE or other in BASE
    if package in BASE:
        return other in BASE
    if package in NO_ENGINE and f"{imported}.".startswith(f"isthmus.{ENGINES}."):
        return False
    return other in BASE or other in MAY_IMPORT[package]


def _violations(source: str, path: Path) -> list[str]:
    module = _module(path)
    tree = ast.parse(source)
    return [
        f"{path.relative_to(ROOT.parent)}:{line} imports {imported}"
        for line, imported in _imports(tree, module, package=path.name == "__init__.py")
        if not _allowed(module, imported)
    ]


def test_every_package_is_in_the_table() -> None:
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    packages |= {path.stem for path in ROOT.glob("*.py") if path.stem != "__init__"}
    assert packages <= set(MAY_IMPORT) | ANYTHING | BASE


def test_the_arrows_hold() -> None:
    violations = [line for path in sorted(ROOT.rglob("*.py")) for line in _violations(path.read_text(), path)]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    ("file", "source", "bad"),
    [
        ("nn/gcn.py", "from isthmus.data.node_data import NodeData", True),
        ("nn/gcn.py", "from isthmus.graph.reach import reach", False),
        ("nn/gcn.py", "from isthmus.errors import DataError", False),
        ("nn/gcn.py", "from isthmus import methods", True),
        ("nn/gcn.py", "from isthmus import __version__", False),
        ("nn/gcn.py", "from ..data import node_data", True),
        ("nn/gcn.py", "from . import sage", False),
        ("nn/__init__.py", "from .gcn import Gcn", False),
        ("nn/__init__.py", "from ..data.node_data import NodeData", True),
        ("nn/gcn.py", "def f():\n    import isthmus.federation.codec", True),
        ("methods/fedavg.py", "from isthmus.federation.roles import Role", False),
        ("methods/fedavg.py", "from isthmus.federation.engines.local import LocalEngine", True),
        ("methods/fedavg.py", "from isthmus.federation.engines import local", True),
        ("methods/fedavg.py", "from isthmus.federation import engines", True),
        ("methods/fedavg.py", "import isthmus.experiments.run", True),
        ("experiments/run.py", "from isthmus.federation.engines.local import LocalEngine", False),
        ("experiments/run.py", "from isthmus.report import page", True),
        ("report/page.py", "from isthmus.experiments.folder import RunFolder", True),
        ("report/page.py", "from isthmus.metrics.spread import spread", False),
        ("federation/party.py", "from isthmus.methods.registry import Method", True),
        ("federation/party.py", "from isthmus.nn.gcn import Gcn", True),
        ("tensors.py", "from isthmus.errors import ProtocolError", False),
        ("tensors.py", "from isthmus.graph import reach", True),
        ("seeds.py", "import isthmus", True),
        ("cli/run.py", "from isthmus.report import page", False),
        ("graph/reach.py", "import torch, isthmus.privacy", True),
    ],
)
def test_the_test_can_fail(file: str, source: str, bad: bool) -> None:
    assert bool(_violations(source, ROOT / file)) is bad
