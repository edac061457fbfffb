"""Curves that compare runs: the loss and the gradient's norm over the steps, and the loss over t."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from m2s.report.read_run import Run
from m2s.report.toy import BLUE, GREEN, INK, MUTED, SMALL, TEXT, VERMILLION

COLOURS = (BLUE, VERMILLION, GREEN, "#9B4F96", "#A67C00", "#3A9BC1", "#6B6B6B")
STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1)))
RECORDS = 25  # the smooth curve is a mean over a 25th of them


def look(number: int) -> dict[str, Any]:
    """The colour and line of run `number`."""
    return {"color": COLOURS[number % len(COLOURS)], "ls": STYLES[number // len(COLOURS) % len(STYLES)]}


def label(name: str) -> str:
    """A name as matplotlib shows it: no formula between dollars, and not hidden for an underscore in front."""
    shown = name.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def apart(places: list[float], least: float) -> list[float]:
    """The nearest places between 0 and 1, in the same order, of which no two are closer than `least`."""
    order, steps = np.argsort(places, kind="stable"), least * np.arange(len(places))
    pooled: list[tuple[float, int]] = []  # what must rise is out of order in these: its mean, and how many they are
    for mean in np.asarray(places)[order] - steps:
        count = 1
        while pooled and pooled[-1][0] > mean:
            before, many = pooled.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pooled.append((mean, count))
    found = np.empty(len(places))
    means = np.repeat([mean for mean, _ in pooled], [count for _, count in pooled])
    found[order] = means.clip(0, max(0, 1 - least * (len(places) - 1))) + steps
    return found.tolist()


def window(records: int) -> int:
    """Odd, so that the mean is about its own place."""
    return 2 * (records // RECORDS // 2) + 1


def smooth(values: Float[np.ndarray, "n"], width: int) -> Float[np.ndarray, "n"]:
    """The mean over `width` values about each; over those that are there at the ends."""
    ones = np.ones(width)
    return np.convolve(values, ones, "same") / np.convolve(np.ones_like(values), ones, "same")


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.2, 4.3), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def format_axes(axes: Axes, across: str, up: str, seen: Sequence[np.ndarray] = ()) -> None:
    """The look of a finished panel: names, a legend, and a logarithmic axis where the values seen differ tenfold."""
    axes.set_xlabel(across, fontsize=TEXT, color=INK)
    axes.set_ylabel(up, fontsize=TEXT, color=INK)
    axes.tick_params(labelsize=SMALL, colors=MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    values = [value for each in seen for value in each]
    if values and 0 < 10 * min(values) < max(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=SMALL, framealpha=0.9, edgecolor="none", labelcolor=INK)


def column(records: Iterable[dict[str, Any]], key: str) -> Float[np.ndarray, "n"]:
    """One value of every record; NaN where it has none."""
    return np.array([np.nan if record.get(key) is None else record[key] for record in records], dtype=np.float64)


def loss(runs: Sequence[Run]) -> Figure | None:
    """Bits over steps: the records of the log pale, their running mean strong, the bound on held-out data as points."""
    figure, axes = _axes()
    seen = []
    for number, run in enumerate(runs):
        style = look(number)
        steps, bits = column(run.training, "step"), column(run.training, "bits")
        if len(bits):
            if window(len(bits)) > 1:
                axes.plot(steps, bits, color=style["color"], lw=0.8, alpha=0.35)
            axes.plot(steps, smooth(bits, window(len(bits))), lw=1.8, label=label(run.name), **style)
            seen.append(bits)
        held = run.validation
        if held:
            at, bound, error = (column(held, key) for key in ("step", "validation_bits", "validation_error"))
            named = label(f"{run.name}, held-out")
            face = {"color": style["color"], "mfc": "white", "ms": 4.5, "elinewidth": 1.0}
            axes.errorbar(at, bound, np.nan_to_num(error), fmt="o", label=named, **face)
            seen.append(bound)
    if not seen:
        return None
    format_axes(axes, "step", "bits per site", seen)
    return figure


def gradient(runs: Sequence[Run]) -> Figure | None:
    """The norm before clipping: the mean between two records strong, the greatest pale."""
    figure, axes = _axes()
    seen = []
    for number, run in enumerate(runs):
        records = [line for line in run.training if line.get("grad_norm") is not None]
        if not records:
            continue
        steps, mean, most = (column(records, key) for key in ("step", "grad_norm", "grad_norm_max"))
        style = look(number)
        axes.plot(steps, most, color=style["color"], lw=0.8, alpha=0.35)
        axes.plot(steps, mean, lw=1.6, label=label(run.name), **style)
        seen.append(mean)
    if not seen:
        return None
    format_axes(axes, "step", "norm of the gradient", seen)
    return figure


def over_time(curves: Sequence[tuple[str, str, Sequence[dict[str, Any]]]]) -> Figure:
    """The integrand of the bound over t, as (name, unit, `curve` of a bpd result): the area below is the integral."""
    figure, axes = _axes()
    for number, (name, _, points) in enumerate(curves):
        left, right, height, error = (column(points, key) for key in ("from", "to", "bits", "error"))
        style = look(number)
        axes.stairs(height, [*left, right[-1]], lw=1.8, label=label(name), **style)
        axes.errorbar((left + right) / 2, height, np.nan_to_num(error), fmt="none", ecolor=style["color"], elinewidth=1.0)
    format_axes(axes, "time t, from data to noise", f"bits per {' or '.join(dict.fromkeys(unit for _, unit, _ in curves))}")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    return figure
