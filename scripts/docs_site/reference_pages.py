"""The pages of docs/reference: one directive for every public name, and the options of every command.

    python scripts/docs_site/reference_pages.py     # writes docs/reference/*.md; tests/docs/test_reference.py compares

A public name is one in the `__all__` of a package, or of a module in `MODULES`; there, and in packages without `__all__`, it
is every function and class without a leading underscore. An object with several names is described once, under the shortest.
"""

import ast
import dataclasses
import importlib
import inspect
import itertools
import pkgutil
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro

import m2s
from m2s.cli import commands
from m2s.cli.options import subcommands
from m2s.registry import Registry

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
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
    "m2s.hub.auto_model",
    "m2s.hub.builtin",
    "m2s.hub.diffusers",
    "m2s.evaluation.bootstrap",
    "m2s.evaluation.comparison",
    "m2s.evaluation.fid",
    "m2s.evaluation.harness",
    "m2s.evaluation.judge",
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
        line: Its position there.
        value: The object.
        aliases: Its other public names.
    """

    path: str
    module: str
    line: int
    value: Any
    aliases: list[str] = dataclasses.field(default_factory=list)

    @property
    def summary(self) -> str:
        """The first sentence of the docstring; the kind of object where it has none of its own."""
        if not isinstance(self.value, types.FunctionType | type | types.ModuleType):
            return attribute_docs(self.module).get(self.path.rpartition(".")[2], "").partition("\n")[0]
        text = inspect.cleandoc(self.value.__doc__ or "").partition("\n\n")[0]
        return " ".join(text.split())


def public_packages() -> Iterator[types.ModuleType]:
    """Yield m2s and its packages."""
    yield m2s
    for found in pkgutil.walk_packages(m2s.__path__, "m2s."):
        if found.ispkg and not found.name.startswith(NOT_A_LIBRARY):
            yield importlib.import_module(found.name)


def public_names() -> Iterator[str]:
    """Yield every public name, in the order of the packages; objects with several names appear several times."""
    for package in public_packages():
        if hasattr(package, "__all__"):
            yield from (f"{package.__name__}.{name}" for name in package.__all__)
        else:
            for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
                yield from () if found.ispkg else _of_module(found.name)
    for module in MODULES:
        yield from _of_module(module)


def _of_module(name: str) -> list[str]:
    """The names of `__all__` of a module, or its functions, classes and documented registries."""
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        return [f"{name}.{each}" for each in module.__all__]
    body = ast.parse(inspect.getsource(module)).body
    found = [part.name for part in body if isinstance(part, ast.FunctionDef | ast.ClassDef)]
    registries = [each for each, value in vars(module).items() if isinstance(value, Registry) and each in _assigned(body)]
    return [f"{name}.{each}" for each in [*registries, *found] if not each.startswith("_")]


def _assigned(body: list[ast.stmt]) -> set[str]:
    """The names that a module assigns."""
    targets = [
        part.targets[0] if isinstance(part, ast.Assign) else part.target
        for part in body
        if isinstance(part, ast.Assign | ast.AnnAssign)
    ]
    return {ast.unparse(each) for each in targets}


def attribute_docs(module: str) -> dict[str, str]:
    """Return the strings below the assignments of a module, by the assigned name.

    Args:
        module: Its name.
    """
    body = ast.parse(inspect.getsource(importlib.import_module(module))).body
    return {
        ast.unparse(part.targets[0] if isinstance(part, ast.Assign) else part.target): inspect.cleandoc(text.value.value)
        for part, text in itertools.pairwise(body)
        if isinstance(part, ast.Assign | ast.AnnAssign) and isinstance(text, ast.Expr)
        if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def resolve(path: str) -> Any:
    """Return the object that a name denotes.

    Args:
        path: The name, such as m2s.process.Uniform.
    """
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def defining_module(path: str) -> tuple[str, int]:
    """Return the module that assigns or defines a public name, and the line.

    Args:
        path: The name.

    Raises:
        LookupError: No statement of a module of m2s defines it.
    """
    module, _, name = path.rpartition(".")
    value = resolve(path)
    if isinstance(value, types.ModuleType):
        return module, 0
    for part in ast.walk(ast.parse(inspect.getsource(importlib.import_module(module)))):
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and part.name == name:
            return module, part.lineno
        targets = part.targets if isinstance(part, ast.Assign) else [part.target] if isinstance(part, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return module, part.lineno
        if isinstance(part, ast.ImportFrom) and part.module:
            for imported in part.names:
                if (imported.asname or imported.name) == name:
                    return defining_module(f"{part.module}.{imported.name}")
    if (lazy := getattr(value, "__module__", None)) and lazy != module:
        return defining_module(f"{lazy}.{name}")
    raise LookupError(f"{path}: no statement in m2s defines it")


def documented() -> dict[str, Name]:
    """Return every public object by its shortest name."""
    objects: dict[tuple[str, int, str], Name] = {}
    for path in public_names():
        module, line = defining_module(path)
        name = path.rpartition(".")[2]
        known = objects.setdefault((module, line, name), Name(path, module, line, resolve(path)))
        if path != known.path:
            shortest, other = sorted((known.path, path), key=lambda each: each.count("."))
            known.path, known.aliases = shortest, [*known.aliases, other]
    return {each.path: each for each in objects.values()}


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
    only_text = "\n    options: {members: false}" if isinstance(name.value, types.ModuleType) else ""
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
    objects = sorted(documented().values(), key=lambda each: (each.module, each.line))
    found = {"m2s.md": _top_page(objects), "index.md": _index()}
    for page, modules in PAGES.items():
        names = [each for each in objects if page_of(each.module) == page]
        intro = [
            f"::: {module}\n    options: {{members: false, heading_level: {1 if module == modules[0] else 2}}}"
            for module in modules
        ]
        if page == "infrastructure":
            intro = ["# Infrastructure\n\nErrors, registries, random numbers and the validation of inputs."]
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
    return inspect.cleandoc(importlib.import_module(module).__doc__ or "").partition("\n")[0]


def command_reference() -> str:
    """Return a section for every command, with the options of its parser."""
    parts = ["Every command accepts `--plugin FILE`. `m2s COMMAND --help` prints the same options."]
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
