"""The result of `m2s audit` as a table and as figures.

* `result` reads audit.json and names the four classes of scores.
* `text` prints the paper's table.
* `panels` plots one audit over the time of the sampler, `several` compares audits.
"""

from m2s.report.audit.panels import draw, write_figure
from m2s.report.audit.result import KEYS, NAMES, WORDS, AuditResult, criteria, heading, read, summary
from m2s.report.audit.several import LabelledAudit, plot_class_fractions, plot_negative_weights
from m2s.report.audit.text import table

__all__ = [
    "KEYS",
    "NAMES",
    "WORDS",
    "AuditResult",
    "LabelledAudit",
    "criteria",
    "draw",
    "heading",
    "plot_class_fractions",
    "plot_negative_weights",
    "read",
    "summary",
    "table",
    "write_figure",
]
