"""Count the tests and the mutants, and draw the figures and the table of docs/testing.md.

    python scripts/count_tests.py            # collects the tests, which takes up to a minute, and writes all files
    python scripts/count_tests.py --draw     # draws again from docs/figures/tests.json

The counts of the fault campaign are those of tests/faults/results/faults.json, which `make faults` writes. The files are
docs/figures/tests.json, tests.svg and faults.svg, the pictures also for dark pages, and the table between two marks.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from m2s.io import atomic_write, write_json
from m2s.provenance import provenance
from m2s.report.blocks import svg_text
from m2s.report.style import BLUE, GREEN, INK, SMALL, TEXT, VERMILLION, format_frame, new_figure

ROOT = Path(__file__).resolve().parents[1]
PAGE, FIGURES = ROOT / "docs" / "testing.md", ROOT / "docs" / "figures"
COUNTS, FAULTS = FIGURES / "tests.json", ROOT / "tests" / "faults" / "results" / "faults.json"
MARKS = ("<!-- figures: written by python scripts/count_tests.py -->", "<!-- figures: end -->")
EVERYTHING, STYLE = "all of m2s", "style of files"  # tests that belong to no package; those of words and docstrings
KINDS = {  # rows of the table: what is counted, and the titles of the campaign
    "processes killed that resumed with the same files": (
        "kill at every file-system event",
        "kill from outside at a random moment",
        "one of two processes is killed, stopped or out of memory",
    ),
    "failing file-system calls and allocations": (
        "a file-system call fails with ENOSPC, EIO, EINTR or ENOLCK",
        "an allocation fails under a limit of memory",
    ),
    "fuzzed inputs: files, arguments, command lines, reports": (
        "a damaged file",
        "a hostile folder or file",
        "extreme arguments of a public function",
        "extreme words on the command line",
        "markup in the HTML report, in Chromium",
    ),
    "the same sample drawn in another batch, order, process or thread": ("the same sample in another way",),
}


def collect() -> dict[str, int]:
    """Return the number of tests of each folder of tests/, collected by pytest.

    Raises:
        RuntimeError: pytest cannot collect the tests.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-o", "addopts=", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.findall(r"^tests/(?:(\w+)/)?([\w/]*)\.py: (\d+)$", done.stdout, re.M)
    if done.returncode or not found:
        raise RuntimeError(f"pytest cannot collect the tests: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    counts: Counter[str] = Counter()
    for folder, file, number in found:
        counts[STYLE if file == "test_style" else folder or EVERYTHING] += int(number)
    return dict(counts)


def mutants() -> dict[str, int]:
    """Return the number of mutants of each package, from tests/test_mutations.py."""
    path = ROOT / "tests" / "test_mutations.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    sys.path.insert(0, str(path.parent))  # where the modules are that tests share
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parts = (mutant.file.split("/") for mutant in module.MUTANTS.values())
    return dict(Counter(names[0] if len(names) > 1 else EVERYTHING for names in parts))


def faults() -> dict[str, int]:
    """Return the number of cases of each kind of the fault campaign."""
    counts: Counter[str] = Counter()
    for suite in json.loads(FAULTS.read_text(encoding="utf-8"))["suites"].values():
        counts[suite["title"]] += suite["cases"]
    return dict(counts)


def table(counts: dict[str, Any]) -> str:
    """Return the table of the page, in Markdown.

    Args:
        counts: The content of tests.json.
    """
    tests, cases = sum(counts["tests"].values()), faults()
    failures = len(json.loads(FAULTS.read_text(encoding="utf-8"))["failures"])
    rows = [
        (
            "tests, with all parameters",
            tests - counts["tests"][STYLE],
            "`make test` and `make test-docs` run them; those for a GPU are skipped without one",
        ),
        ("checks of the style of a file", counts["tests"][STYLE], "`make test` runs them"),
        ("mutants of the source", sum(counts["mutants"].values()), "each makes its named test fail"),
        *((kind, sum(cases[title] for title in titles), f"{failures} failures") for kind, titles in KINDS.items()),
    ]
    lines = ["| what | number | result |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {number:,} | {result} |" for what, number, result in rows)])


def bars(axes: Axes, values: dict[str, int], color: str) -> None:
    """Draw horizontal bars with a number at each.

    Args:
        axes: The panel.
        values: The numbers by label, from top to bottom.
        color: The color of the bars.
    """
    places = range(len(values))[::-1]
    axes.barh(places, list(values.values()), color=color, height=0.7)
    for place, value in zip(places, values.values(), strict=True):
        if value:
            axes.annotate(
                f"{value:,}", (value, place), (3, 0), textcoords="offset points", va="center", fontsize=SMALL, color=INK
            )
    axes.set_yticks(places, values)
    axes.set_xticks([])
    axes.margins(x=0.14, y=0.01)
    format_frame(axes)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=INK)


def draw_tests(counts: dict[str, Any]) -> Figure:
    """Draw the tests and the mutants of each package.

    Args:
        counts: The content of tests.json.

    Returns:
        The figure.
    """
    names = sorted(set(counts["tests"]) - {STYLE}, key=lambda name: (name == EVERYTHING, -counts["tests"][name]))
    names += sorted(set(counts["mutants"]) - set(names))
    figure = new_figure(8.2, 0.27 * len(names) + 0.6)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    bars(left, {name: counts["tests"].get(name, 0) for name in names}, BLUE)
    bars(right, {name: counts["mutants"].get(name, 0) for name in names}, GREEN)
    right.set_yticklabels([])
    left.set_title("tests of each package", fontsize=TEXT, color=INK, loc="left")
    right.set_title("mutants caught", fontsize=TEXT, color=INK, loc="left")
    return figure


def draw_faults() -> Figure:
    """Draw the cases of the fault campaign."""
    cases = {title: number for title, number in sorted(faults().items(), key=lambda item: -item[1]) if number}
    figure = new_figure(8.2, 0.27 * len(cases) + 0.6)
    axes = figure.subplots()
    bars(axes, cases, VERMILLION)
    axes.set_title("cases of the fault campaign", fontsize=TEXT, color=INK, loc="left")
    return figure


def write_table(counts: dict[str, Any]) -> None:
    """Replace the table of the page, between its two marks.

    Args:
        counts: The content of tests.json.
    """
    text = PAGE.read_text(encoding="utf-8")
    start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    PAGE.write_text(f"{text[:start]}\n{table(counts)}\n{text[end:]}", encoding="utf-8")


def main() -> None:
    """Count, draw and write."""
    parser = argparse.ArgumentParser(description="Count the tests and draw the figures of docs/testing.md.")
    parser.add_argument("--draw", action="store_true", help="draw again from the stored counts")
    if not parser.parse_args().draw:
        FIGURES.mkdir(exist_ok=True)
        write_json(COUNTS, {**provenance("cpu"), "tests": collect(), "mutants": mutants()})
    counts = json.loads(COUNTS.read_text(encoding="utf-8"))
    for name, figure in (("tests", draw_tests(counts)), ("faults", draw_faults())):
        for suffix, dark in (("", False), ("-dark", True)):
            with atomic_write(FIGURES / f"{name}{suffix}.svg") as temporary:
                temporary.write_text(svg_text(figure, dark), encoding="utf-8")
    write_table(counts)


if __name__ == "__main__":
    main()
