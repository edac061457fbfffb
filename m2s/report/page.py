"""One page about runs that stands alone: curves, samples, tables, audits, and how all of it was made.

    write([Path("runs/m2s"), Path("runs/sedd")], Path("report.html"))

The page holds its figures and numbers itself and asks nothing of a network. What a run does not have is left out; a file that
cannot be read is named. The same files give the same bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from m2s.io import atomic_write, output_file
from m2s.report.markup import page, picture, png, prose, side_by_side
from m2s.report.read_run import Run, read_runs
from m2s.report.sections import Problems, audits, made, measures, opening, overview, repairs, samples, training

PARTS: dict[str, tuple[str, Callable[[Sequence[Run], Problems], str]]] = {
    "runs": ("Runs", overview),
    "training": ("Training", training),
    "measures": ("Measures", measures),
    "samples": ("Samples", samples),
    "audit": ("Audit: is there a posterior behind the scores?", audits),
    "repair": ("Repair: the same noise, with projected scores", repairs),
    "made": ("How this was made", made),
}
TITLE = "Runs of discrete diffusion"


@dataclass(frozen=True)
class Section:
    """A part of the page that its author answers for: HTML, such as `m2s.report.markup.prose` and `table` make, and PNG files
    with what they show."""

    heading: str
    html: str
    pictures: tuple[tuple[Path, str], ...] = ()


def write(runs: Sequence[Path], out: Path, title: str = TITLE, notes: str = "", sections: Sequence[Section] = ()) -> list[str]:
    """The page of the runs as `out`. `notes` are paragraphs of plain text for the opening; `sections` come before the runs.

    Returns what could not be read, which the page says too. Folders that are no runs are refused before anything is written.
    """
    found = read_runs(runs)
    output_file(out, (".html",))
    problems = Problems(problem for run in found for problem in run.problems)
    text = render(found, problems, title, notes, sections)
    with atomic_write(out) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return list(problems)


def render(runs: Sequence[Run], problems: Problems, title: str, notes: str, sections: Sequence[Section]) -> str:
    parts = [(f"part-{place}", part.heading, _own(part, problems)) for place, part in enumerate(sections, 1)]
    parts += [(name, heading, text) for name, (heading, show) in PARTS.items() if (text := show(runs, problems))]
    if problems:
        items = "\n".join(f"<li>{prose(text)}</li>" for text in problems)
        parts.append(("left-out", "Left out", f'<ul class="problems">\n{items}\n</ul>'))
    return page(title, parts, prose(f"{notes}\n\n{opening(runs)}"), {"runs": [_data(run) for run in runs]})


def _own(part: Section, problems: Problems) -> str:
    shown = [problems.attempt(path, partial(_picture, path, what)) for path, what in part.pictures]
    figures = [figure for figure in shown if figure is not None]
    return "\n".join([part.html, *([side_by_side(figures)] if figures else [])])


def _picture(path: Path, what: str) -> str:
    return picture(png(path), what, what)


def _data(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "train": run.record,
        "config": run.config,
        "parameters": run.parameters,
        "log": run.log,
        "results": [{"file": result.file, "kind": result.kind, "value": result.value} for result in run.results],
        "samples": [{"file": one.file, "count": one.count, "settings": one.settings} for one in run.samples],
    }
