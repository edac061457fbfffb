"""Three tokens: the box, the bridge polytope, and a score without a posterior, with its signed posterior and its projection."""

import math
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

import m2s
from concept_pictures.common import text, transparent_figure
from m2s.report.style import BAND, BLUE, BOX, GREEN, INK, MUTED, ORTHANT, SMALL, TEXT, TITLE, VERMILLION

TIME, CURRENT = 0.5, 0
SCORES = {"A": (3.0, 3.0), "D": (3.5, 0.5), "E": (5.0, 1.6), "F": (1.5, 1.0)}
"""Scores of the tokens 1 and 2 at the current token 0. B is the projection of A."""
CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(0.75)]])  # of the simplex: tokens 0, 1, 2
CLASSES = {0: "outside the box", 1: "in the box, no posterior", 3: "realizable"}


def volume_ratio(vocab: int) -> float:
    """Return the volume of the bridge polytope over that of the box, at `TIME`.

    Args:
        vocab: The number of tokens.
    """
    process, x_t = m2s.Uniform(vocab, m2s.Linear()), torch.zeros(vocab, dtype=torch.long)
    t = torch.full((vocab,), TIME, dtype=torch.float64)
    corners = m2s.score_from_posterior(torch.eye(vocab, dtype=torch.float64), x_t, t, process)[:, 1:]
    low, high = (float(end[0, 1]) for end in m2s.box(x_t, t, process))
    simplex = torch.linalg.det(corners[1:] - corners[0]).abs() / math.factorial(vocab - 1)
    return float(simplex / (high - low) ** (vocab - 1))


def compute() -> dict[str, Any]:
    """Return the sets and the points of the picture."""
    process = m2s.Uniform(3, m2s.Linear())
    score = torch.tensor([[1.0, *pair] for pair in SCORES.values()], dtype=torch.float64)
    x_t = torch.full((len(score),), CURRENT)
    t = torch.full((len(score),), TIME, dtype=torch.float64)
    signed = m2s.affine_inverse(score, x_t, t, process)
    nearest = m2s.project(score, x_t, t, process)
    repaired = m2s.score_from_posterior(nearest, x_t, t, process)
    classes = m2s.classify(score, x_t, t, process)
    low, high = m2s.box(x_t[:1], t[:1], process)
    ends = (float(low[0, 1]), float(high[0, 1]))
    corners = m2s.score_from_posterior(torch.eye(3, dtype=torch.float64), x_t[:3], t[:3], process)
    square = torch.tensor([[1.0, a, b] for a, b in ((ends[0],) * 2, (ends[1], ends[0]), (ends[1],) * 2, ends)])
    in_simplex = m2s.affine_inverse(square.double(), torch.zeros(4, dtype=torch.long), t[:1].expand(4), process)
    points = {
        name: {
            "score": score[row, 1:].tolist(),
            "signed": signed[row].tolist(),
            "class": int(classes[row]),
            "projection": nearest[row].tolist(),
            "projected_score": repaired[row, 1:].tolist(),
        }
        for row, name in enumerate(SCORES)
    }
    return {
        "time": TIME,
        "rho": float(process.rho(t[:1])),
        "box": list(ends),
        "polytope": corners[:, 1:].tolist(),
        "box_as_signed_posteriors": in_simplex.tolist(),
        "points": points,
        "volume_ratio": {str(vocab): volume_ratio(vocab) for vocab in (3, 5, 10)},
    }


def place(posterior: list[float]) -> np.ndarray:
    """Return the place of a signed posterior in the plane of the simplex.

    Args:
        posterior: Three numbers with sum one.
    """
    return np.array(posterior) @ CORNERS


def draw(values: dict[str, Any]) -> Figure:
    """Draw the picture.

    Args:
        values: The numbers of `compute`.
    """
    figure = transparent_figure(3.9)
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.0))
    _draw_scores(left, values)
    _draw_posteriors(right, values)
    return figure


def _panel(axes: Axes, words: str) -> None:
    axes.patch.set_visible(False)
    axes.set_aspect("equal", anchor="N")
    axes.set_title(words, loc="left", fontsize=TITLE, color=INK, fontweight="bold", pad=10)


