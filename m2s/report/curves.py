"""Curves of the HTML report: the loss and the gradient norm over training steps, and the NELBO integrand over time t."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from m2s.report.read_run import TrainingRun, loss_unit
from m2s.report.style import format_axes, line_style, new_figure, plain_label

WINDOWS = 25  # the running mean covers 1/25 of the records


def smoothing_window(records: int) -> int:
    """Return the width of the running mean.

    Args:
        records: Number of records in the log.

    Returns:
        About `records / 25`. It is odd, so that the mean is centered.
    """
    return 2 * (records // WINDOWS // 2) + 1


def running_mean(values: Float[np.ndarray, "n"], width: int) -> Float[np.ndarray, "n"]:
    """Return the centered running mean.

    Args:
        values: [n] values.
        width: Odd number of values in a mean. At both ends the mean is over the values that exist.

    Returns:
        [n] means.
    """
    ones = np.ones(width)
    return np.convolve(values, ones, "same") / np.convolve(np.ones_like(values), ones, "same")


def column(records: Iterable[dict[str, Any]], key: str) -> Float[np.ndarray, "n"]:
    """Return one value of every record as an array.

    Args:
        records: Records, such as the lines of log.jsonl.
        key: The name of the value.

    Returns:
        [n] values in float64, NaN where a record has none.
    """
    return np.array([np.nan if record.get(key) is None else record[key] for record in records], dtype=np.float64)


def _panel() -> tuple[Figure, Axes]:
    """Return a figure of one panel."""
    figure = new_figure(6.2, 4.3)
    return figure, figure.subplots()


def plot_loss(runs: Sequence[TrainingRun]) -> Figure | None:
    """Plot the loss in bits over training steps.

    Pale: the records of the log. Strong: their running mean. Circles: the NELBO on held-out data with standard errors.

    Args:
        runs: The runs, one color each.

    Returns:
        The figure, or None where no run has a loss.
    """
    figure, axes = _panel()
    plotted = []
    for number, run in enumerate(runs):
        style = line_style(number)
        steps, bits = column(run.training, "step"), column(run.training, "bits")
        if len(bits):
            width = smoothing_window(len(bits))
            if width > 1:
                axes.plot(steps, bits, color=style["color"], lw=0.8, alpha=0.35)
            axes.plot(steps, running_mean(bits, width), lw=1.8, label=plain_label(run.name), **style)
            plotted.append(bits)
        if run.validation:
            steps, nelbo, error = (column(run.validation, key) for key in ("step", "validation_bits", "validation_error"))
            label = plain_label(f"{run.name}, held-out")
            marker = {"color": style["color"], "mfc": "white", "ms": 4.5, "elinewidth": 1.0}
            axes.errorbar(steps, nelbo, np.nan_to_num(error), fmt="o", label=label, **marker)
            plotted.append(nelbo)
    if not plotted:
        return None
    format_axes(axes, "step", loss_unit(runs), plotted)
    return figure


def plot_gradient_norm(runs: Sequence[TrainingRun]) -> Figure | None:
    """Plot the gradient norm before clipping over training steps: the mean of each record strong, its maximum pale.

    Args:
        runs: The runs, one color each.

    Returns:
        The figure, or None where no run has gradient norms.
    """
    figure, axes = _panel()
    plotted = []
    for number, run in enumerate(runs):
        records = [line for line in run.training if line.get("grad_norm") is not None]
        if not records:
            continue
        steps, mean, maximum = (column(records, key) for key in ("step", "grad_norm", "grad_norm_max"))
        style = line_style(number)
        axes.plot(steps, maximum, color=style["color"], lw=0.8, alpha=0.35)
        axes.plot(steps, mean, lw=1.6, label=plain_label(run.name), **style)
        plotted.append(mean)
    if not plotted:
        return None
    format_axes(axes, "step", "norm of the gradient", plotted)
    return figure


def plot_integrand(curves: Sequence[tuple[str, str, Sequence[dict[str, Any]]]]) -> Figure:
    """Plot the integrand of the NELBO over time t. The area below a curve is the integral term.

    Args:
        curves: One (name, unit, points) for each result of `m2s evaluate bpd`; points are its `curve`.

    Returns:
        The figure.
    """
    figure, axes = _panel()
    for number, (name, _, points) in enumerate(curves):
        left, right, height, error = (column(points, key) for key in ("from", "to", "bits", "error"))
        style = line_style(number)
        axes.stairs(height, [*left, right[-1]], lw=1.8, label=plain_label(name), **style)
        axes.errorbar((left + right) / 2, height, np.nan_to_num(error), fmt="none", ecolor=style["color"], elinewidth=1.0)
    format_axes(axes, "time t, from data to noise", f"bits per {' or '.join(dict.fromkeys(unit for _, unit, _ in curves))}")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    return figure
