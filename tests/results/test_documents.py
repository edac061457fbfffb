"""Numbers in documents are those of the files that commands wrote. Sentences are not compared."""

import functools
import re
import statistics

import pytest
from derived_values import (
    DERIVED,
    text_rates,
    validations,
)
from result_files import (
    ROOT,
    anchored,
    colors,
    experiment,
    has_rows,
    load,
    matches,
    missing,
    nelbo,
    numbers,
    printed,
    section,
    sections,
    summary_rows,
)

from m2s.report.blocks import svg_text
from m2s.report.comparison import plot_distances

# Numbers that are no results: sizes of networks and problems, tolerances, targets, and values computed in the tests below.
SETTINGS = {
    "What was measured": {"3,000", "29.5"},
    "Precision of the loss in float32": {"1e-5", "1e-6", "50,257", "1e-3"},
    "Projection against bisection": {"8,192"},
    "A training step of the paper's text model": {"169,697,920", "28,427,520", "2.6"},
    "Kernels at 50,257 tokens on one H200": {"4,096"},
    "Seven methods on digits, three seeds": {"1,000"},
    "Every method on MNIST, one budget": {"4.56"},
    "A recipe for text: first ablation": {"6.90", "32,768"},
    "The plateau of text and the head": {"29.5"},
    "A recipe for text: Muon": {"6.90"},
    "Text methods, six minutes each": {
        "8,388,608",
        "25.0177%",
        "56.2310%",
        "18.7419%",
        "0.0094%",
        "74.97%",
        "0.875",
    },  # the paper's
    "The fused loss of every head": {"6.5"},
    "A recipe for text: learning rates and options": {"0.12", "0.21", "0.19", "0.08", "0.18"},  # tested below
}


# Numbers of the pages that are settings of networks and problems, dates of papers or hyperparameters of others.
PAGES = {
    "README.md": {"2605.22765"},
    "docs/kernels.md": {"32,768", "4.2"},
    "docs/training.md": {"161,800", "28,427,520", "125,000"},
    "docs/many-gpus.md": {"131.2", "161,800", "460,400"},
    "docs/faq.md": {"16.6", "50,000"},  # the largest Gumbel number of float32; a tail of tokens
    "docs/comparing.md": {"50,000"},  # samples of another protocol
    "docs/samplers.md": set(),
    "docs/evaluation.md": set(),
}


@pytest.mark.parametrize("title", sections())
def test_every_number_of_a_section_is_in_a_file_that_it_names(title: str) -> None:
    text = section(title)
    files = [load(path) for path in re.findall(r"\(([\w/.-]+\.(?:json|txt))\)", text)]
    derived = [value for name, values in DERIVED.items() if name == title for value in values()]
    assert missing(text, [*files, derived], SETTINGS.get(title, set())) == []


def test_a_number_without_a_file_is_found() -> None:
    assert missing("It took 3.25 ms of 1,234 ms, or 12.5% and 1.2e-07.", [{"a": [3.249, 1234.4], "b": 1.23e-7}], set()) == [
        "12.5%"
    ]
    assert missing("It took 3.25 ms.", [{"a": 3.26}], set()) == ["3.25"]


def test_the_summary_has_the_numbers_of_the_sections_that_it_links() -> None:
    assert len(summary_rows()) == section("What was measured").count("\n| ") - 1  # without the header; the rule begins with |-
    for question, result, anchor in summary_rows():
        assert printed(question + result) <= printed(anchored(anchor)) | SETTINGS["What was measured"], question
    best = min(experiment("mnist")["rows"], key=lambda row: row["samples"][-1]["fid"])
    assert best["method"] == "m2s-gaussian" and best["samples"][-1]["steps"] == 100
    found = experiment("certificates")["certificates"]
    names = dict.fromkeys(each["estimator"] for each in found)
    bounds = [name for name in names if all(each["passed"] for each in found if each["estimator"] == name)]
    result = next(result for _, result, anchor in summary_rows() if anchor.startswith("which-estimators"))
    assert len(names) == 14 and result == f"Five of fourteen in every world: {', '.join(f'`{name}`' for name in bounds)}"


