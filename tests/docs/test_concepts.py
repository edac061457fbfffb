"""docs/concepts: its parts, its names and tests exist, its numbers are those of the files, and its pictures are current."""

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from result_files import colors, matches, numbers, printed

from m2s.report.blocks import svg_text
from style import lengths

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "concepts"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "index.md")
NAMES = ("losses", "parameterizations", "processes", "randomness", "realizability", "samplers")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)

# Numbers that are settings, or that the code of the page computes.
SETTINGS = {
    "losses": {"0.001", "0.01", "1.139"},  # the last is a difference, tested below
    "parameterizations": {"0.2", "0.5"},
    "processes": set(),
    "randomness": {"1,024", "9,999"},
    "realizability": set(),
    "samplers": set(),
}


def load(path: Path) -> object:
    """A file of numbers."""
    return json.loads(path.read_text(encoding="utf-8"))


def without_references(text: str) -> str:
    """A page without displayed formulas, statements of the paper and identifiers of other papers."""
    for pattern in (r"(?s)\$\$.*?\$\$", r"arXiv:[\d.]+", r"doi:[\d./]+", r"(?:Theorem|Proposition|Definition) [\d.]+\d"):
        text = re.sub(pattern, " ", text)
    return text


def result_files(page: Path) -> list[object]:
    """The files of numbers that a page links to."""
    return [load((FOLDER / path).resolve()) for path in re.findall(r"\]\(([\w/.-]+\.json)\)", page.read_text())]


def test_there_is_one_page_for_each_concept() -> None:
    assert [page.stem for page in PAGES] == sorted(NAMES)


@each_page
def test_the_overview_leads_to_every_page(page: Path) -> None:
    title = page.read_text().partition("\n")[0].removeprefix("# ")
    assert re.search(rf"^### \d\. \[{re.escape(title)}\]\({page.name}\)$", (FOLDER / "index.md").read_text(), re.M)


@each_page
def test_every_page_has_the_same_parts(page: Path) -> None:
    text = page.read_text()
    titles = re.findall(r"^## (.*)$", text, re.M)
    assert titles[-4:] == ["A worked example", "In the API", "Common mistakes", "Further reading"]
    assert ("```python" in text and "∎" in text) or page.stem == "randomness"
    assert len(re.findall(r"^- \*\*", text.split("## Common mistakes")[1], re.M)) >= 5


@each_page
def test_every_picture_has_a_light_and_a_dark_form(page: Path) -> None:
    found = re.findall(r"^!\[([^\]]+)\]\((figures/[\w-]+\.svg)#only-(light|dark)\)$", page.read_text(), re.M)
    assert {kind for _, _, kind in found} == {"light", "dark"}
    for words, path, kind in found:
        assert len(words) > 30 and (FOLDER / path).is_file()
        assert path.endswith("-dark.svg") == (kind == "dark")


@each_page
def test_names_of_the_library_exist(page: Path) -> None:
    names = set(re.findall(r"`(m2s(?:\.\w+)+)", page.read_text()))
    assert len(names) > 3
    for name in names:
        found: object = importlib.import_module("m2s")
        parts = name.split(".")
        for depth, part in enumerate(parts[1:], 2):
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:depth]))


@each_page
def test_tests_that_are_named_exist(page: Path) -> None:
    links = re.findall(r"\[`(\w+)(?:\.py)?`\]\((\.\./\.\./tests/[\w/]+\.py)\)", page.read_text())
    assert links
    for name, path in links:
        file = (FOLDER / path).resolve()
        functions = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name in functions or name == file.stem, f"{path} has no {name}"


@each_page
def test_sentences_are_short(page: Path) -> None:
    """At most 18 words on average, none above 40."""
    mean, long = lengths(page)
    assert mean <= 18 and not long, f"{mean:.1f} words on average; " + "\n".join(long)


@each_page
def test_numbers_are_those_of_the_files(page: Path) -> None:
    known = list(numbers(result_files(page)))
    wanted = printed(without_references(page.read_text())) - SETTINGS[page.stem]
    assert [number for number in sorted(wanted) if not any(matches(number, one) for one in known)] == []


def has_rows(page: str, *rows: str) -> None:
    """Check that a page has rows of a table."""
    text = (FOLDER / f"{page}.md").read_text()
    for row in rows:
        assert row in text, row


