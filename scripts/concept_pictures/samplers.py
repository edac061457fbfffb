"""The error of the generated distribution over network calls, from experiments/results/convergence.json."""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from concept_pictures.common import label, title, transparent_figure
from m2s.report.style import BAND, COLORS, INK, SMALL

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results" / "convergence.json"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PANELS = {
    "Uniform noise": ("bayes", "euler", "tau_leaping", "predictor_corrector", "psi", "informed"),
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
    figure = transparent_figure(5.4)
    for axes, (panel, rows) in zip(figure.subplots(1, 2, sharey=True), values["panels"].items(), strict=True):
        _draw_panel(axes, rows)
        title(axes, panel)
        label(axes, "network calls", "total variation to the data" if panel == "Uniform noise" else "")
    return figure


def _draw_panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """The curves of one process, with their orders in the legend. The first is broad, because others lie on it."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(1e-4, 1.0)
    axes.set_xlim(3, 1300)
    for number, row in enumerate(rows):
        style = {"color": COLORS[number], "marker": MARKERS[number], "lw": 1.8, "ms": 4.5}
        if not number:
            style |= {"color": BAND, "lw": 5.0, "ms": 8.0}
        order = f"order {row['order']:.2f}" if row["order"] > 0.1 else "no order"
        axes.plot(row["calls"], row["total_variation"], label=f"{row['name']}, {order}", **style)
    axes.set_xticks([4, 16, 64, 256, 1024], ["4", "16", "64", "256", "1024"])
    axes.legend(loc="lower left", fontsize=SMALL, frameon=False, labelcolor=INK, borderaxespad=0.2, labelspacing=0.35)
