"""The result of `m2s audit` as a table and as figures.

* `result` reads audit.json and names the four classes of scores.
* `text` prints the paper's table.
* `panels` plots one audit over the time of the sampler, `several` compares audits.
"""

from m2s.report.audit.panels import plot_audit, plot_panels, write_figure
from m2s.report.audit.result import (
    CLASS_LABELS,
    KEYS,
    NAMES,
    AuditResult,
    criteria,
    format_heading,
    format_settings,
    read_audit,
)
from m2s.report.audit.several import LabeledAudit, plot_class_fractions, plot_negative_weights
from m2s.report.audit.text import format_table

__all__ = [
    "CLASS_LABELS",
    "KEYS",
    "NAMES",
    "AuditResult",
    "LabeledAudit",
    "criteria",
    "format_heading",
    "format_settings",
    "format_table",
    "plot_audit",
    "plot_class_fractions",
    "plot_negative_weights",
    "plot_panels",
    "read_audit",
    "write_figure",
]
