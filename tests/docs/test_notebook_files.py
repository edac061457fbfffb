"""What the committed notebooks say and show: plain text, described pictures, no warnings and no traces of a machine."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from style import ROOT, banned_words, british_spellings, sentences

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
NAMES = ["audit-and-repair", "compare-on-digits", "fifteen-minutes", "text", "your-network", "your-sequences"]
LIMIT = 400 * 1024  # bytes of a notebook
TRACES = re.compile(r"/home/|/root/|/tmp/|/Users/|site-packages|\x1b|it/s|Warning|Traceback|0x[0-9a-f]{6,}")

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def markdown(notebook: dict[str, Any]) -> str:
    return "\n\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def test_notebooks_are_small(path: Path) -> None:
    assert [one.stem for one in NOTEBOOKS] == NAMES
    assert path.stat().st_size < LIMIT


def test_outputs_show_no_errors_and_no_machine(path: Path) -> None:
    for cell in read(path)["cells"]:
        for output in cell.get("outputs", ()):
            texts = [output.get("text", ""), *(value for kind, value in output.get("data", {}).items() if "image" not in kind)]
            for text in texts:
                assert not (found := TRACES.search(re.sub(r"base64,[^\"]*", "", "".join(text)))), found[0]


def test_pictures_are_described(path: Path) -> None:
    for cell in read(path)["cells"]:
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", ())):
            assert len(cell["metadata"]["alt"].split()) > 4


def test_code_that_only_draws_is_folded(path: Path) -> None:
    """Imports, and cells that begin with a figure. The site folds cells with this tag."""
    code = [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code):
        if number == 0 or cell["source"][0].startswith("figure, "):
            assert cell["metadata"].get("tags", [])[:1] == ["hide-input"], cell["source"][0]


def test_the_overview_shows_a_picture_of_each_notebook(path: Path) -> None:
    """tests/docs/test_tutorials.py compares the picture with the notebook."""
    assert (path.parent / "covers" / f"{path.stem}.png").is_file()
    overview = (path.parent / "index.md").read_text(encoding="utf-8")
    title = "".join(read(path)["cells"][0]["source"]).partition("\n")[0].removeprefix("# ")
    assert f"](covers/{path.stem}.png)]({path.name})" in overview and f"### [{title}]({path.name})" in overview


def test_text_is_plain(path: Path) -> None:
    """The rules of tests/test_style.py, for the text between the cells; code is checked by ruff."""
    text = markdown(read(path))
    assert not [*banned_words(text), *british_spellings(text)]
    counts = [len(sentence.split()) for sentence in sentences(text)]
    assert sum(counts) / len(counts) <= 18 and max(counts) <= 40, max(sentences(text), key=lambda one: len(one.split()))


def test_a_notebook_says_what_it_teaches_and_where_to_go(path: Path) -> None:
    notebook = read(path)
    first, last = ("".join(notebook["cells"][at]["source"]) for at in (0, -1))
    assert first.startswith("# ") and "**What you will learn**" in first and "**Time:**" in first
    assert "## Where next" in last


def test_links_lead_to_pages(path: Path) -> None:
    """Pages of the site; headings are checked when the site is built."""
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", markdown(read(path))):
        assert link.endswith((".ipynb", ".md")), link
        assert (path.parent / link).resolve().is_file() or (path.parent / link).resolve().parent.name == "concepts", link
