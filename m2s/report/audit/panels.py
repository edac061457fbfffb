"""The figure of one audit: four panels over the time of the sampler."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from m2s.evaluation.audit import ROUNDING
from m2s.io import atomic_write, output_file
from m2s.realizability import SCORE_CLASSES
from m2s.report.audit.result import CLASS_COLORS, CLASS_LABELS, AuditResult, format_heading
from m2s.report.style import BLUE, GREEN, INK, MUTED, SMALL, SUFFIXES, TEXT, TITLE, VERMILLION, format_frame, new_figure


def plot_audit(audit: AuditResult) -> Figure:
    """Plot one audit in four panels over the time of the sampler.

    (a) the four classes; (b) violations before and after projection; (c) negative mass; (d) |s_proj - s| / |s|, the distance by
    which the projection moves a score, or under masking sum_y s_y / c - 1, which is zero for a realizable score.

    Args:
        audit: The audit.

    Returns:
        The figure.
    """
    figure = new_figure(11.0, 8.2, layout=audit_layout())
    panels = figure.subplots(2, 2)
    steps, t = audited_steps(audit)
    plot_classes(panels[0, 0], audit)
    _plot_violations(panels[0, 1], steps, t)
    _plot_negative_mass(panels[1, 0], steps, t)
    if audit["overall"]["excess"]:
        _plot_excess(panels[1, 1], steps, t)
    else:
        _plot_distance(panels[1, 1], steps, t)
    for axes in panels.flat:
        format_time_axis(axes)
    figure.supxlabel("\n".join(format_heading(audit)), fontsize=SMALL, color=MUTED)
    return figure


def plot_panels(audit: AuditResult) -> list[tuple[str, Figure]]:
    """Plot the four panels of `plot_audit` as figures of their own, for narrow screens.

    Args:
        audit: The audit.

    Returns:
        What each panel shows, and its figure.
    """
    steps, t = audited_steps(audit)
    last = _plot_excess if audit["overall"]["excess"] else _plot_distance
    panels: tuple[tuple[str, Callable[[Axes], None]], ...] = (
        ("the classes of the scores", lambda axes: plot_classes(axes, audit)),
        ("violations before and after projection", lambda axes: _plot_violations(axes, steps, t)),
        ("negative mass", lambda axes: _plot_negative_mass(axes, steps, t)),
        ("the effect of the projection", lambda axes: last(axes, steps, t)),
    )
    found = []
    for name, draw in panels:
        figure = new_figure(6.2, 4.4, layout=audit_layout())
        axes = figure.subplots()
        draw(axes)
        format_time_axis(axes)
        found.append((name, figure))
    return found


def write_figure(audit: AuditResult, out: Path) -> None:
    """Write the four panels of an audit to a file.

    Args:
        audit: The audit.
        out: The picture: .png, .pdf or .svg.

    Raises:
        UserError: `out` cannot be written.
    """
    output_file(out, SUFFIXES)
    with atomic_write(out) as temporary:
        plot_audit(audit).savefig(temporary, dpi=200)


def audit_layout() -> ConstrainedLayoutEngine:
    """Return the layout of a figure of audits, with space for a legend above each panel."""
    return ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.04)


def audited_steps(audit: AuditResult) -> tuple[list[Any], Float[np.ndarray, "n"]]:
    """Return the steps in which there were positions to audit.

    Args:
        audit: The audit.

    Returns:
        The steps and their [n] times.
    """
    steps = [step for step in audit["steps"] if step["position_steps"]]
    return steps, np.array([step["t"] for step in steps])


def class_fraction(counts: AuditResult, name: str) -> float:
    """Return the fraction of positions in a class.

    Args:
        counts: One step of an audit, or its `overall`.
        name: The class.

    Returns:
        The fraction, without tolerance on the box as in the paper.
    """
    return float(counts["before"]["strict"][name] / max(1, counts["position_steps"]))


def format_time_axis(axes: Axes) -> None:
    """Let the x axis run from noise (t = 1) to data (t = 0).

    Args:
        axes: The panel.
    """
    axes.set_xlim(1, 0)
    axes.set_xlabel("time t, from noise to data", fontsize=TEXT, color=INK)
    format_frame(axes)


def panel_title(axes: Axes, letter: str, text: str, pad: int = 40) -> None:
    """Set the title of a panel.

    Args:
        axes: The panel.
        letter: Its letter.
        text: Its title.
        pad: Points between the panel and the title, for the legend.
    """
    axes.set_title(f"({letter})  {text}", loc="left", fontsize=TITLE, color=INK, fontweight="bold", pad=pad)


def legend_above(axes: Axes) -> None:
    """Put the legend between the title and the panel, where it covers nothing.

    Args:
        axes: The panel.
    """
    if handles := axes.get_legend_handles_labels()[0]:
        legend = axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            borderaxespad=0.3,
            ncols=max(2, (len(handles) + 1) // 2),
            columnspacing=1.2,
            handlelength=1.6,
            fontsize=SMALL - 0.5,
            frameon=False,
            labelcolor=INK,
        )
        legend.set_in_layout(False)  # the title's padding holds the space already


def plot_classes(axes: Axes, audit: AuditResult) -> None:
    """Plot panel (a): the fractions of the four classes over time, stacked.

    Args:
        axes: The panel.
        audit: The audit.
    """
    panel_title(axes, "a", "Is there a posterior behind the score?")
    steps, t = audited_steps(audit)
    fractions = [[class_fraction(step, name) for step in steps] for name in SCORE_CLASSES]
    labels = [f"{CLASS_LABELS[name]}: {class_fraction(audit['overall'], name):.3%}" for name in SCORE_CLASSES]
    axes.stackplot(t, fractions, labels=labels, colors=[CLASS_COLORS[name] for name in SCORE_CLASSES], lw=0)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of positions", fontsize=TEXT, color=INK)
    legend_above(axes)


def _plot_violations(axes: Axes, steps: list[Any], t: np.ndarray) -> None:
    """Plot panel (b): negative sampler weights and scores outside the box, before and after projection."""
    panel_title(axes, "b", "Violations, before and after projection")
    for key, total_key, name, color in (
        ("negative_weights", "position_steps", "negative weights", VERMILLION),
        ("coordinates_outside", "coordinates", "scores out of the box", BLUE),
    ):
        for when, style, suffix in (("before", "-", ""), ("after", (0, (4, 2)), ", projected")):
            counts = [(step[when][key], step[total_key]) for step in steps]
            if all(count is not None for count, _ in counts):
                fractions = [count / total for count, total in counts]
                axes.plot(t, fractions, color=color, lw=2.0, ls=style, label=name + suffix)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of positions, of scores", fontsize=TEXT, color=INK)
    legend_above(axes)


def _plot_negative_mass(axes: Axes, steps: list[Any], t: np.ndarray) -> None:
    """Plot panel (c): the mean negative mass of the signed posterior and of the sampler's weights."""
    panel_title(axes, "c", "Negative mass, mean over positions")
    for key, name, color in (
        ("signed_mass", r"of the signed posterior $\tilde\mu$", BLUE),
        ("negative_mass", "of the sampler's weights", VERMILLION),
    ):
        mass = np.array([step["before"][key]["mean"] if step["before"][key] else 0.0 for step in steps])
        if (mass > ROUNDING).any():
            # Markers are not cut off at the frame: at few steps a single one at its edge can be all that there is.
            shown = np.where(mass > ROUNDING, mass, np.nan)
            axes.plot(t, shown, color=color, lw=2.0, label=name, marker="o", ms=5, clip_on=False, zorder=3)
    if axes.lines:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1)
        axes.text(0.5, 0.5, "none anywhere", transform=axes.transAxes, ha="center", fontsize=TEXT, color=MUTED)
    axes.set_ylabel("mass", fontsize=TEXT, color=INK)
    legend_above(axes)


