"""The three panels of Figure 1."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Polygon, Rectangle
from matplotlib.ticker import NullLocator

from m2s.report.style import (
    BAND,
    BLUE,
    BOX,
    GREEN,
    INK,
    MUTED,
    ORTHANT,
    SMALL,
    TEXT,
    TITLE,
    VERMILLION,
    format_frame,
    new_figure,
)
from m2s.report.toy.data import ToyData


def plot_toy(data: ToyData) -> Figure:
    """Plot the three panels of Figure 1.

    Args:
        data: The numbers, from `toy_data`.

    Returns:
        The figure.
    """
    figure = new_figure(13.0, 4.8, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03))
    entropy, terminal, plane = figure.subplots(1, 3, width_ratios=(1.0, 0.95, 1.1))
    _plot_score_entropy(entropy, data)
    _plot_total_variation(terminal, data)
    _plot_plane(plane, data)
    probabilities = ", ".join(f"{p:.2g}" for p in data.distribution)
    figure.supxlabel(
        f"Three tokens with distribution ({probabilities}), uniform corruption, t = {data.time:g}, \u03c1 = {data.rho:.3g}; "
        "the current token is the rarest.   "
        "Light blue: inside the coordinate box.   Dark blue: a posterior exists (M2S).",
        fontsize=SMALL,
        color=MUTED,
    )
    for axes in (entropy, terminal, plane):
        format_frame(axes)
    return figure


def _title(axes: Axes, letter: str, text: str) -> None:
    """Set the title of a panel."""
    axes.set_title(f"({letter})  {text}", loc="left", fontsize=TITLE, color=INK, fontweight="bold", pad=20)


def _shade(axes: Axes, data: ToyData, labels: bool = True) -> None:
    """Shade the c of the coordinate box and, inside it, the c with a posterior; format the c axis."""
    axes.set_xscale("log")
    axes.axvspan(*data.box, color=BOX, lw=0, zorder=0)
    axes.axvspan(*data.band, color=BAND, lw=0, zorder=0.5)
    axes.axvline(1, color=INK, lw=0.8, ls=(0, (1, 2)), zorder=1)
    if labels:
        for c, name in zip(data.box, ("$c_-$", "$c_+$"), strict=True):
            axes.axvline(c, color=BLUE, lw=0.9, zorder=1)
            axes.annotate(
                name,
                (c, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=TEXT,
                color=BLUE,
            )
        axes.set_xlabel(r"factor $c$ on the score of $y_1$", fontsize=TEXT, color=INK)
    ticks = {1 / 16: "1/16", 1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1: "1", 2: "2", 4: "4", 8: "8", 16: "16"}
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xlim(data.c[0], data.c[-1])


def _mark(axes: Axes, xy: tuple[float, float], name: str, color: str, offset: tuple[float, float]) -> None:
    """Mark a point by a dot and a letter, `offset` points away from it."""
    axes.plot(*xy, "o", ms=7, mfc=color, mec="white", mew=1.2, zorder=6)
    axes.annotate(
        name,
        xy,
        xytext=offset,
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=TEXT,
        color=color,
        fontweight="bold",
        zorder=6,
    )


def _plot_score_entropy(axes: Axes, data: ToyData) -> None:
    """Plot panel (a): the excess h(c s*, s*) and its gradient over c, and the realizable band enlarged."""
    _title(axes, "a", "Score entropy sees no boundary")
    _shade(axes, data)
    top = float(data.gradient[-1])
    axes.set_ylim(-0.36 * top, 1.02 * top)
    axes.set_ylabel("nats", fontsize=TEXT, color=INK)
    # The inset needs a white ground of its own: the shaded bands would shine through between its ticks.
    axes.add_patch(Rectangle((0.015, 0.455), 0.62, 0.535, transform=axes.transAxes, fc="white", ec="none", zorder=2))
    inset = axes.inset_axes((0.105, 0.525, 0.505, 0.4))
    for panel in (axes, inset):
        panel.axhline(0, color=MUTED, lw=0.6, zorder=1)
        panel.plot(data.c, data.excess, color=INK, lw=2.2, zorder=3, label=r"excess $h(c\,s^\star_{y_1}, s^\star_{y_1})$")
        panel.plot(
            data.c, data.gradient, color=VERMILLION, lw=2.2, ls=(0, (5, 1.5)), zorder=3, label="its gradient in log-score"
        )
    _mark(axes, (data.c_a, data.at(data.excess, data.c_a)), "A", VERMILLION, (0.0, 11.0))
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.01),
        fontsize=SMALL,
        framealpha=1,
        edgecolor="none",
        handlelength=2.4,
        labelcolor=INK,
        borderaxespad=0.2,
    )
    _format_inset(inset, data)


def _format_inset(inset: Axes, data: ToyData) -> None:
    """Limit the inset of panel (a) to the realizable band."""
    _shade(inset, data, labels=False)
    margin = (data.band[1] / data.band[0]) ** 0.12
    inset.set_xlim(data.band[0] / margin, data.band[1] * margin)
    low, high = (data.at(data.gradient, c) for c in data.band)
    inset.set_ylim(low - 0.15 * (high - low), high + 0.15 * (high - low))
    inset.tick_params(labelsize=SMALL - 1, colors=MUTED, length=2)
    inset.set_title("the realizable band, enlarged", fontsize=SMALL - 0.5, color=BLUE, pad=3)
    for spine in inset.spines.values():
        spine.set_color(BLUE)


def _plot_total_variation(axes: Axes, data: ToyData) -> None:
    """Plot panel (b): total variation between the generated distribution and the data, over c."""
    _title(axes, "b", "Error of the generated distribution")
    _shade(axes, data)
    axes.plot(data.c, data.tv, color=VERMILLION, lw=2.2, zorder=3, label="score as it is (unconstrained)")
    axes.plot(data.c, data.tv_projected, color=BLUE, lw=2.2, ls=(0, (5, 1.5)), zorder=3, label="projected at every time")
    _mark(axes, (data.c_a, data.at(data.tv, data.c_a)), "A", VERMILLION, (-11.0, 3.0))
    axes.set_ylim(0, 1.08 * max(float(data.tv.max()), float(data.tv_projected.max())))
    axes.set_ylabel("total variation from the data distribution", fontsize=TEXT, color=INK)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0.02, 0.98),
        fontsize=SMALL,
        frameon=True,
        framealpha=1,
        edgecolor="none",
        handlelength=2.4,
        labelcolor=INK,
    )


def _plot_plane(axes: Axes, data: ToyData) -> None:
    """Plot panel (c): orthant, box and polytope in the plane of the two scores, the path s^(c), and the points A and B."""
    _title(axes, "c", "Three nested sets of scores")
    low, high = data.rho, 1 / data.rho
    end = 1.2 * high
    axes.set(xlim=(0, end), ylim=(0, end), aspect="equal")
    axes.set_xlabel("score of $y_1$", fontsize=TEXT, color=INK)
    axes.set_ylabel("score of $y_2$", fontsize=TEXT, color=INK)
    axes.set_facecolor(ORTHANT)
    axes.add_patch(Rectangle((low, low), high - low, high - low, fc=BOX, ec=BLUE, lw=0.9, zorder=1))
    axes.add_patch(Polygon(data.triangle, fc=BAND, ec=BLUE, lw=1.2, zorder=2))
    axes.set_xticks([low, 1, high], [r"$\rho$", "1", r"$1/\rho$"])
    axes.set_yticks([low, 1, high], [r"$\rho$", "1", r"$1/\rho$"])
    _plot_path(axes, data, end)
    axes.text(end * 0.985, end * 0.985, "positive scores: SEDD", ha="right", va="top", fontsize=SMALL, color=MUTED)
    axes.text(high - 0.03 * end, high - 0.03 * end, "coordinate box", ha="right", va="top", fontsize=SMALL, color=BLUE)
    middle = 0.3 * high if data.score[1] > 0.45 * high else 0.6 * high
    axes.text(0.41 * high, middle, "bridge polytope: M2S", ha="center", va="center", fontsize=SMALL, color=INK, zorder=5)
    _plot_points(axes, data)


def _plot_path(axes: Axes, data: ToyData, end: float) -> None:
    """Plot the path s^(c) as far as `end`, with c_- and c_+ on it."""
    s1, s2 = data.score
    axes.plot([0, end], [s2, s2], color=INK, lw=1.1, ls=(0, (4, 2)), zorder=3)
    axes.annotate(
        "path $s^{(c)}$",
        (end, s2),
        xytext=(-3, 4),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=SMALL,
        color=INK,
    )
    for c, name in zip(data.box, ("$c_-$", "$c_+$"), strict=True):
        axes.plot(c * s1, s2, "|", ms=9, mew=1.4, color=BLUE, zorder=4)
        axes.annotate(
            name, (c * s1, s2), xytext=(4, -6), textcoords="offset points", ha="left", va="top", fontsize=TEXT, color=BLUE
        )


def _plot_points(axes: Axes, data: ToyData) -> None:
    """Plot the exact score, A, its projection B, and the most negative entry of the signed posterior of A."""
    s1, s2 = data.score
    axes.plot(s1, s2, "*", ms=15, mfc="#F0E442", mec=INK, mew=1.0, zorder=6)
    axes.annotate("$s^\\star$", (s1, s2), xytext=(9, 8), textcoords="offset points", fontsize=TEXT, color=INK, zorder=6)
    axes.annotate(
        "", data.b, data.a, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.2, "shrinkA": 4, "shrinkB": 4}, zorder=5
    )
    _mark(axes, data.a, "A", VERMILLION, (0.0, 11.0))
    _mark(axes, data.b, "B", GREEN, (3.0, -12.0))
    worst = int(np.argmin(data.a_signed))
    name = {data.current: "k", data.first: "{y_1}", data.second: "{y_2}"}[worst]
    axes.annotate(
        f"no posterior:\n$\\tilde\\mu_{name} = {min(data.a_signed):.3f}$",
        data.a,
        xytext=(-4, 22),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=SMALL,
        color=VERMILLION,
        zorder=6,
    )