def test_rows_of_the_terms() -> None:
    found = load(FOLDER / "figures" / "losses.json")
    for row in found["terms"]["imperfect"]:
        terms = f"{row['integral']:.3f} | {row['prior']:.4f} | {row['reconstruction']:.4f}"
        has_rows("losses", f"| {row['t_min']:g} | {terms} | {row['nelbo']:.3f} | {row['nll']:.3f} |")
        assert row["nelbo"] > row["nll"] > found["entropy"]  # "The sum of the terms is always above it"
        assert (row["integral"] < row["nll"]) == (row["t_min"] > 0.001)  # "From 0.01 on"
    assert all(row["integral"] < row["nll"] < row["nelbo"] for row in found["terms"]["exact"])
    last = found["terms"]["imperfect"][-1]
    assert f"it is {last['nll'] - last['integral']:.3f} nats below" in (FOLDER / "losses.md").read_text()


def test_rows_of_the_samplers() -> None:
    found = load(ROOT / "experiments" / "results" / "convergence.json")
    rows = {row["name"]: row for row in found["rows"] if row["grid"] == "cosine"}
    for name, row in rows.items():
        words = re.sub(r", (masks|Gaussian rates)$", "", name)
        words = "`{}`, {}".format(*words.split(", ")) if ", " in words else f"`{words}`"
        at = [row["steps"].index(steps) for steps in (8, 64, 512)]
        errors = " | ".join("0" if row["order"] is None else f"{row['total_variation'][place]:.5f}" for place in at)
        order = "exact" if row["order"] is None else "none" if row["order"] < 0.1 else f"{row['order']:.2f}"
        has_rows("samplers", f"| {words} | {errors} | {row['calls'][-1]:,} | {order} |")
    plain = [rows[name]["total_variation"][-1] for name in ("bayes", "euler", "analytic", "tau_leaping", "absorbing_uniform")]
    text = (FOLDER / "samplers.md").read_text()
    assert f"by a factor of {max(plain) / min(plain):.1f} at 512 steps" in text
    corrected, bayes = rows["predictor_corrector"], rows["bayes"]
    assert corrected["calls"][6] == 511 and bayes["calls"][7] == 512
    assert f"511 calls give {corrected['total_variation'][6]:.5f}" in text
    assert corrected["total_variation"][6] < bayes["total_variation"][7]
    np.testing.assert_allclose(rows["euler, masks"]["total_variation"], rows["ancestral"]["total_variation"], atol=1e-5)
    for name in ("psi", "forward_backward"):  # "the fitted order is no limit"
        errors = rows[name]["total_variation"]
        assert np.log2(errors[-2] / errors[-1]) < rows[name]["order"] - 0.1
    linear = {row["name"]: row["total_variation"][-1] for row in found["rows"] if row["grid"] == "linear"}
    ones = [name for name, row in rows.items() if row["order"] is not None and abs(row["order"] - 1) < 0.05]
    assert len(ones) == 10 and all(linear[name] < rows[name]["total_variation"][-1] for name in ones)
    first = [row["order"] for name, row in rows.items() if name in ("bayes", "euler", "analytic", "tau_leaping", "ancestral")]
    assert all(abs(order - 1) < 0.05 for order in first)


# ------------------------------------------------------------------------------------------------------------------- pictures


@pytest.fixture(scope="module")
def pictures() -> dict[str, ModuleType]:
    """The modules that draw, by name."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("concept_figures").PICTURES
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def assert_close(found: object, wanted: object) -> None:
    """Compare two results, numbers up to rounding."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_close(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    else:
        assert found == wanted


@pytest.mark.docs
@pytest.mark.parametrize("name", [name for name in NAMES if name != "randomness"])
def test_numbers_of_a_picture_are_current(pictures: dict[str, ModuleType], name: str) -> None:
    assert_close(json.loads(json.dumps(pictures[name].compute())), load(FOLDER / "figures" / f"{name}.json"))


@pytest.mark.docs
def test_the_sample_of_the_picture_is_the_same_in_every_batch(pictures: dict[str, ModuleType]) -> None:
    """Tokens may differ between machines by rounding of the logits, but not between batches; uniforms do not differ."""
    stored = load(FOLDER / "figures" / "randomness.json")
    for found in (stored, pictures["randomness"].compute()):
        number = found["sample"]
        assert len({batch["samples"][number - batch["start"]] for batch in found["batches"].values()}) == 1
        assert [len(batch["samples"]) for batch in found["batches"].values()] == [1, 5, 16]
        assert found["uniforms"] == stored["uniforms"]


@pytest.mark.docs
@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_drawn_from_their_numbers(pictures: dict[str, ModuleType], name: str) -> None:
    """The colors do not depend on the fonts of a machine. On a dark page no color of the light one is left."""
    figure = pictures[name].draw(load(FOLDER / "figures" / f"{name}.json"))
    for suffix, dark in (("", False), ("-dark", True)):
        assert colors(svg_text(figure, dark)) == colors((FOLDER / "figures" / f"{name}{suffix}.svg").read_text())
