"""Panels that compare several audits: the classes of scores, and negative sampler weights over time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from m2s.errors import UserError
from m2s.realizability import SCORE_CLASSES
from m2s.report.audit.panels import (
    audited_steps,
    class_fraction,
    format_time_axis,
    legend_above,
    panel_title,
    plot_classes,
)
from m2s.report.audit.result import CLASS_COLORS, CLASS_LABELS, AuditResult
from m2s.report.style import INK, TEXT, format_frame


@dataclass(frozen=True)
class LabeledAudit:
    """An audit with its name and color in a figure of several.

    Args:
        name: Label in the figure.
        color: Color of its curves.
        result: The audit.
    """

    name: str
    color: str
    result: AuditResult


def plot_class_fractions(axes: Axes, audits: Sequence[LabeledAudit]) -> None:
    """Plot the fractions of the four classes: over time for one audit, one bar over all steps for each of several.

    Args:
        axes: The panel.
        audits: The audits.
    """
    if len(audits) == 1:
        plot_classes(axes, audits[0].result)
        format_time_axis(axes)
        return
    panel_title(axes, "a", "Is there a posterior behind the score?")
    overall = [audit.result["overall"] for audit in audits]
    names = [
        f"{audit.name}\n{class_fraction(counts, 'realizable'):.3%}\nrealizable"
        for audit, counts in zip(audits, overall, strict=True)
    ]
    left = np.zeros(len(audits))
    for name in SCORE_CLASSES:
        fractions = np.array([class_fraction(counts, name) for counts in overall])
        axes.barh(names, fractions, left=left, color=CLASS_COLORS[name], label=CLASS_LABELS[name])
        left += fractions
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of positions, over all steps", fontsize=TEXT, color=INK)
    format_frame(axes)
    legend_above(axes)


def plot_negative_weights(axes: Axes, audits: Sequence[LabeledAudit]) -> None:
    """Plot the fraction of positions where the sampler's step has negative weights, so that it is not a distribution.

    Args:
        axes: The panel.
        audits: The audits: a solid curve each, and a dashed one after projection.

    Raises:
        UserError: An audit used a sampler without weights.
    """
    panel_title(axes, "b", "Where the sampler's weights are negative")
    for audit in audits:
        if audit.result["overall"]["before"]["negative_weights"] is None:
            raise UserError(
                f"the audit of {audit.result['checkpoint']} counted no weights, because the sampler "
                f"{audit.result['settings']['sampler']} has none: give an audit with --sampler analytic"
            )
        steps, t = audited_steps(audit.result)
        for when, style, suffix in (("before", ".-", ""), ("after", "--", ", projected")):
            fractions = [step[when]["negative_weights"] / step["position_steps"] for step in steps]
            axes.plot(t, fractions, style, color=audit.color, lw=1.6, ms=6, label=audit.name + suffix)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of positions", fontsize=TEXT, color=INK)
    format_time_axis(axes)
    legend_above(axes)
