"""Vocabulary, docstrings and sentences: what CONTRIBUTING.md asks for and a program can check."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from style import BRITISH_ALLOWED, ROOT, banned_words, british_spellings, lengths, old_identifiers, python_files, undocumented

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "experiments" / "PLAN.md"])
PAGES.remove(ROOT / "CHANGELOG.md")  # it names what was renamed
PAGES = [page for page in PAGES if page.name != "text-samples.md"]  # its words are those of models
REFERENCE = ROOT / "docs" / "reference"
PAGES += [ROOT / "pyproject.toml", ROOT / "Makefile", *sorted((ROOT / ".github").rglob("*.md"))]
PAGES += sorted((ROOT / "m2s" / "report" / "templates").glob("*.jinja"))
CODE = python_files("m2s", "tests", "examples", "experiments", "benchmarks", "scripts")
HERE = (Path(__file__), ROOT / "tests" / "style.py")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def by_folder(paths: Iterable[Path]) -> Iterator[Any]:
    """One case for the files of each folder: a case for each of two thousand files would take longer than the checks."""
    for folder, files in itertools.groupby(sorted(paths, key=lambda path: (str(path.parent), path)), lambda path: path.parent):
        yield pytest.param(list(files), id=name(folder))


@pytest.mark.parametrize("paths", by_folder(path for path in [*PAGES, *CODE] if path not in HERE))
def test_words_are_those_of_the_field(paths: list[Path]) -> None:
    found = [f"{name(path)}:{line} {word!r}" for path in paths for line, word in banned_words(path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("paths", by_folder(path for path in [*PAGES, *CODE] if path not in HERE))
def test_spelling_is_american(paths: list[Path]) -> None:
    words = ((path, line, word) for path in paths for line, word in british_spellings(path.read_text()))
    found = [f"{name(path)}:{line} {word!r}" for path, line, word in words if word != BRITISH_ALLOWED.get(name(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("paths", by_folder(python_files("m2s")))
def test_public_functions_and_classes_are_documented(paths: list[Path]) -> None:
    assert not (found := [line for path in paths for line in undocumented(path)]), "\n".join(found)


@pytest.mark.parametrize(
    "path",
    [*(path for path in PAGES if path.is_relative_to(ROOT / "docs") and path.parent != REFERENCE), ROOT / "README.md"],
    ids=name,
)
def test_sentences_are_short(path: Path) -> None:
    """At most 18 words on average, none above 40. The reference is made of docstrings and help texts."""
    mean, long = lengths(path)
    assert mean <= 18 and not long, f"{mean:.1f} words on average; " + "\n".join(long)


BASE = '''"""Module."""

class Base:
    """A base class."""

    size: int
    """The size."""

    def scaled(self, x):
        """Scale.

        Args:
            x: The input.
        """
'''
METHODS = '''"""Module."""

class Child(Base, nn.Module):
    """A class."""
    @property
    def size(self) -> int:
        return 1
    def scaled(self, x, by) -> None:
        pass

    def drawn(self, *times) -> int:
        """Draw.

        Args:
            *times: Some times.
        """

    def forward(self, x) -> Tensor:
        pass
'''


RAISES = '''"""Module."""

def f() -> None:
    """Do."""
    for part in ():
        if part:
            raise ValueError

class C:
    """A class."""
    def __init__(self) -> None:
        raise ValueError

    def again(self) -> None:
        """Do.

        Raises:
            ValueError: Always.
        """
        raise ValueError

def g() -> None:
    """Do."""
    try:
        f()
    except ValueError:
        raise
'''


def test_the_checks_find_what_they_look_for(tmp_path: Path) -> None:
    assert [word for _, word in banned_words("the law of\na free score, told at the door by a Learner")] == [
        "law",
        "free score",
        "told",
        "at the door",
        "Learner",
    ]
    british = "NOISE_COLOURS\nnormalised rows, a grey neighbour, centred; unnormalised"
    assert [word for _, word in british_spellings(british)] == [
        "NOISE_COLOURS",
        "normalised",
        "grey",
        "neighbour",
        "centred",
        "unnormalised",
    ]
    assert not list(british_spellings("normalized, gray, an optimist, characteristic, cancellation, precise, promised, token"))
    file = tmp_path / "module.py"
    file.write_text('"""Module."""\n\ndef f(a, b):\n    """Do.\n\n    Args:\n        a: One.\n    """\n\nclass C:\n    pass\n')
    import style

    style.ROOT, before = tmp_path, style.ROOT
    try:
        assert list(undocumented(file)) == ["module.py:3 f does not describe b under Args:", "module.py:10 C has no docstring"]
    finally:
        style.ROOT = before

    file.write_text(METHODS)
    (tmp_path / "m2s").mkdir()
    (tmp_path / "m2s" / "base.py").write_text(BASE)
    style.ROOT, before = tmp_path, style.ROOT
    try:
        assert list(undocumented(file)) == [
            "module.py:8 Child.scaled does not describe by under Args:",
            "module.py:11 Child.drawn does not describe its result under Returns:",
            "module.py:18 Child.forward has no docstring",
        ]
    finally:
        style.ROOT = before
    file.write_text(RAISES)
    style.ROOT, before = tmp_path, style.ROOT
    try:
        assert list(undocumented(file)) == [
            "module.py:3 f does not describe its errors under Raises:",
            "module.py:9 C does not describe the errors of its constructor under Raises:",
        ]
    finally:
        style.ROOT = before
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nOne two three four. Five six seven.\n\n" + "word " * 41 + "end.\n")
    mean, long = lengths(page)
    assert len(long) == 1 and mean == pytest.approx((4 + 3 + 42) / 3)


@pytest.mark.parametrize("paths", by_folder(CODE))
def test_old_names_are_gone(paths: list[Path]) -> None:
    """No identifier has a name that was replaced."""
    found = [f"{name(path)}:{line} {old!r}" for path in paths for line, old in old_identifiers(path)]
    assert not found, "\n".join(found)


OLD = """from m2s import Rows as Table
import m2s.natural
class Share:
    def room(self, own, *, form=1):
        self.ask(keep=2)
        whole = [span for lost in ()]
async def settle(): ...
"""


def test_old_names_are_found_in_every_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("style.ROOT", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(OLD)
    names = {"Rows", "natural", "Share", "room", "own", "form", "ask", "keep", "whole", "span", "lost", "settle"}
    assert {old for _, old in old_identifiers(file)} == names
    monkeypatch.setattr("style.ALLOWED", {"keep": ("module.py",)})
    assert {old for _, old in old_identifiers(file)} == names - {"keep"}
