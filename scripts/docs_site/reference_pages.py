"""The pages of docs/reference: one directive for every public name, and the options of every command.

    python scripts/docs_site/reference_pages.py     # writes docs/reference/*.md; tests/docs/test_reference.py compares

A public name is one in the `__all__` of a package, or of a module in `MODULES`; there, and in packages without `__all__`, it
is every function and class without a leading underscore. An object with several names is described once, under the shortest.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro

from m2s.cli import commands
from m2s.cli.options import subcommands
from m2s.registry import Registry

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
# A page and what it describes: names of modules, of which the longest that fits decides.
PAGES: dict[str, tuple[str, ...]] = {
    "process": ("m2s.process",),
    "conversions": ("m2s.conversions",),
    "heads": ("m2s.heads",),
    "losses": ("m2s.losses",),
    "realizability": ("m2s.realizability",),
    "samplers": ("m2s.samplers",),
    "models": ("m2s.models",),
    "methods": ("m2s.methods", "m2s.presets"),
    "data": ("m2s.data",),
    "training": ("m2s.training",),
    "evaluation": ("m2s.evaluation",),
    "likelihood": ("m2s.evaluation.likelihood",),
    "text": ("m2s.evaluation.text", "m2s.evaluation.genppl"),
    "audit": ("m2s.evaluation.audit", "m2s.evaluation.repair"),
    "hub": ("m2s.hub",),
    "report": ("m2s.report",),
    "ops": ("m2s.ops",),
    "benchmark": ("m2s.benchmark",),
    "infrastructure": ("m2s",),
    "cli": ("m2s.cli",),
}
# Public modules of packages that have an `__all__`, and modules of the infrastructure.
MODULES = (
    "m2s.errors",
    "m2s.registry",
    "m2s.rng",
    "m2s.validation",
    "m2s.process.registry",
    "m2s.heads.registry",
    "m2s.losses.registry",
    "m2s.samplers.inference_model",
    "m2s.training.export",
    "m2s.hub.auto_model",
    "m2s.hub.builtin",
    "m2s.evaluation.bootstrap",
    "m2s.evaluation.comparison",
    "m2s.evaluation.fid",
    "m2s.evaluation.harness",
    "m2s.evaluation.judge",
    "m2s.evaluation.likelihood.design",
    "m2s.evaluation.pixels",
    "m2s.evaluation.published",
    "m2s.evaluation.registry",
    "m2s.evaluation.repair",
    "m2s.evaluation.zero_shot",
)
NOT_A_LIBRARY = ("m2s.cli.evaluate", "m2s.hub.weights", "m2s.report.templates")  # commands, and data


@dataclasses.dataclass
class Name:
    """A public object.

    Args:
        path: Its shortest name, such as m2s.Posterior.
        module: Where it is defined.
        statement: The statement that defines it; the module for a module.
        summary: The first paragraph of its docstring, or the entries of a registry.
        aliases: Its other public names.
    """

    path: str
    module: str
    statement: ast.AST
    summary: str
    aliases: list[str] = dataclasses.field(default_factory=list)

    @property
    def position(self) -> tuple[str, int]:
        """Where it is in the source."""
        return self.module, getattr(self.statement, "lineno", 0)


def file_of(module: str) -> Path | None:
    """Return the file of a module of m2s, None where there is none.

    Args:
        module: Its name.
    """
    path = ROOT.joinpath(*module.split("."))
    return next(filter(Path.is_file, (path / "__init__.py", path.with_suffix(".py"))), None)


@functools.cache
def parsed(module: str) -> ast.Module:
    """Return the syntax tree of a module.

    Args:
        module: Its name.

    Raises:
        LookupError: There is no such module.
    """
    file = file_of(module)
    if file is None:
        raise LookupError(f"{module} is no module of m2s")
    return ast.parse(file.read_text())


def assignments(module: str) -> dict[str, ast.Assign | ast.AnnAssign]:
    """Return the statements of a module that assign one name.

    Args:
        module: Its name.
    """
    found = {}
    for part in parsed(module).body:
        if isinstance(part, ast.Assign | ast.AnnAssign):
            target = part.targets[0] if isinstance(part, ast.Assign) else part.target
            if isinstance(target, ast.Name):
                found[target.id] = part
    return found


def listed(module: str) -> list[str] | None:
    """Return the names in `__all__` of a module, None where it has none.

    Args:
        module: Its name.
    """
    statement = assignments(module).get("__all__")
    return None if statement is None or statement.value is None else ast.literal_eval(statement.value)


def public_names() -> Iterator[str]:
    """Yield every public name, in the order of the packages; objects with several names appear several times."""
    packages = [path.parent.relative_to(ROOT).parts for path in sorted((ROOT / "m2s").rglob("__init__.py"))]
    for package in sorted(map(".".join, packages), key=lambda name: (name.count("."), name)):
        if package.startswith(NOT_A_LIBRARY):
            continue
        names = listed(package)
        if names is not None:
            yield from (f"{package}.{name}" for name in names)
        else:
            for file in sorted(ROOT.joinpath(*package.split(".")).glob("*.py")):
                yield from _of_module(f"{package}.{file.stem}") if file.stem != "__init__" else ()
    for module in MODULES:
        yield from _of_module(module)


def _of_module(name: str) -> list[str]:
    """The names of `__all__` of a module, or its registries, functions and classes."""
    names = listed(name)
    if names is None:
        names = [each for each, statement in assignments(name).items() if _is_registry(statement)]
        kinds = (ast.ClassDef,) if name.endswith(".registry") and name.count(".") > 1 else (ast.ClassDef, ast.FunctionDef)
        names += [part.name for part in parsed(name).body if isinstance(part, kinds)]
    return [f"{name}.{each}" for each in names if not each.startswith("_")]


def _is_registry(statement: ast.AST) -> bool:
    return isinstance(statement, ast.AnnAssign) and ast.unparse(statement.annotation).startswith("Registry[")


def definition(path: str) -> tuple[str, ast.AST]:
    """Return the module that defines a public name, and the statement.

    Args:
        path: The name.

    Raises:
        LookupError: No statement of m2s defines it.
    """
    module, _, name = path.rpartition(".")
    for part in ast.walk(parsed(module)):
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and part.name == name and not _is_overload(part):
            return module, part
        if isinstance(part, ast.ImportFrom) and part.module and name in {each.asname or each.name for each in part.names}:
            original = next(each.name for each in part.names if (each.asname or each.name) == name)
            submodule = f"{part.module}.{original}"
            return (submodule, parsed(submodule)) if part.module == module else definition(submodule)
    if statement := assignments(module).get(name):
        return module, statement
    return path, parsed(path)


def _is_overload(part: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(ast.unparse(each) in ("overload", "typing.overload") for each in part.decorator_list)


def summary_of(module: str, statement: ast.AST) -> str:
    """Return what a table says of an object.

    Args:
        module: The module that defines it.
        statement: Its definition.
    """
    if isinstance(statement, ast.Module | ast.FunctionDef | ast.ClassDef):
        text = (ast.get_docstring(statement) or "").partition("\n\n")[0]
    elif _is_registry(statement):
        registry: Registry[Any] = getattr(importlib.import_module(module), statement.target.id)
        text = "Registry of " + ", ".join(f"`{name}`" for name in registry) + "."
    else:
        text = dict(itertools.pairwise(parsed(module).body)).get(statement)
        line = file_of(module).read_text().splitlines()[statement.end_lineno - 1]
        comment = line[statement.end_col_offset :].strip().removeprefix("# ")
        text = inspect.cleandoc(ast.literal_eval(text.value)) if isinstance(text, ast.Expr) else comment
        text = text.partition("\n\n")[0]
    return " ".join(text.split())


@functools.cache
def documented() -> dict[str, Name]:
    """Return every public object by its shortest name, in the order of the source."""
    objects: dict[int, Name] = {}
    for path in public_names():
        module, statement = definition(path)
        known = objects.setdefault(id(statement), Name(path, module, statement, summary_of(module, statement)))
        if path != known.path:
            known.path, other = sorted((known.path, path), key=lambda each: each.count("."))
            known.aliases.append(other)
    return {each.path: each for each in sorted(objects.values(), key=lambda each: each.position)}


def page_of(module: str) -> str:
    """Return the page that describes the contents of a module.

    Args:
        module: The module in which an object is defined.
    """
    fits = [(len(each), page) for page, modules in PAGES.items() for each in modules if f"{module}.".startswith(f"{each}.")]
    return max(fits)[1]


def directive(name: Name) -> str:
    """Return the lines that mkdocstrings replaces by the description of an object.

    Args:
        name: The object.
    """
    only_text = "\n    options: {members: false}" if isinstance(name.statement, ast.Module) else ""
    return f"::: {name.path}{only_text}"


def table(names: list[Name]) -> str:
    """Return a table of names with a link and a sentence each.

    Args:
        names: The objects.
    """
    rows = [f"| [`{each.path}`][{each.path}] | {_cell(each.summary)} |" for each in names]
    return "\n".join(["| name | |", "|---|---|", *rows])


def pages() -> dict[str, str]:
    """Return the text of every page of the reference by its file name."""
    objects = list(documented().values())
    found = {"m2s.md": _top_page(objects), "index.md": _index()}
    for page, modules in PAGES.items():
        names = [each for each in objects if page_of(each.module) == page]
        intro = [
            f"::: {module}\n    options: {{members: false, heading_level: {1 if module == modules[0] else 2}}}"
            for module in modules
        ]
        if page == "infrastructure":
            intro = ["# Infrastructure\n\nErrors, registries, random numbers and the validation of inputs."]
        if page == "cli":
            intro = ["# Command line\n\nThe options are those of the parser. Every command accepts `--plugin FILE`."]
        body = [command_reference()] if page == "cli" else []
        body += [table(names), *(directive(each) for each in names)]
        found[f"{page}.md"] = "\n\n".join([*intro, *body]) + "\n"
    return found


def _top_page(objects: list[Name]) -> str:
    """The page of the names that `import m2s` offers."""
    names = sorted((each for each in objects if each.path.count(".") == 1), key=lambda each: each.path.lower())
    return f"::: m2s\n    options: {{members: false, heading_level: 1}}\n\n{table(names)}\n"


def _index() -> str:
    """The first page of the reference."""
    rows = [f"| {_link(page, modules[0])} | {_first_line(page, modules[0])} |" for page, modules in PAGES.items()]
    return (
        "# Reference\n\nEvery public name, from its docstring. [m2s](m2s.md) lists what `import m2s` offers, and\n"
        "[the command line](cli.md) lists every command with its options. The other pages describe a package each.\n\n"
        + "\n".join(["| package | |", "|---|---|", *rows])
        + "\n"
    )


def _link(page: str, module: str) -> str:
    """A link to a page, with the package that it describes."""
    title = {"cli": "Command line", "infrastructure": "Infrastructure"}.get(page, f"`{module}`")
    return f"[{title}]({page}.md)"


def _first_line(page: str, module: str) -> str:
    """What a page describes."""
    if page == "infrastructure":
        return "Errors, registries, random numbers and the validation of inputs."
    return (ast.get_docstring(parsed(module)) or "").partition("\n")[0]


def command_reference() -> str:
    """Return a section for every command, with the options of its parser."""
    parts = ["`m2s COMMAND --help` prints the same options."]
    for name, command in commands().items():
        parts += [f"## `m2s {name}`", _described(command)]
        below = subcommands(command)
        if name == "train":  # presets differ in their defaults only
            preset = "digits"
            parts += [f"Presets: {', '.join(f'`{each}`' for each in below)}. The defaults below are those of `{preset}`."]
            parts += [_options(below[preset])]
        elif below:
            for each, subcommand in below.items():
                parts += [f"### `m2s {name} {each}`", _described(subcommand), _options(subcommand)]
        else:
            parts += [_options(command)]
    return "\n\n".join(parts)


def _described(command: Any) -> str:
    """The docstring of a command; its examples as code."""
    paragraphs = inspect.cleandoc(inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(
        f"```text\n{' '.join(each.removeprefix('Example: ').split())}\n```" if each.startswith("Example: ") else each
        for each in paragraphs
    )


def _options(command: Any) -> str:
    """The table of a command's options, from the parser that tyro makes of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(command)
    rows = ["| option | | default |", "|---|---|---|"]
    for action in parser._actions:
        if "--help" in action.option_strings:
            continue
        words = ", ".join(f"`{each}`" for each in action.option_strings) or f"`{action.metavar or action.dest.upper()}`"
        if action.option_strings and action.metavar:
            words += f" `{action.metavar}`"
        help_text, _, default = (action.help or "").rpartition("(")
        if not default.endswith(")") or not default.startswith(("default: ", "required")):
            help_text, default = action.help or "", ""
        default = default.removesuffix(")").removeprefix("default: ")
        rows.append("| " + " | ".join(_cell(each) for each in (words, help_text, f"`{default}`" if default else "")) + " |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
