"""The HTML page of `m2s report`: curves, samples, tables, audits, and the commands that made them.

    write([Path("runs/m2s"), Path("runs/sedd")], Path("report.html"))

The page is self-contained: figures are data URIs, numbers are embedded as JSON, and its content security policy forbids every
request to a network. What a run does not have is left out. A file that cannot be read is listed in the page. The same files
give the same bytes.

Each section computes plain data (`m2s.report.sections`), which a Jinja2 template renders. Templates escape all text.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from m2s.io import atomic_write, output_file
from m2s.report.blocks import conjunction, paragraphs
from m2s.report.read_run import TrainingRun, read_runs
from m2s.report.sections import LEADING, SECTIONS, Problems, Section
from m2s.report.sections.comparison import opening
from m2s.report.sections.overview import introduction

TITLE = "Runs of discrete diffusion"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
SCRIPT = "slider.js"  # only a page with a comparison has it


def write(runs: Sequence[Path], out: Path, title: str = TITLE, notes: str = "") -> list[str]:
    """Write the page of some training runs.

    Args:
        runs: Folders that `m2s train` made.
        out: The page to write: .html.
        title: Title of the page.
        notes: Plain text for the opening. An empty line ends a paragraph.

    Returns:
        What could not be read, one sentence each. The page lists it too.

    Raises:
        UserError: A folder is not a run, or `out` cannot be written. Nothing has been written then.
    """
    found = read_runs(runs)
    output_file(out, (".html",))
    problems = Problems(problem for run in found for problem in run.problems)
    text = render(found, problems, title, notes)
    with atomic_write(out) as temporary:
        # A damaged file can hold half of a surrogate pair, which UTF-8 does not have.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
    return list(problems)


def render(runs: Sequence[TrainingRun], problems: Problems, title: str = TITLE, notes: str = "") -> str:
    """Render the page.

    Args:
        runs: The runs.
        problems: What could not be read. Rendering adds what cannot be shown.
        title: Title of the page.
        notes: Plain text for the opening.

    Returns:
        The HTML.
    """
    environment = template_environment()
    sections = []
    first = opening(runs, problems)
    ordered = list(SECTIONS) if first is None else sorted(SECTIONS, key=_place)
    script = "" if first is None else environment.get_template(SCRIPT).render()
    for section in ordered:
        data = section.collect(runs, problems)
        if data is not None:
            content = environment.get_template(section.template).render(data)
            sections.append({"id": section.id, "heading": section.heading, "content": content})
    return environment.get_template("page.html.jinja").render(
        title=title,
        policy=content_security_policy(script),
        opening=first,
        script=script,
        notes=notes,
        introduction=introduction(runs, problems),
        sections=sections,
        problems=list(problems),
        data={"runs": [_json_data(run) for run in runs]},
    )


def _place(section: Section) -> int:
    """Return the place of a section on a page with a comparison. Sections with the same place keep their order."""
    return LEADING.index(section.id) if section.id in LEADING else len(LEADING)


def content_security_policy(script: str = "") -> str:
    """Return the policy of a page, which forbids every request. It allows one script, by its checksum, and no other.

    Args:
        script: The text of the script; empty: the page has none.
    """
    if not script:
        return POLICY
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"{POLICY}; script-src 'sha256-{digest}'"


def template_environment() -> Environment:
    """Return the Jinja2 environment of the templates.

    Text is escaped. A name that a template uses but Python does not supply is an error. `tojson` keeps the order of keys,
    rejects NaN, and writes `<`, `>`, `&` and `'` as \\uXXXX, so that data cannot end the script element they are in.
    """
    environment = Environment(
        loader=PackageLoader("m2s.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {"conjunction": conjunction, "paragraphs": paragraphs}
    return environment


def _json_data(run: TrainingRun) -> dict[str, Any]:
    """Return what the page embeds of a run as JSON."""
    return {
        "name": run.name,
        "train": run.record,
        "config": run.config,
        "parameters": run.parameters,
        "log": run.log,
        "results": [{"file": result.file, "kind": result.kind, "value": result.value} for result in run.results],
        "samples": [{"file": samples.file, "count": samples.count, "settings": samples.settings} for samples in run.samples],
    }
