"""The import graph has one direction and no cycles, and processes are asked for capabilities, not for their class."""

import ast
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "m2s"

# Each layer may import from the layers before it; names on one line may not import each other.
LAYERS = [
    ["version", "startup", "errors", "rng", "dtypes", "modes", "transforms", "patches", "progress"],
    ["io"],
    ["npz", "validation", "registry", "devices", "heartbeat", "network", "remote"],
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
PROCESSES = ("Process", "RankOne", "Uniform", "Absorbing", "Hybrid", "RateMatrix", "Chain", "Shifted")


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


MODULES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


def targets(node: ast.AST, modules: Collection[str]) -> list[str]:
    """The modules of m2s that a statement imports; a package stands for its __init__.py."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] == "m2s"]
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "m2s":
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name in modules else str(node.module) for name in names]
    return []


def module_graph(trees: Mapping[str, ast.Module]) -> tuple[dict[str, set[str]], list[tuple[str, str, int]]]:
    """Imports that run when a module is imported, and (importer, target, line) of the imports inside functions."""
    at_import: dict[str, set[str]] = {}
    inside: list[tuple[str, str, int]] = []
    for name, tree in trees.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
        in_function = {node for function in functions for node in ast.walk(function)}
        at_import[name] = set()
        for node in set(ast.walk(tree)) - type_checking_only(tree):
            if node in in_function:
                inside += [(name, target, node.lineno) for target in targets(node, trees)]  # type: ignore[attr-defined]
            else:
                at_import[name].update(targets(node, trees))
    return at_import, inside


def path_between(start: str, end: str, edges: Mapping[str, set[str]]) -> list[str]:
    """The modules on a path of imports, both ends included; empty where there is none."""
    trails, seen = [[start]], {start}
    for trail in trails:
        if trail[-1] == end:
            return trail
        following = edges.get(trail[-1], set()) - seen
        seen |= following
        trails += [[*trail, name] for name in sorted(following)]
    return []


def cycles(trees: Mapping[str, ast.Module]) -> list[str]:
    """Cycles of the imports at module level, and imports inside functions that only avoid one."""
    edges, inside = module_graph(trees)
    # `from m2s import rng` in m2s/errors.py names the package, whose __init__.py imports everything: it collects names only.
    edges["m2s"] = set()
    found = []
    for name, names in edges.items():
        found += [" -> ".join([name, *path]) for other in names if (path := path_between(other, name, edges))]
    for name, target, line in inside:
        if path := path_between(target, name, edges):
            found.append(f"{name}:{line} imports {target} in a function: {' -> '.join(path)}")
    return found


def test_modules_have_no_cycle() -> None:
    """Neither at module level, nor by an import inside a function that only avoids one."""
    assert cycles({name: tree_of(path) for name, path in MODULES.items()}) == []


@pytest.mark.parametrize(
    "sources",
    [
        {"m2s.a": "from m2s.b import f", "m2s.b": "import m2s.a"},
        {"m2s.a": "from m2s import b", "m2s.b": "def f():\n    from m2s.a import g"},
        {"m2s.a": "from m2s.a import b", "m2s.a.b": "from m2s.a import ROWS"},
        {"m2s.a": "def f():\n    from m2s.a import triton", "m2s.a.triton": "from m2s.a import ROWS"},
        {"m2s.a": "class A:\n    def f(self):\n        import m2s.b", "m2s.b": "try:\n    from m2s.a import g\nexcept E: pass"},
    ],
)
def test_cycles_are_found(sources: dict[str, str]) -> None:
    assert cycles({name: ast.parse(text) for name, text in sources.items()})


def test_imports_inside_functions_are_allowed_where_no_cycle_is_avoided() -> None:
    sources = {"m2s.a": "def f():\n    from m2s.b import g", "m2s.b": "if TYPE_CHECKING:\n    from m2s.a import h"}
    assert cycles({name: ast.parse(text) for name, text in sources.items()}) == []


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
