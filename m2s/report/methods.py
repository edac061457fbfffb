"""Methods that were measured alike, in pictures: distance and bound of each, and samples of each.

A row is one of the experiment on MNIST: its `method`, `bound` and `samples`, with the number of steps and the FID of each.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from m2s.methods import METHODS
from m2s.report.curves import COLOURS, apart, format_axes, label
from m2s.report.toy import INK, MUTED, SMALL

NOISE = {
    "uniform": "any level",
    "absorbing": "masks",
    "hybrid": "masks and any level",
    "gaussian": "near levels",
    "none": "none",
}
BITS = (0.5, 0.7, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 8)  # that an axis may show


def compared(rows: list[dict[str, Any]], grid: Sequence[int]) -> Figure:
    """FID over the steps of `grid`, a line for each method in the colour of its noise; and their bounds, the lowest first."""
    figure = Figure(figsize=(11.5, 6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    kinds = {row["method"]: NOISE[METHODS[row["method"]].process.kind.removeprefix("chain-")] for row in rows}
    colours = dict(zip(NOISE.values(), COLOURS, strict=False))
    for kind, colour in colours.items():
        if kind in kinds.values():
            right.plot([], [], "o", ms=5, color=colour, label=kind)
    ends, seen = [], []
    for row in rows:
        name, colour, steps = row["method"], colours[kinds[row["method"]]], [each["steps"] for each in row["samples"]]
        fid = np.array([np.nan if each["fid"] is None else each["fid"] for each in row["samples"]])
        seen.append(fid[np.isfinite(fid)])
        if len(steps) > 1:
            left.plot(steps, fid, marker="o", ms=3.5, lw=1.4, color=colour)
        else:
            left.axhline(fid[0], lw=1.4, ls=(0, (4, 2)), color=colour)
        if np.isfinite(fid[-1]):
            ends.append((fid[-1], name if len(steps) > 1 else f"{name}, {steps[0]} steps", colour))
    format_axes(left, "steps", "FID of 5,000 samples", seen)
    left.set_xscale("log")
    left.set_xticks(grid, [str(steps) for steps in grid])
    left.xaxis.set_minor_locator(NullLocator())
    heights = [left.transAxes.inverted().transform(left.transData.transform((grid[-1], fid)))[1] for fid, _, _ in ends]
    for (fid, name, colour), height in zip(ends, apart(heights, 0.04), strict=True):
        line = {"arrowstyle": "-", "color": colour, "lw": 0.7, "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 2}
        where = {"xytext": (1.06, height), "textcoords": "axes fraction"}
        left.annotate(label(name), (grid[-1], fid), **where, arrowprops=line, va="center", fontsize=SMALL, color=INK)
    ordered = sorted((row for row in rows if row["bound"]["bound"]["value"] is not None), key=bits)
    for number, row in enumerate(ordered):
        error = row["bound"]["bound"]["rows_error"] or 0
        right.errorbar(bits(row), number, xerr=error, fmt="o", ms=5, capsize=2, color=colours[kinds[row["method"]]])
    format_axes(right, "bits per dimension on the test images", "")
    right.legend(
        title="noise", title_fontsize=SMALL, fontsize=SMALL, loc="center right", framealpha=1, edgecolor="none", labelcolor=INK
    )
    right.set_xscale("log")
    right.xaxis.set_minor_locator(NullLocator())
    lowest, highest = right.get_xlim()
    right.set_xticks([tick for tick in BITS if lowest < tick < highest])
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    right.set_yticks(range(len(ordered)), [label(row["method"]) for row in ordered])
    right.invert_yaxis()
    right.grid(axis="y", color=MUTED, alpha=0.2, lw=0.6)
    return figure


def bits(row: dict[str, Any]) -> float:
    return row["bound"]["bound"]["value"]


def sheet(pictures: dict[str, np.ndarray]) -> Figure:
    """Samples of the methods under each other, those of the most steps: a line for each."""
    lines = np.stack([np.concatenate(list(images), 1) for images in pictures.values()])
    count, side, width = lines.shape
    figure = Figure(figsize=(7, 0.35 * count))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(lines.reshape(-1, width), cmap="gray", vmin=0, vmax=255, interpolation="nearest", aspect="equal")
    axes.set_yticks((np.arange(count) + 0.5) * side, [label(name) for name in pictures], fontsize=SMALL, color=INK)
    axes.set_xticks([])
    axes.tick_params(length=0)
    return figure
