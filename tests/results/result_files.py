"""Result files, the sections of RESULTS.md, and how a printed number is compared with a file."""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "RESULTS.md").read_text()
SCALES = (1, 1e3, 1e-3, 1e6, 1e-6, 100, 1e-12)  # units in which a number may be printed: ms, MiB, %, TFLOP/s


def load(path: str) -> Any:
    """A result file, by its path in the repository: JSON, or the text of a profile."""
    text = (ROOT / path).read_text()
    return json.loads(text) if path.endswith(".json") else text


def benchmark(name: str) -> Any:
    return load(f"benchmarks/results/{name}.json")


def experiment(name: str) -> Any:
    return load(f"experiments/results/{name}.json")


def nelbo(row: dict[str, Any]) -> Any:
    """The NELBO of a row. Files of earlier versions call it "bound"."""
    terms = row["nelbo"] if "nelbo" in row else row["bound"]
    return terms["nelbo"] if "nelbo" in terms else terms["bound"]


def sections() -> dict[str, str]:
    """The sections of RESULTS.md by their titles."""
    return dict(re.findall(r"^### ([^\n]*)\n(.*?)(?=^##|\Z)", RESULTS, re.M | re.S))


def section(title: str) -> str:
    return sections()[title]


def anchored(anchor: str) -> str:
    """The section of RESULTS.md that an anchor leads to."""
    return next(text for title, text in sections().items() if re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") == anchor)


def summary_rows() -> list[tuple[str, str, str]]:
    """Question, result and anchor of each row of the summary."""
    return re.findall(r"^\| (.*?) \| (.*) \| \[[^]]*\]\(#([^)]*)\) \|$", section("What was measured"), re.M)


def numbers(found: Any) -> Iterator[float]:
    """All numbers of a result, however deep; also those inside strings, such as commands."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        for one in found:
            yield from numbers(one)
    elif isinstance(found, str):
        yield from map(float, re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?", found))
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield float(found)


def percentages(text: str) -> list[float]:
    """The percentages of a printed table, as fractions."""
    return [float(value) / 100 for value in re.findall(r"([\d.]+)%", text)]


def printed(text: str) -> set[str]:
    """Numbers of a page that look like results: with decimals, an exponent or thousands separators."""
    for pattern in (r"^```.*?^```", r"\]\([^)]*\)", r"`[^`]*`", r"\$[^$]*\$"):
        text = re.sub(pattern, " ", text, flags=re.M | re.S)
    return set(re.findall(r"(?<![\w.])(?:\d[\d,]*\.\d+(?:e-?\d+)?|\d{1,3}(?:,\d{3})+|\d+e-\d+)%?", text))


def matches(text: str, value: float) -> bool:
    """Whether a printed number is `value`, rounded to the printed digits."""
    digits, percent = text.rstrip("%").replace(",", ""), text.endswith("%")
    places = len(digits.partition("e")[0].partition(".")[2])
    for scale in (100,) if percent else SCALES:
        scaled = value * scale
        if "e" in digits and scaled and f"{scaled:.{places}e}" == f"{float(digits):.{places}e}":
            return True
        if "e" not in digits and abs(scaled - float(digits)) <= 0.5000001 * 10**-places:
            return True
    return False


def missing(text: str, files: list[Any], allowed: set[str]) -> list[str]:
    known = list(numbers(files))
    return sorted(number for number in printed(text) - allowed if not any(matches(number, value) for value in known))


def has_rows(page: str, *rows: str) -> None:
    """Each table row is on the page; pytest would take minutes to show the difference to the page itself."""
    assert [row for row in rows if row not in page] == []


def script(name: str) -> Any:
    """A program of experiments/ as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_tables", ROOT / "experiments" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def colors(drawing: str) -> list[str]:
    """The colors of a drawing, which do not depend on the fonts of a machine."""
    return sorted(set(re.findall(r"#[0-9a-f]{6}", drawing.lower())))
