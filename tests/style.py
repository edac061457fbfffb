"""What the style of the code can be checked for: vocabulary, docstrings, length of sentences.

python tests/style.py m2s/samplers docs README.md     # prints what tests/test_style.py would report
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Words that the field does not use, and what replaces them.
BANNED = {
    r"laws?": "distribution",
    r"beliefs?": "posterior, prediction",
    r"free scores?": "unconstrained score",
    r"goes on|go on|going on": "resumes, continues",
    r"told": "name the value",
    r"(?:at )?the door": "validation",
    r"complaints?|complains?": "error",
    r"in turns": "alternately",
    r"each another": "each different",
    r"refused|refuses|refuse|refusal": "invalid, error, unsupported",
    r"for once|of late": "(delete)",
}
# Names that no longer exist: no identifier has one of them, and those that are not also English words are in no text.
RENAMED = [
    "Refused",
    "Learner",
    "Narrow",
    "Replay",
    "Scored",
    "Shaping",
    "Belief",
    "Ready",
    "Parts",
    "Damaged",
    "Drawing",
    "Watched",
    "Ladder",
    "rows_of",
    "picks",
    "set_own",
    "natural",
    "usual",
    "FREE",
    "lacking",
    "settle",
    "bridged",
]
RENAMED_WORDS = [
    "Share",
    "Moment",
    "Law",
    "Rows",
    "room",
    "room_for",
    "own",
    "ask",
    "readable",
    "form",
    "lost",
    "span",
    "settled",
    "whole",
    "keep",
    "told",
]
OLD_NAMES = frozenset((*RENAMED, *RENAMED_WORDS))
# The option --keep of m2s train and of experiments/text.py.
ALLOWED = {
    "keep": (
        *(
            "m2s/training/config.py",
            "m2s/training/fitting.py",
            "m2s/training/save.py",
            "m2s/training/state.py",
            "experiments/text.py",
        ),
        *("tests/training/test_distributed.py", "tests/training/test_resume.py"),
    )
}
# American spelling, as torch and the papers have it.
BRITISH_PART = (
    r"(?:colour|neighbour|behaviour|favour|flavour|honour|labelled|labelling|modelled|modelling|artefact|licence|centred|"
    r"(?:normal|optim|recogn|initial|minim|maxim|factor|discret|parametr|token|summar|general|quant|serial|regular|random|linear|"
    r"marginal|diagonal|visual|standard|final|local|special|util|organ|synchron|vector|stabil)is(?:e|es|ed|er|ing|ation|able)\b)"
)
BRITISH_WORDS = r"\bgreys?\b|\bcentres?\b|\banalyse[ds]?\b|\btowards\b|\bwhilst\b|\blearnt\b"
BRITISH = re.compile(rf"\w*{BRITISH_PART}\w*|{BRITISH_WORDS}|\w*spelt\b", re.IGNORECASE)
# Without the beginning of the word. It is found faster, and only lines with it are searched for the whole word.
BRITISH_ENDING = re.compile(rf"{BRITISH_PART}|{BRITISH_WORDS}|spelt\b", re.IGNORECASE)
BRITISH_ALLOWED = {
    "m2s/evaluation/inception.py": "grey",  # part of the key of cached statistics
    "m2s/evaluation/earlier_names.py": "retokenise",  # a key in files of earlier versions
}
PROSE = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
NAMES = re.compile(rf"\b({'|'.join(RENAMED)})\b")


def python_files(*folders: str) -> list[Path]:
    """All Python files under `folders`, relative to the repository, or single files."""
    found: list[Path] = []
    for name in folders:
        path = ROOT / name
        found += [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    return found


def banned_words(text: str) -> Iterator[tuple[int, str]]:
    """Line number and word of everything in `text` that the vocabulary excludes."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern in (PROSE, NAMES):
            for found in pattern.finditer(line):
                yield number, found[0]


def british_spellings(text: str) -> Iterator[tuple[int, str]]:
    """Line number and word of every British spelling in `text`, also in names."""
    for number, line in enumerate(text.splitlines(), 1):
        if BRITISH_ENDING.search(line):
            for found in BRITISH.finditer(line):
                yield number, found[0]


