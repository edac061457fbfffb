"""What the style of the code can be checked for: vocabulary, docstrings, length of sentences.

python tests/style.py m2s/samplers docs README.md     # prints what tests/test_style.py would report
"""

import ast
import re
import sys
from collections.abc import Iterator
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
# Names that no longer exist.
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


def documented(text: str | None) -> set[str]:
    """The names in the `Args:` (or `Attributes:`) section of a docstring."""
    names: set[str] = set()
    for section in re.findall(r"^\s*(?:Args|Attributes):\n(.*?)(?=^\s*\w+:\n|\Z)", text or "", flags=re.M | re.S):
        names |= {
            part.strip(" *`")
            for line in re.findall(r"^\s+([\w*, `]+?)(?: \([^)]*\))?:", section, re.M)
            for part in line.split(",")
        }
    return names


def undocumented(path: Path) -> Iterator[str]:
    """Public functions and classes of a module without a docstring, or with arguments that it does not describe."""
    tree = ast.parse(path.read_text())
    if not ast.get_docstring(tree):
        yield f"{path.relative_to(ROOT)}:1 has no module docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield from _function(path, node, node.name)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _class(path, node)


def _function(path: Path, node: ast.FunctionDef, name: str, method: bool = False) -> Iterator[str]:
    at, doc = f"{path.relative_to(ROOT)}:{node.lineno} {name}", ast.get_docstring(node)
    if not doc:
        yield f"{at} has no docstring"
        return
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = [argument.arg for argument in arguments[1 if method else 0 :] if not argument.arg.startswith("_")]
    if method:  # a method may follow its class's vocabulary; functions describe every argument
        return
    missing = [name for name in names if name not in documented(doc)]
    if missing:
        yield f"{at} does not describe {', '.join(missing)} under Args:"


def _class(path: Path, node: ast.ClassDef) -> Iterator[str]:
    at, doc = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", ast.get_docstring(node)
    if not doc and not _computed_doc(node):
        yield f"{at} has no docstring"
        return
    missing = [name for name in _arguments(node) if name not in documented(doc)]
    if missing and not _computed_doc(node):
        yield f"{at} does not describe {', '.join(missing)} under Args:"
    if any(ast.unparse(base).split("[")[0] not in ("ABC", "Protocol", "Generic") for base in node.bases):
        return  # a method of a subclass has the docstring of the method that it overrides
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_") and not ast.get_docstring(part):
            yield f"{path.relative_to(ROOT)}:{part.lineno} {node.name}.{part.name} has no docstring"


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
        described = (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        )
        if not described and not part.target.id.startswith("_"):
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