def _plot_distance(axes: Axes, steps: list[Any], t: np.ndarray) -> None:
    """Plot panel (d): the relative distance between a score and its projection."""
    panel_title(axes, "d", "How far the projection moves a score")
    for key, name, style in (("mean", "mean over positions", "-"), ("most", "the most", (0, (1, 1.5)))):
        axes.plot(t, [step["moved"][key] for step in steps], color=GREEN, lw=2.0, ls=style, label=name)
    axes.set_ylim(0, max(axes.get_ylim()[1], 1e-6))  # an axis that ends below 1e-6 would magnify rounding errors
    axes.set_ylabel(r"$|s^{proj} - s| \, / \, |s|$", fontsize=TEXT, color=INK)
    legend_above(axes)


def _plot_excess(axes: Axes, steps: list[Any], t: np.ndarray) -> None:
    """Plot panel (d) under masking: sum_y s_y / c - 1, with c = alpha / (1 - alpha)."""
    panel_title(axes, "d", "How far the scores' sum is from what it must be")
    low, middle, high = ([step["excess"]["quantiles"][q] for step in steps] for q in ("0.05", "0.5", "0.95"))
    axes.axhline(0, color=MUTED, lw=0.8)
    axes.fill_between(t, low, high, color=GREEN, alpha=0.25, lw=0, label="5% to 95% of positions")
    axes.plot(t, middle, color=GREEN, lw=2.0, label="median")
    axes.set_ylabel(r"$\sum_y s_y \, / \, c - 1$", fontsize=TEXT, color=INK)
    legend_above(axes)
