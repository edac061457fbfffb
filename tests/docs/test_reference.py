"""The reference describes every public name and every command."""

import ast

import pytest
from doc_pages import ROOT

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