def old_identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and name of every identifier in a Python file that was replaced by another one."""
    where = path.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(path.read_text())):
        for name in _identifiers(node):
            if name in OLD_NAMES and where not in ALLOWED.get(name, ()):
                yield getattr(node, "lineno", 0), name


def _identifiers(node: ast.AST) -> list[str]:
    """The names that a node of the syntax tree introduces or uses."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.arg | ast.keyword):
        return [node.arg] if node.arg else []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.alias):
        return [part for name in (node.name, node.asname) if name for part in name.split(".")]
    return []


def documented(text: str | None) -> set[str]:
    """The names in the `Args:` (or `Attributes:`) section of a docstring."""
    names: set[str] = set()
    for section in re.findall(r"^\s*(?:Args|Attributes):\n(.*?)(?=^\s*\w+:\n|\Z)", text or "", flags=re.M | re.S):
        indent = re.match(r" *", section)[0]  # type: ignore[index]  # lines that are indented further continue an entry
        names |= {
            part.strip(" *`")
            for line in re.findall(rf"^{indent}([\w*][\w*, `]*?)(?: \([^)]*\))?:", section, re.M)
            for part in line.split(",")
        }
    return names


def undocumented(path: Path) -> Iterator[str]:
    """Public functions, classes and methods of a module without a docstring, or with an incomplete one."""
    tree = ast.parse(path.read_text())
    if not ast.get_docstring(tree):
        yield f"{path.relative_to(ROOT)}:1 has no module docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield from _function(path, node, node.name, [ast.get_docstring(node) or ""])
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _class(path, node)


def _function(path: Path, node: ast.FunctionDef, name: str, docs: list[str]) -> Iterator[str]:
    """What `docs`, the docstrings of a function or of a method and of those that it overrides, leave open."""
    if "overload" in _decorators(node):  # a type alone: the function after it has the docstring
        return
    at = f"{path.relative_to(ROOT)}:{node.lineno} {name}"
    if not any(docs):
        yield f"{at} has no docstring"
        return
    described = set().union(*map(documented, docs))
    if missing := [argument for argument in _parameters(node) if argument not in described]:
        yield f"{at} does not describe {', '.join(missing)} under Args:"
    if _has_result(node) and not any(describes_result(doc) for doc in docs):
        yield f"{at} does not describe its result under Returns:"
    if _raises(node) and not any("Raises:" in doc for doc in docs):
        yield f"{at} does not describe its errors under Raises:"


def _decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list}


def _parameters(node: ast.FunctionDef) -> list[str]:
    """The arguments of a function or method that a caller passes."""
    names = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args]]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    names += [argument.arg for argument in (node.args.vararg, *node.args.kwonlyargs, node.args.kwarg) if argument]
    return [name for name in names if not name.startswith("_")]


def _has_result(node: ast.FunctionDef) -> bool:
    """Whether a call gives a value. The first line of a property describes it, and so does that of a context manager."""
    kind, decorators = "None" if node.returns is None else ast.unparse(node.returns).strip("\"'"), _decorators(node)
    if kind in ("None", "NoReturn", "Never") or decorators & {"property", "cached_property"}:
        return False
    return not (kind == "Iterator[None]" and "contextmanager" in decorators)


def _raises(node: ast.FunctionDef) -> bool:
    """Whether a function raises an error of its own. A bare `raise` repeats one."""
    return any(isinstance(part, ast.Raise) and part.exc is not None for part in ast.walk(node))


def describes_result(doc: str) -> bool:
    """Whether a docstring has a section `Returns:` or `Yields:`, or begins with "Return" or "Yield"."""
    return re.match(r"(Return|Yield)s?\b", doc) is not None or re.search(r"^\s*(Returns|Yields):\n", doc, re.M) is not None


def _class(path: Path, node: ast.ClassDef) -> Iterator[str]:
    at, doc = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", ast.get_docstring(node)
    if not doc and not _computed_doc(node):
        yield f"{at} has no docstring"
        return
    missing = [name for name in _arguments(node) if name not in documented(doc)]
    if missing and not _computed_doc(node):
        yield f"{at} does not describe {', '.join(missing)} under Args:"
    for part in node.body:
        constructs = isinstance(part, ast.FunctionDef) and part.name in ("__init__", "__post_init__")
        if constructs and _raises(part) and "Raises:" not in (doc or ""):
            yield f"{at} does not describe the errors of its constructor under Raises:"
        public = isinstance(part, ast.FunctionDef) and (part.name == "__call__" or not part.name.startswith("_"))
        if public and not _decorators(part) & {"overload", "setter"}:
            docs = [ast.get_docstring(part) or "", *_overridden(path, node, part.name)]
            yield from _function(path, part, f"{node.name}.{part.name}", docs)


