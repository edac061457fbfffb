"""The reference describes every public name and every command."""

import ast
import re
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT

import m2s
import reference_pages


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference_pages.pages()


def test_pages_are_those_of_the_source(pages: dict[str, str]) -> None:
    committed = {path.name: path.read_text() for path in reference_pages.FOLDER.iterdir()}
    assert committed == pages, "python scripts/docs_site/reference_pages.py"


def test_every_name_in_all_has_a_directive(pages: dict[str, str]) -> None:
    """Counted without the code that writes the pages, but for names that are one object."""
    names = reference_pages.documented()
    written = {line.removeprefix("::: ") for text in pages.values() for line in text.splitlines() if line.startswith("::: ")}
    described = written | {alias for path, name in names.items() if path in written for alias in name.aliases}
    for file in sorted((ROOT / "m2s").rglob("__init__.py")):
        package = ".".join(file.parent.relative_to(ROOT).parts)
        for part in ast.parse(file.read_text()).body:
            if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "__all__":
                assert {f"{package}.{name}" for name in ast.literal_eval(part.value)} <= described, package


def test_aliases_are_one_object() -> None:
    for name in reference_pages.documented().values():
        if name.path.startswith("m2s.") and name.path.count(".") == 1:
            value = getattr(m2s, name.path.removeprefix("m2s."))
            assert getattr(value, "__doc__", None), name.path


def test_pages_are_in_the_navigation(pages: dict[str, str]) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f"reference/{page}" in navigation for page in pages)


# Pages that describe the inside of the package, or map statements to code; and a group of entry points.
INSIDE = ("architecture.md", "kernels.md", "paper.md")
NO_OBJECTS = {"m2s.plugins"}


@pytest.fixture(scope="module")
def described() -> set[str]:
    """Every name with a place in the reference."""
    objects = reference_pages.documented().values()
    modules = {name for names in reference_pages.PAGES.values() for name in names}
    return {"m2s", *modules, *(name.path for name in objects), *(alias for name in objects for alias in name.aliases)}


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "reference"], ids=lambda page: page.stem)
def test_names_that_a_page_tells_readers_to_use_are_described(page: Path, described: set[str]) -> None:
    if page.name in INSIDE:
        return
    for name in set(re.findall(r"`(m2s(?:\.\w+)+)(?:\([^`]*\))?`", page.read_text())) - NO_OBJECTS:
        owner = name.rpartition(".")[0]
        is_member = owner in described and reference_pages.file_of(owner) is None
        assert name in described or is_member, f"{name} is in no page of docs/reference"
