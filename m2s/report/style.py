"""The common look of all figures: colors, font sizes, axes and labels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

SUFFIXES = (".png", ".pdf", ".svg")
INK, MUTED = "#1A1A1A", "#5A5A5A"
ORTHANT, BOX, BAND = "#F4F4F2", "#D3E4F3", "#7FB3DE"  # all positive scores, the coordinate box, realizable scores
VERMILLION, BLUE, GREEN = "#D55E00", "#004F8A", "#007A5A"  # from Okabe and Ito; blue and green are darkened for text
SMALL, TEXT, TITLE = 9.5, 10.5, 12.0  # font sizes in points

DARK = {  # colors of a figure on a dark page, by those on a light one
    "#000000": "#E8E6E1",
    "#FFFFFF": "#1E1E1C",
    INK: "#E8E6E1",
    MUTED: "#A9A69E",
    ORTHANT: "#2C2C2A",
    BOX: "#2F4A63",
    BAND: "#3F76A6",
    VERMILLION: "#FF8A3D",
    BLUE: "#6FB1EA",
    GREEN: "#3FC79A",
    "#9B4F96": "#D08CCB",
    "#A67C00": "#D9AE3C",
    "#3A9BC1": "#6CC5E6",
    "#6B6B6B": "#A3A3A3",
}

COLORS = (BLUE, VERMILLION, GREEN, "#9B4F96", "#A67C00", "#3A9BC1", "#6B6B6B")
LINE_STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1)))


def new_figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    """Create a figure that needs no display.

    Args:
        width: Width in inches.
        height: Height in inches.
        layout: Layout engine, as of `matplotlib.figure.Figure`.

    Returns:
        A figure with an Agg canvas. `pyplot` is not involved, so nothing has to be closed.
    """
    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def line_style(number: int) -> dict[str, Any]:
    """Return the color and line style of the curve of one run.

    Args:
        number: Position of the run in the figure, from 0.

    Returns:
        Keyword arguments `color` and `ls` of `Axes.plot`. Colors repeat after seven runs, with the next line style.
    """
    return {"color": COLORS[number % len(COLORS)], "ls": LINE_STYLES[number // len(COLORS) % len(LINE_STYLES)]}


def plain_label(name: str) -> str:
    r"""Return a name such that matplotlib shows it literally.

    Args:
        name: Any text, for example the name of a folder.

    Returns:
        The text with `$` escaped, so that it starts no formula. A leading underscore gets a space in front of it, because
        matplotlib leaves labels that begin with an underscore out of legends.
    """
    literal = name.replace("$", r"\$")
    return f" {literal}" if literal.startswith("_") else literal


def spread_labels(positions: list[float], gap: float) -> list[float]:
    """Move labels apart so that no two overlap, as little as possible in the sum of squares.

    Isotonic regression by pooling adjacent violators: after subtracting `i * gap` from the i-th smallest position, the
    constraint "at least `gap` apart" becomes "not decreasing".

    Args:
        positions: Wanted positions in [0, 1].
        gap: Smallest distance between two labels.

    Returns:
        New positions in the order of `positions`, in [0, 1] where the labels fit.
    """
    order, offsets = np.argsort(positions, kind="stable"), gap * np.arange(len(positions))
    pools: list[tuple[float, int]] = []  # (mean, count) of neighboring values that had to be merged
    for mean in np.asarray(positions)[order] - offsets:
        count = 1
        while pools and pools[-1][0] > mean:
            previous_mean, previous_count = pools.pop()
            mean = (previous_mean * previous_count + mean * count) / (previous_count + count)
            count += previous_count
        pools.append((mean, count))
    means = np.repeat([mean for mean, _ in pools], [count for _, count in pools])
    spread = np.empty(len(positions))
    spread[order] = means.clip(0, max(0, 1 - gap * (len(positions) - 1))) + offsets
    return spread.tolist()


def format_frame(axes: Axes) -> None:
    """Set the ticks and spines of a panel: muted, none at the top and on the right.

    Args:
        axes: The panel.
    """
    axes.tick_params(labelsize=SMALL, colors=MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)


def format_axes(axes: Axes, x_label: str, y_label: str, values: Sequence[np.ndarray] = ()) -> None:
    """Label a finished panel, add its legend, and choose the scale of the y axis.

    Args:
        axes: The panel.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        values: Arrays that are plotted. Where they span more than a factor of ten, the y axis is logarithmic.
    """
    axes.set_xlabel(x_label, fontsize=TEXT, color=INK)
    axes.set_ylabel(y_label, fontsize=TEXT, color=INK)
    format_frame(axes)
    flat = [value for array in values for value in array]
    if flat and 0 < 10 * min(flat) < max(flat):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=SMALL, framealpha=0.9, edgecolor="none", labelcolor=INK)
