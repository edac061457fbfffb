"""The sections of the HTML report, in their order on the page.

A section is one module here, one template in m2s/report/templates and one line in `SECTIONS`. Its `collect` turns all runs into
the plain data that the template renders, or returns None where no run has any of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from m2s.report.read_run import TrainingRun
from m2s.report.sections import audits, comparison, measures, overview, provenance, repairs, samples, training
from m2s.report.sections.common import Problems

Collect = Callable[[Sequence[TrainingRun], Problems], dict[str, Any] | None]


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Args:
        id: Its anchor.
        heading: Its heading. The link to it shows the heading up to the colon.
        template: File in m2s/report/templates.
        collect: Computes the variables of the template.
    """

    id: str
    heading: str
    template: str
    collect: Collect


SECTIONS = (
    Section("comparison", "Samples: real images beside samples on the same noise", "comparison.html.jinja", comparison.collect),
    Section("runs", "Runs", "overview.html.jinja", overview.collect),
    Section("training", "Training", "training.html.jinja", training.collect),
    Section("measures", "Measures", "measures.html.jinja", measures.collect),
    Section("samples", "Samples", "samples.html.jinja", samples.collect),
    Section("audit", "Audit: is there a posterior behind the scores?", "audits.html.jinja", audits.collect),
    Section("repair", "Repair: the same noise, with projected scores", "repairs.html.jinja", repairs.collect),
    Section("provenance", "How this was made", "provenance.html.jinja", provenance.collect),
)

# The sections that follow the opening of a page with a comparison, before the others.
LEADING = ("comparison", "audit", "measures")

__all__ = ["LEADING", "SECTIONS", "Problems", "Section"]