@cache
def _classes(root: Path) -> dict[str, list[tuple[Path, ast.ClassDef]]]:
    """The classes of the package by name, each with its file."""
    found: dict[str, list[tuple[Path, ast.ClassDef]]] = {}
    for path in sorted((root / "m2s").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append((path, node))
    return found


def _overridden(path: Path, node: ast.ClassDef, method: str) -> Iterator[str]:
    """The docstrings of a method in the base classes. A base class is found by its name, first in the same file."""
    for base in node.bases:
        name = ast.unparse(base).split("[")[0].split(".")[-1]
        found = [(file, other) for file, other in _classes(ROOT).get(name, []) if other is not node]
        for file, other in [pair for pair in found if pair[0] == path] or found:
            for part, following in zip(other.body, [*other.body[1:], None], strict=True):
                if isinstance(part, ast.FunctionDef) and part.name == method:
                    yield ast.get_docstring(part) or ""
                # An attribute that a property overrides is described by the string below it.
                if isinstance(part, ast.AnnAssign) and ast.unparse(part.target) == method and _string(following):
                    yield _string(following)
            yield from _overridden(file, other, method)


def _string(node: ast.stmt | None) -> str:
    """The string that stands alone as a statement, such as the description of an attribute; else ""."""
    value = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""
    return value if isinstance(value, str) else ""


def _computed_doc(node: ast.ClassDef) -> bool:
    return any(isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "__doc__" for part in node.body)


def _arguments(node: ast.ClassDef) -> list[str]:
    """The constructor's arguments, without dataclass fields that have a docstring or a comment of their own."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return [
                argument.arg for argument in [*part.args.args[1:], *part.args.kwonlyargs] if not argument.arg.startswith("_")
            ]
    names: list[str] = []
    data = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    if not data and not any(ast.unparse(base) == "NamedTuple" for base in node.bases):
        return []
    for part, following in zip(node.body, [*node.body[1:], None], strict=True):
        if (
            not isinstance(part, ast.AnnAssign)
            or not isinstance(part.target, ast.Name)
            or "ClassVar" in ast.unparse(part.annotation)
        ):
            continue
        if not _string(following) and not part.target.id.startswith("_"):
            names.append(part.target.id)
    return names


def sentences(markdown: str) -> list[str]:
    """The sentences of a page, without code, tables, headings and formulas."""
    text = re.sub(r"^(```|~~~).*?^\1[^\n]*$", "\n\n", markdown, flags=re.M | re.S)
    text = re.sub(r"\$\$.*?\$\$", " formula ", text, flags=re.S)
    text = re.sub(r"^\s*(\||#|<|!\[).*$", "\n", text, flags=re.M)
    text = re.sub(r"\$[^$\n]+\$", "formula", text)
    text = re.sub(r"`[^`\n]+`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text):
        flat = " ".join(paragraph.split()).lstrip("-* ")
        found += [part for part in re.split(r"(?<=[.?!:])\s+(?=[A-Z`*\"(\[]|code)", flat) if len(part.split()) > 2]
    return found


def lengths(path: Path) -> tuple[float, list[str]]:
    """The mean number of words in the sentences of a page, and the sentences of more than 40 words."""
    counts = [(len(sentence.split()), sentence) for sentence in sentences(path.read_text())]
    mean = sum(count for count, _ in counts) / max(1, len(counts))
    return mean, [sentence for count, sentence in counts if count > 40]


def main(names: list[str]) -> None:
    """Print every finding for the named files and folders."""
    for name in names:
        target = ROOT / name
        pages = [target] if target.suffix == ".md" else sorted(target.rglob("*.md")) if target.is_dir() else []
        for page in pages:
            mean, long = lengths(page)
            print(f"{page.relative_to(ROOT)}: {mean:.1f} words per sentence")
            for sentence in long:
                print(f"  {len(sentence.split())} words: {sentence[:100]}...")
        for path in [*pages, *(python_files(name) if target.suffix != ".md" else [])]:
            for number, word in banned_words(path.read_text()):
                print(f"{path.relative_to(ROOT)}:{number} {word!r}")
        for path in python_files(name) if target.suffix != ".md" else []:
            if "tests" not in path.parts:
                for finding in undocumented(path):
                    print(finding)


if __name__ == "__main__":
    main(sys.argv[1:] or ["m2s", "docs", "README.md"])
