"""The import graph has one direction and no cycles, and processes are asked for capabilities, not for their class."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "m2s"

# Each layer may import from the layers before it; names on one line may not import each other.
LAYERS = [
    ["version", "errors", "rng", "dtypes", "modes", "transforms", "patches"],
    ["io", "npz", "validation", "registry", "devices", "heartbeat"],
    ["provenance", "distributed"],
    ["process"],
    ["conversions"],
    ["ops"],
    ["heads"],
    ["realizability"],
    ["losses", "samplers"],
    ["models"],
    ["methods"],
    ["data"],
    ["hub"],
    ["evaluation"],
    ["training"],
    ["report"],
    ["presets"],
    ["benchmark"],
    ["cli"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
PROCESSES = ("Process", "RankOne", "Uniform", "Absorbing", "Hybrid", "RateMatrix", "Chain")


def package_of(path: Path) -> str:
    """The subpackage or top-level module that a file belongs to; empty for m2s/__init__.py."""
    return "" if path == PACKAGE / "__init__.py" else path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def type_checking_only(tree: ast.Module) -> set[ast.AST]:
    """The nodes inside `if TYPE_CHECKING:`, which is never executed."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {inner for block in blocks for part in block.body for inner in ast.walk(part)}


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(imported subpackage, line, whether at module level) of every import of m2s in a file."""
    tree = tree_of(path)
    skipped, top = type_checking_only(tree), set(tree.body)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module == "m2s":
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("m2s."):
            names = [str(node.module).split(".")[1]]
        elif isinstance(node, ast.Import):
            names = [alias.name.partition(".")[2].split(".")[0] for alias in node.names if alias.name.split(".")[0] == "m2s"]
        for name in names:
            yield name, node.lineno, node in top


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_package_has_a_layer() -> None:
    found = {package_of(path) for path in FILES} - {"", "py"}
    assert found == set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_direction(path: Path) -> None:
    """Also imports inside functions: they must not exist only because of a cycle."""
    here = package_of(path)
    if here == "":  # m2s/__init__.py collects the public names
        return
    for name, line, _ in imports(path):
        if name in ("", "__version__") or name == here:  # `import m2s` itself
            assert LEVEL[here] >= LEVEL["report"] or name != "", f"{path}:{line} imports m2s itself"
            continue
        assert LEVEL.get(name, -1) < LEVEL[here] or name not in LEVEL, f"{path}:{line}: {here} must not import {name}"


def test_modules_have_no_cycle() -> None:
    """The graph of modules, with imports at module level only, is acyclic."""
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES}
    edges: dict[str, set[str]] = {}
    for name, path in modules.items():
        tree = tree_of(path)
        skipped = type_checking_only(tree)
        edges[name] = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node not in skipped and (node.module or "").startswith("m2s"):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    edges[name].add(next((one for one in (full, f"{full}.__init__", str(node.module)) if one in modules), ""))
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name in done or name not in edges:
            return
        for other in edges[name]:
            visit(other, (*trail, name))
        done.add(name)

    for name in modules:
        visit(name, ())


def test_nothing_imports_the_command_line() -> None:
    assert not [
        path
        for path in FILES
        if package_of(path) != "cli" and any(name == "cli" for name, *_ in imports(path)) and package_of(path)
    ]


def test_capabilities_in_place_of_isinstance() -> None:
    """At most ten isinstance tests on processes outside m2s/process."""
    pattern = re.compile(rf"\b({'|'.join(PROCESSES)})\b")
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in FILES
        if package_of(path) != "process"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and pattern.search(ast.unparse(node.args[1]))
    ]
    assert len(found) <= 10, "\n".join(found)
