"""The error of the generated distribution over network calls, from experiments/results/convergence.json."""

import json
from pathlib import Path
from typing import Any

from concept_pictures.common import WIDTH, label, text, title, transparent_figure
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from m2s.report.style import COLORS, INK, MUTED, SMALL, spread_labels

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results" / "convergence.json"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PANELS = {
    "Uniform noise": ("bayes", "euler", "tau_leaping", "absorbing_uniform", "predictor_corrector", "psi", "informed"),
    "Masks": ("ancestral", "tau_leaping, masks", "remasking", "remasking, strength 1", "confidence"),
}


def compute() -> dict[str, Any]:
    """Return the rows of the drawn samplers on the cosine grid."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in found["rows"] if row["grid"] == "cosine"}
    keys = ("name", "calls", "total_variation", "order")
    return {"panels": {panel: [{key: rows[name][key] for key in keys} for name in names] for panel, names in PANELS.items()}}


def draw(values: dict[str, Any]) -> Figure:
    """Draw the picture.

    Args:
        values: The numbers of `compute`.
    """
    assert WIDTH > 8
    figure = transparent_figure(4.9)
    for axes, (panel, rows) in zip(figure.subplots(1, 2, sharey=True), values["panels"].items(), strict=True):
        _draw_panel(axes, rows)
        title(axes, panel)
        label(axes, "network calls", "total variation to the data" if panel == "Uniform noise" else "")
    return figure


def _draw_panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """The curves of one process, labeled at their right ends with the fitted order."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = 1e-3, 1.0
    axes.set_ylim(low, high)
    axes.set_xlim(3, 1300)
    ends = []
    for number, row in enumerate(rows):
        color = COLORS[number]
        axes.plot(row["calls"], row["total_variation"], color=color, lw=1.9, marker=MARKERS[number], ms=4.5)
        ends.append((row["total_variation"][-1], f"{row['name']}  {row['order']:.2f}", color))
    first = (8, 5e-3)
    axes.plot([first[0], 8 * first[0]], [first[1], first[1] / 4.5], color=MUTED, lw=0)  # keeps the corner free for the labels
    axes.set_xticks([4, 16, 64, 256, 1024], ["4", "16", "64", "256", "1024"])
    places = _below(axes, ends)
    for place, (_, words, color) in zip(places, ends, strict=True):
        axes.annotate(
            words, (0, 0), xytext=(0.03, place), textcoords="axes fraction", color=color, fontsize=SMALL, fontweight="bold"
        )
    text(axes, (3.35, 1), "", INK)


def _below(axes: Axes, ends: list[tuple[float, str, str]]) -> list[float]:
    """Heights of the labels in the lower left corner, in the order of the curves."""
    order = sorted(range(len(ends)), key=lambda place: ends[place][0])
    heights = [0.0] * len(ends)
    for rank, place in enumerate(order):
        heights[place] = 0.035 + 0.058 * rank
    return spread_labels(heights, 0.05)
