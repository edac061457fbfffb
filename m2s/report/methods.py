"""Figures that compare methods trained and measured alike: FID over steps, NELBO, and samples.

A row is one of the MNIST experiment (experiments/mnist.py). Its keys are `method`, `nelbo` (the result of `dataset_nelbo`) and
`samples` (the number of steps and the FID of each).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from m2s.methods import METHODS
from m2s.report.style import COLORS, INK, MUTED, SMALL, format_axes, new_figure, plain_label, spread_labels

MethodRow = Mapping[str, Any]

NOISE = {
    "uniform": "any level",
    "absorbing": "masks",
    "hybrid": "masks and any level",
    "gaussian": "near levels",
    "none": "none",
}
NOISE_COLORS = dict(zip(NOISE.values(), COLORS, strict=False))
BIT_TICKS = (0.5, 0.7, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 8)  # of the logarithmic axis in bits, where ten ticks a decade collide


def plot_method_comparison(rows: Sequence[MethodRow], grid: Sequence[int]) -> Figure:
    """Plot the FID over sampler steps and the NELBO of each method, in the color of its noise.

    Args:
        rows: One row for each method.
        grid: Numbers of steps at which samples were drawn. A method with one number of steps only, such as an autoregressive
            one, is a dashed line.

    Returns:
        A figure of two panels: FID on the left, NELBO with standard errors on the right, the lowest first.
    """
    figure = new_figure(11.5, 6.0)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _plot_fid(left, rows, grid)
    _plot_nelbo(right, rows)
    return figure


def _noise(row: MethodRow) -> str:
    """Return the kind of noise of a method, in words."""
    return NOISE[METHODS[row["method"]].process.kind.removeprefix("chain-")]


def _nelbo(row: MethodRow) -> float:
    """Return the NELBO of a method in bits per dimension."""
    return row["nelbo"]["nelbo"]["value"]


def _plot_fid(axes: Axes, rows: Sequence[MethodRow], grid: Sequence[int]) -> None:
    """Plot FID over steps, with the names of the methods to the right of their last points."""
    ends, plotted = [], []
    for row in rows:
        name, color, steps = row["method"], NOISE_COLORS[_noise(row)], [point["steps"] for point in row["samples"]]
        fid = np.array([np.nan if point["fid"] is None else point["fid"] for point in row["samples"]])
        plotted.append(fid[np.isfinite(fid)])
        if len(steps) > 1:
            axes.plot(steps, fid, marker="o", ms=3.5, lw=1.4, color=color)
        else:
            axes.axhline(fid[0], lw=1.4, ls=(0, (4, 2)), color=color)
        if np.isfinite(fid[-1]):
            ends.append((fid[-1], name if len(steps) > 1 else f"{name}, {steps[0]} steps", color))
    format_axes(axes, "steps", "FID of 5,000 samples", plotted)
    axes.set_xscale("log")
    axes.set_xticks(grid, [str(steps) for steps in grid])
    axes.xaxis.set_minor_locator(NullLocator())
    to_axes = axes.transAxes.inverted()
    heights = [to_axes.transform(axes.transData.transform((grid[-1], fid)))[1] for fid, _, _ in ends]
    for (fid, name, color), height in zip(ends, spread_labels(heights, 0.04), strict=True):
        line: dict[str, Any] = {"arrowstyle": "-", "color": color, "lw": 0.7, "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 2}
        at: dict[str, Any] = {"xytext": (1.06, height), "textcoords": "axes fraction"}
        axes.annotate(plain_label(name), (grid[-1], fid), **at, arrowprops=line, va="center", fontsize=SMALL, color=INK)


def _plot_nelbo(axes: Axes, rows: Sequence[MethodRow]) -> None:
    """Plot the NELBO of each method with its standard error over images, the lowest at the top."""
    kinds = {_noise(row) for row in rows}
    for kind, color in NOISE_COLORS.items():
        if kind in kinds:
            axes.plot([], [], "o", ms=5, color=color, label=kind)  # for the legend only
    ordered = sorted((row for row in rows if _nelbo(row) is not None), key=_nelbo)
    for number, row in enumerate(ordered):
        error = row["nelbo"]["nelbo"]["rows_error"] or 0
        axes.errorbar(_nelbo(row), number, xerr=error, fmt="o", ms=5, capsize=2, color=NOISE_COLORS[_noise(row)])
    format_axes(axes, "bits per dimension on the test images", "")
    axes.legend(
        title="noise", title_fontsize=SMALL, fontsize=SMALL, loc="center right", framealpha=1, edgecolor="none", labelcolor=INK
    )
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    lowest, highest = axes.get_xlim()
    axes.set_xticks([tick for tick in BIT_TICKS if lowest < tick < highest])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_yticks(range(len(ordered)), [plain_label(row["method"]) for row in ordered])
    axes.invert_yaxis()
    axes.grid(axis="y", color=MUTED, alpha=0.2, lw=0.6)


def plot_sample_sheet(pictures: dict[str, np.ndarray]) -> Figure:
    """Plot samples of several methods, one row of images for each.

    Args:
        pictures: [n, H, W] gray images with values in 0..255, by the name of the method.

    Returns:
        The figure.
    """
    lines = np.stack([np.concatenate(list(images), 1) for images in pictures.values()])
    count, side, width = lines.shape
    figure = new_figure(7.0, 0.35 * count, layout=None)
    axes = figure.subplots()
    axes.imshow(lines.reshape(-1, width), cmap="gray", vmin=0, vmax=255, interpolation="nearest", aspect="equal")
    axes.set_yticks((np.arange(count) + 0.5) * side, [plain_label(name) for name in pictures], fontsize=SMALL, color=INK)
    axes.set_xticks([])
    axes.tick_params(length=0)
    return figure