@functools.cache
def all_results() -> list[float]:
    """The numbers of every result file."""
    paths = [path for folder in ("benchmarks", "experiments") for path in sorted((ROOT / folder / "results").iterdir())]
    files = [load(str(path.relative_to(ROOT))) for path in paths if path.suffix in (".json", ".txt")]
    files.append(load("docs/demo.json"))
    return [*numbers(files), *(value for values in DERIVED.values() for value in values())]


def test_table_of_the_papers_head() -> None:
    page = (ROOT / "docs/training.md").read_text()
    digits = {row["method"]: statistics.fmean(row["bits"]) for row in experiment("digits")}
    mnist = {row["method"]: row for row in experiment("mnist")["rows"]}
    text = {row["row"]: row["nelbo"]["bound"]["nats"]["value"] for row in experiment("text-recipe")["rows"]}
    text |= {row["row"]: row["nelbo"]["bound"]["nats"]["value"] for row in experiment("text-heads")["rows"]}
    bits = {name: row["bound"]["bound"]["value"] for name, row in mnist.items()}
    long = {name: validations(name)[-1]["bits"] for name in ("m2s", "m2s-offset")}
    fast = {name: nelbo(text_rates()[f"{name}-3e-3"])["nats"]["value"] for name in ("m2s", "m2s-offset")}
    for values in (digits, bits, long, text, fast):
        assert values["m2s"] > values["m2s-offset"]  # "has not caught up"
        has_rows(page, f"| {values['m2s']:.3f} | {values['m2s-offset']:.3f} |")
    paper, offset = (f"{mnist[name]['samples'][-1]['fid']:.2f}" for name in ("m2s", "m2s-offset"))
    assert f"{paper} for `m2s` and {offset} for `m2s-offset`" in page
    assert [row["samples"][-1]["steps"] for row in mnist.values() if row["method"].startswith("m2s")] == [100] * 3


@pytest.mark.parametrize("page", PAGES)
def test_numbers_of_the_docs_are_in_result_files(page: str) -> None:
    """460,400 is the rounded speed of the table of the text model, and 131.2 billion tokens are 161,800 steps."""
    text = (ROOT / page).read_text()
    known = all_results()
    assert [number for number in sorted(printed(text) - PAGES[page]) if not any(matches(number, one) for one in known)] == []


def test_distances_of_the_readme_are_those_of_the_demo() -> None:
    """The sentence below the plot, the plot itself, and the command are those of docs/demo.json."""
    text, result = (ROOT / "README.md").read_text(), load("docs/demo.json")
    rows = {row["steps"]: row["distances"] for row in result["steps"]}
    few = [f"{rows[8][name]['value']:.3f}" for name in ("m2s-offset", "m2s", "sedd", "sedd-repaired")]
    few.append(f"{result['reference']['real']['distance']['value']:.3f}")
    many = [f"{rows[32][name]['value']:.3f}" for name in ("sedd-repaired", "sedd")]
    number = r"([\d.]+\d)"
    sentence = rf"it is {number} for M2S with .*?, {number} for M2S as .*?, {number} for SEDD, and {number} for.*?have {number}"
    found = re.search(rf"{sentence}.*?hurts, {number}\s+against {number},", text, re.S)
    assert found is not None and list(found.groups()) == [*few, *many]
    home = (ROOT / "docs" / "index.md").read_text()
    assert f"the distance is {few[0]} for M2S with the exact offset and {few[2]} for SEDD. Real\nimages have {few[4]}." in home
    assert result["projection"]["parts"]["differences"]["lowered - as it is"]["low"] > 0
    assert " ".join(result["command"]) in text
    for dark, name in ((False, "docs/demo.svg"), (True, "docs/demo-dark.svg")):
        assert colors(svg_text(plot_distances(result), dark)) == colors((ROOT / name).read_text())
