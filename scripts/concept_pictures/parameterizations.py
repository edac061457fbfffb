"""The conversions between leave-one-out distribution, posterior, score and reverse rate, as a diagram."""

from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import m2s
from concept_pictures.common import transparent_figure
from m2s.report.style import BLUE, BOX, GREEN, INK, MUTED, SMALL, TEXT, VERMILLION

BOXES = {  # center, name, definition, who predicts it
    "nu": ((4.75, 5.2), "leave-one-out", r"$\nu_z = \Pr(X_0^i = z \mid X_t^{-i})$", "GIDD, UDLM, DUO, M2S with offset"),
    "mu": ((1.65, 1.3), "posterior", r"$\mu_z = \Pr(X_0^i = z \mid X_t)$", "M2S, D3PM, MD4, MDLM"),
    "s": ((8.35, 1.3), "score", r"$s_y = p_t(x^{i \to y})\, /\, p_t(x)$", "SEDD"),
    "rate": ((8.35, 5.2), "reverse rate", r"$R_t(k \to y)$", "Neural CTMC"),
}
HALF = (1.5, 0.72)


def compute() -> dict[str, Any]:
    """Return which functions of m2s are the arrows, and the exact offset for 256 tokens at t = 0.001."""
    arrows = {
        "nu to mu": m2s.posterior_from_leave_one_out,
        "mu to nu": m2s.leave_one_out_from_posterior,
        "mu to s": m2s.score_from_posterior,
        "s to mu": m2s.affine_inverse,
        "nu to s": m2s.score_from_leave_one_out,
        "s to rate": m2s.rate_from_score,
        "rate to s": m2s.score_from_rate,
    }
    head, t = m2s.Posterior(m2s.Uniform(256, m2s.Linear()), offset="exact"), torch.tensor([0.001], dtype=torch.float64)
    offset = float(head.offset_at_current_token(torch.tensor([0]), t))
    return {"arrows": {arrow: f"m2s.{function.__name__}" for arrow, function in arrows.items()}, "offset": offset}


def box(axes: Axes, name: str) -> None:
    """Draw one form of the prediction.

    Args:
        axes: The panel.
        name: A name in `BOXES`.
    """
    (x, y), heading, definition, users = BOXES[name]
    width, height = HALF
    patch = FancyBboxPatch(
        (x - width, y - height), 2 * width, 2 * height, boxstyle="round,pad=0,rounding_size=0.18", fc=BOX, ec=MUTED, lw=1.0
    )
    axes.add_patch(patch)
    axes.text(x, y + 0.42, heading, ha="center", va="center", fontsize=TEXT + 0.5, fontweight="bold", color=INK)
    axes.text(x, y - 0.02, definition, ha="center", va="center", fontsize=TEXT, color=INK)
    axes.text(x, y - 0.46, users, ha="center", va="center", fontsize=SMALL - 0.5, color=INK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    """Draw an arrow.

    Args:
        axes: The panel.
        start: Where it starts.
        end: Where it ends.
        color: Color.
    """
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.8, "mutation_scale": 15})


def words(axes: Axes, place: tuple[float, float], text: str, color: str, ha: str = "center") -> None:
    """Write a formula beside an arrow.

    Args:
        axes: The panel.
        place: Where.
        text: The formula.
        color: Color of its arrow.
        ha: Horizontal alignment.
    """
    axes.text(*place, text, ha=ha, va="center", fontsize=TEXT, color=color, linespacing=1.35)


def draw(values: dict[str, Any]) -> Figure:
    """Draw the picture.

    Args:
        values: The numbers of `compute`.
    """
    assert len(values["arrows"]) == 7
    figure = transparent_figure(5.0, None)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 6.22)
    axes.set_axis_off()
    for name in BOXES:
        box(axes, name)
    arrow(axes, (3.55, 4.40), (1.55, 2.10), BLUE)
    arrow(axes, (2.05, 2.10), (4.05, 4.40), BLUE)
    words(axes, (2.25, 3.62), r"$\mu_z \propto \nu_z\, P_t(k \mid z)$", BLUE, "right")
    words(axes, (3.12, 2.92), r"$\nu_z \propto \mu_z\, /\, P_t(k \mid z)$", BLUE, "left")
    arrow(axes, (3.25, 1.52), (6.75, 1.52), GREEN)
    words(axes, (5.0, 1.88), r"$s_y = \sum_z\, \mu_z\, P_t(y \mid z)\, /\, P_t(k \mid z)$", GREEN)
    words(axes, (5.0, 2.28), "the bridge, linear", GREEN)
    arrow(axes, (6.75, 1.08), (3.25, 1.08), VERMILLION)
    words(axes, (5.0, 0.62), "affine inverse: a signed posterior,\nnegative where the score has none", VERMILLION)
    arrow(axes, (5.55, 4.40), (7.65, 2.10), GREEN)
    words(axes, (5.85, 3.72), r"$s_y = (\nu P_t)_y\, /\, (\nu P_t)_k$", GREEN, "right")
    arrow(axes, (8.10, 2.10), (8.10, 4.40), INK)
    arrow(axes, (8.60, 4.40), (8.60, 2.10), INK)
    words(axes, (8.00, 3.75), r"$\times\, Q_t(y \to k)$", INK, "right")
    words(axes, (8.72, 3.05), r"$\div\, Q_t(y \to k)$", INK, "left")
    return figure
