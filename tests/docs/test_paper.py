"""docs/paper.md: every name, file and test in it exists."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "paper.md").read_text()
NAMES = sorted(set(re.findall(r"`(m2s(?:\.\w+)+)`", TEXT)))
TESTS = sorted(set(re.findall(r"`([\w/]*test_\w+\.py)(?:::(\w+))?`", TEXT)))
FILES = sorted(set(re.findall(r"`((?:m2s|tests)/[\w/]+\.py)`", TEXT)))


def test_the_page_has_a_map() -> None:
    assert len(NAMES) > 15 and len(TESTS) > 15 and len(FILES) > 3


@pytest.mark.parametrize("name", NAMES)
def test_name_exists(name: str) -> None:
    parts = name.split(".")
    found: object = importlib.import_module("m2s")
    for depth, part in enumerate(parts[1:], 2):
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:depth]))


@pytest.mark.parametrize(("file", "test"), TESTS, ids=str)
def test_test_exists(file: str, test: str) -> None:
    path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / file
    functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert test in functions if test else any(name.startswith("test_") for name in functions)


@pytest.mark.parametrize("file", FILES)
def test_file_exists(file: str) -> None:
    assert (ROOT / file).is_file()


def test_every_table_row_names_code_and_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|")][2:]
    for row in rows:
        _, _, code, test, _ = row.split("|")
        assert re.fullmatch(r" (`m2s\.[\w.]+`(, )?)+ ", code), row
        assert re.fullmatch(r" (`[\w/]*test_\w+\.py(::\w+)?`(, )?)+ ", test), row


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_both_home_pages_have_the_title_and_link_the_page(page: str) -> None:
    title = re.search(r'title: "(Mean-to-Score [^"]*)"', (ROOT / "CITATION.cff").read_text())[1]  # type: ignore[index]
    before = (ROOT / page).read_text().partition("\n## ")[0]
    assert f"*{title}*" in before and re.search(r"\]\((docs/)?paper\.md\)", before)