def _draw_points(axes: Axes, places: dict[str, tuple[Any, Any]], offsets: dict[str, tuple[float, float]]) -> None:
    """The points, with an arrow from each unrealizable one to its projection."""
    colors = {"A": VERMILLION, "D": VERMILLION, "E": "#9B4F96", "F": GREEN}
    for name, (at, to) in places.items():
        if name != "F":
            style = {"arrowstyle": "-|>", "color": INK, "lw": 1.1, "shrinkA": 5, "shrinkB": 1, "mutation_scale": 11}
            axes.annotate("", to, at, arrowprops=style, zorder=5)
            axes.plot(*to, "o", ms=5, mfc=GREEN, mec=INK, mew=0.8, zorder=6)
        axes.plot(*at, "o", ms=8, mfc=colors[name], mec=INK, mew=0.8, zorder=6)
        words = {"xytext": offsets[name], "textcoords": "offset points", "fontsize": TEXT + 1, "fontweight": "bold"}
        axes.annotate(name, at, color=colors[name], ha="center", va="center", zorder=7, **words)
    words = {"xytext": offsets["B"], "textcoords": "offset points", "fontsize": TEXT + 1, "fontweight": "bold"}
    axes.annotate("B", places["A"][1], color=GREEN, ha="center", va="center", zorder=7, **words)


def _draw_scores(axes: Axes, values: dict[str, Any]) -> None:
    """All positive scores, the box, the polytope, and the points."""
    low, high = values["box"]
    axes.add_patch(Polygon([(0, 0), (5.6, 0), (5.6, 5.0), (0, 5.0)], fc=ORTHANT, ec="none"))
    axes.add_patch(Polygon([(low, low), (high, low), (high, high), (low, high)], fc=BOX, ec=BLUE, lw=1.2, ls=(0, (4, 2))))
    axes.add_patch(Polygon(values["polytope"], fc=BAND, ec=BLUE, lw=1.6))
    text(axes, (2.1, 4.5), "all positive scores (SEDD)", MUTED, ha="center", va="center")
    text(axes, (3.92, 3.72), "the box", BLUE, ha="right", va="center", fontweight="bold")
    text(axes, (1.38, 1.95), "the polytope:\nall posteriors\n(M2S)", INK, ha="center", va="center")
    points = {name: (tuple(point["score"]), tuple(point["projected_score"])) for name, point in values["points"].items()}
    _draw_points(axes, points, {"A": (0, 14), "D": (13, -2), "E": (0, 14), "F": (13, 0), "B": (-3, -14)})
    axes.set_xlim(0, 5.6)
    axes.set_ylim(0, 5.0)
    axes.set_xticks([0, low, 1, 2, 3, high, 5], ["0", r"$\rho$", "1", "2", "3", r"$1/\rho$", "5"])
    axes.set_yticks([0, low, 1, 2, 3, high, 5], ["0", r"$\rho$", "1", "2", "3", r"$1/\rho$", "5"])
    axes.set_xlabel(r"score $s_1$", fontsize=TEXT, color=INK)
    axes.set_ylabel(r"score $s_2$", fontsize=TEXT, color=INK)
    axes.tick_params(labelsize=SMALL, colors=MUTED)
    for side in axes.spines.values():
        side.set_color(MUTED)
    _panel(axes, "Scores")


def _draw_posteriors(axes: Axes, values: dict[str, Any]) -> None:
    """The same in the plane of signed posteriors: the polytope is the simplex."""
    box = [place(corner) for corner in values["box_as_signed_posteriors"]]
    axes.add_patch(Polygon(box, fc=BOX, ec=BLUE, lw=1.2, ls=(0, (4, 2))))
    axes.add_patch(Polygon(CORNERS, fc=BAND, ec=BLUE, lw=1.6))
    for corner, words, where in zip(CORNERS, (r"$\mu_0 = 1$", r"$\mu_1 = 1$", r"$\mu_2 = 1$"), ("bl", "br", "t"), strict=True):
        shift = {"bl": (-6, -16), "br": (34, -13), "t": (0, 14)}[where]
        axes.annotate(words, corner, xytext=shift, textcoords="offset points", ha="center", fontsize=TEXT, color=INK)
    points = {name: (place(point["signed"]), place(point["projection"])) for name, point in values["points"].items()}
    _draw_points(axes, points, {"A": (0, 14), "D": (-13, -2), "E": (0, -14), "F": (13, 0), "B": (-3, -15)})
    text(axes, (0.47, 0.44), "the simplex:\nall posteriors", INK, ha="center", va="center")
    axes.set_xlim(-0.12, 1.36)
    axes.set_ylim(-0.26, 1.06)
    axes.set_axis_off()
    _panel(axes, "Signed posteriors")
