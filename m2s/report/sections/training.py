"""The curves of training: loss and gradient norm over steps."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from m2s.report.blocks import Picture, conjunction, figure_picture
from m2s.report.curves import plot_gradient_norm, plot_loss, smoothing_window
from m2s.report.read_run import TrainingRun, loss_unit
from m2s.report.sections.common import Problems
from m2s.report.sections.provenance import format_command


def collect(runs: Sequence[TrainingRun], problems: Problems) -> dict[str, Any] | None:
    """Collect the curves of training.

    Args:
        runs: The runs.
        problems: Receives what cannot be shown.

    Returns:
        `unit` of the loss, `loss` and `gradient_norm` as pictures or None, `windows`, the widths of the running means above 1,
        and `commands`, the command of each run; None where there is no curve.
    """
    names, unit = conjunction(run.name for run in runs), loss_unit(runs)
    widths = sorted({smoothing_window(len(run.training)) for run in runs if run.training})

    def show(plot: Callable[[Sequence[TrainingRun]], Figure | None], what: str) -> Picture | None:
        figure = plot(runs)
        return None if figure is None else figure_picture(figure, f"{what} over the steps of {names}")

    loss = problems.attempt(Path("log.jsonl"), partial(show, plot_loss, f"Loss in {unit}"))
    norm = problems.attempt(Path("log.jsonl"), partial(show, plot_gradient_norm, "Norm of the gradient"))
    if loss is None and norm is None:
        return None
    commands = [format_command(run.record["starts"][0]) for run in runs if run.record["starts"]]
    return {
        "unit": unit,
        "loss": loss,
        "gradient_norm": norm,
        "windows": widths if widths and widths[-1] > 1 else [],
        "commands": [command for command in commands if command],
    }
