"""The paper's figures that compare runs: losses, audits above losses, grids of samples, generative perplexity over steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from m2s.errors import UserError
from m2s.evaluation.bootstrap import error_bars
from m2s.report.audit import AuditResult, LabeledAudit, format_settings, plot_class_fractions, plot_negative_weights
from m2s.report.audit.panels import audit_layout, panel_title
from m2s.report.curves import column
from m2s.report.read_run import TrainingRun, loss_unit
from m2s.report.samples import picture_grid
from m2s.report.style import MUTED, SMALL, format_axes, line_style, new_figure, plain_label
from m2s.training.run_folder import SIZES

LAST = 0.25  # fraction of a run in the panel that enlarges its end
TRAILING = 0.03  # fraction of a run in the trailing mean


def trailing_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Return the mean over the last `width` values up to each.

    Args:
        values: [n] values.
        width: Number of values in a mean. At the beginning the mean is over the values that exist.

    Returns:
        [n] means.
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


@dataclass(frozen=True)
class _Trace:
    """The training loss of a run over epochs.

    Args:
        epochs: [n] epochs of the records.
        bits: [n] losses in bits.
        mean: [n] trailing mean of `bits`.
        late: [n] whether a record is in the last quarter of the run.
        warmup: The epoch at which the learning rate has reached its maximum.
    """

    epochs: Float[np.ndarray, "n"]
    bits: Float[np.ndarray, "n"]
    mean: Float[np.ndarray, "n"]
    late: Bool[np.ndarray, "n"]
    warmup: float

    @classmethod
    def of(cls, run: TrainingRun) -> "_Trace":
        """Return the trace of a run. A run without a loss is a UserError."""
        steps, bits = column(run.training, "step"), column(run.training, "bits")
        if not len(bits):
            raise UserError(f"{run.path} has no losses in its log.jsonl yet: train it for longer, or leave it out")
        steps_per_epoch = run.record["data"]["rows"] / run.record["config"]["run"]["batch"]
        warmup = run.record["config"]["optimizer"]["warmup"] / steps_per_epoch
        mean = trailing_mean(bits, max(1, round(TRAILING * len(bits))))
        return cls(steps / steps_per_epoch, bits, mean, steps >= (1 - LAST) * steps[-1], warmup)

    def plot(self, axes: Axes, name: str, number: int, chosen: Any = slice(None)) -> None:
        """Plot the chosen records pale and their trailing mean strong, in the style of run `number`."""
        style = line_style(number)
        axes.plot(self.epochs[chosen], self.bits[chosen], color=style["color"], lw=0.7, alpha=0.3)
        axes.plot(self.epochs[chosen], self.mean[chosen], lw=1.8, label=plain_label(name), **style)


def plot_losses(runs: Sequence[TrainingRun]) -> Figure:
    """Plot the loss over epochs: (a) the full run, (b) its last quarter.

    Pale: the records. Strong: their trailing mean. Dashed: the end of the warmup.

    Args:
        runs: The runs, one color each.

    Returns:
        The figure.

    Raises:
        UserError: A run has no losses yet.
    """
    figure = new_figure(9.6, 3.9)
    full, end = figure.subplots(1, 2)
    traces = [_Trace.of(run) for run in runs]
    for number, (run, trace) in enumerate(zip(runs, traces, strict=True)):
        trace.plot(full, run.name, number)
        trace.plot(end, run.name, number, trace.late)
        full.axvline(trace.warmup, color=line_style(number)["color"], lw=0.8, ls="--")
    last = np.concatenate([trace.mean[trace.late] for trace in traces])
    margin = 0.6 * (last.max() - last.min()) or 0.05 * last.max()
    end.set_ylim(last.min() - margin, last.max() + margin)
    format_axes(full, "epoch", f"loss, {loss_unit(runs)}", [trace.bits for trace in traces])
    format_axes(end, "epoch", f"loss, {loss_unit(runs)}")
    for axes, title in ((full, "(a) the full run"), (end, "(b) its last quarter")):
        axes.set_title(title, loc="left", fontsize=10)
    return figure


def plot_audits_and_losses(audits: Mapping[Path, AuditResult], runs: Sequence[TrainingRun]) -> Figure:
    """Plot the paper's figure of audits and losses.

    (a) which scores have a posterior; (b) where the sampler's weights are negative; then one panel for each data set with the
    losses of the runs on it. A name has the same color in all panels.

    Args:
        audits: Audits by their files.
        runs: Training runs.

    Returns:
        The figure.

    Raises:
        UserError: An audit used a sampler without weights, or a run has no losses yet.
    """
    groups: dict[tuple[Any, ...], list[TrainingRun]] = {}
    for run in runs:
        groups.setdefault(_data_key(run), []).append(run)
    names = _distinct_names({path: Path(audit["checkpoint"]).name for path, audit in audits.items()})
    for group in groups.values():
        names |= _distinct_names({run.path: run.path.resolve().name for run in group})
    ordered = dict.fromkeys(names[path] for path in [*(run.path for run in runs), *audits])
    numbers = {name: number for number, name in enumerate(ordered)}
    labeled = [
        LabeledAudit(plain_label(names[path]), line_style(numbers[names[path]])["color"], audit)
        for path, audit in audits.items()
    ]

    letters = ascii_lowercase[: 2 + len(groups)]
    # A panel without a neighbor is as wide as two: the mosaic names it twice.
    rows = [(letters[at : at + 2] * 2)[:2] for at in range(0, len(letters), 2)]
    figure = new_figure(11.0, 4.1 * len(rows), layout=audit_layout())
    panels = figure.subplot_mosaic("\n".join(rows))
    plot_class_fractions(panels["a"], labeled)
    plot_negative_weights(panels["b"], labeled)
    for letter, (data, group) in zip(letters[2:], groups.items(), strict=True):
        axes = panels[letter]
        traces = {names[run.path]: _Trace.of(run) for run in group}
        for name, trace in traces.items():
            trace.plot(axes, f"{name}, {trace.mean[-1]:.3f} at the end", numbers[name])
        format_axes(axes, "epochs of training", f"score entropy, {loss_unit(group)}", [trace.bits for trace in traces.values()])
        panel_title(axes, letter, f"Training loss on {plain_label(data[0])}", pad=12)
    figure.supxlabel(
        "\n".join(f"{audit.name}: {format_settings(audit.result)}" for audit in labeled), fontsize=SMALL, color=MUTED
    )
    return figure


def _distinct_names(names: Mapping[Path, str]) -> dict[Path, str]:
    """Return each name, or the path where two names are the same."""
    taken = list(names.values())
    return {path: name if taken.count(name) == 1 else str(path) for path, name in names.items()}


def _data_key(run: TrainingRun) -> tuple[Any, ...]:
    """Return what distinguishes the training data of runs, its name first."""
    data = run.record["config"]["data"]
    sizes = (run.record["data"][name] for name in SIZES)  # runs of older versions have no fingerprint
    return (Path(data["folder"]).name if data["name"] == "text" else data["name"], *sizes)


@dataclass(frozen=True)
class Grid:
    """Images to show under a name.

    Args:
        name: Title of the panel.
        tokens: [n, L] images as tokens.
        shape: Height, width and channels of an image.
        levels: Number of levels of a pixel.
    """

    name: str
    tokens: Int[torch.Tensor, "n L"]
    shape: tuple[int, ...]
    levels: int


def plot_sample_grids(panels: Sequence[Grid]) -> Figure:
    """Plot grids of images side by side.

    Args:
        panels: The grids.

    Returns:
        The figure.
    """
    figure = new_figure(3.4 * len(panels), 3.7)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.imshow(picture_grid(panel.tokens, panel.shape, panel.levels), interpolation="nearest")
        axes.set_title(plain_label(panel.name), fontsize=10)
        axes.set_axis_off()
    return figure


def plot_perplexity_over_steps(results: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot generative perplexity over sampler steps: (a) the best curve of each model; (b) each sampler and grid.

    Panel (b) has the models that were sampled in several ways. Where there are none, it has all models.

    Args:
        results: Entries of `results` of `m2s evaluate genppl`. A model is named by the folder of its samples.

    Returns:
        The figure.

    Raises:
        UserError: A result does not hold the number of steps.
    """
    curves: dict[str, dict[str, dict[int, Mapping[str, float]]]] = {}  # model -> sampler and grid -> steps -> interval
    for result in results:
        settings = result["settings"]
        if not settings or "steps" not in settings:
            raise UserError(f"{result['file']} does not hold its number of steps: give samples of m2s sample (.npz)")
        sampler = f"{settings['sampler']}, {settings['grid']}"
        points = curves.setdefault(Path(result["file"]).parent.name, {}).setdefault(sampler, {})
        points[settings["steps"]] = result["perplexity"]
    figure = new_figure(9.6, 3.9)
    models, samplers = figure.subplots(1, 2)
    for place, (model, by_sampler) in enumerate(curves.items()):
        best = min(by_sampler, key=lambda name: np.mean([point["value"] for point in by_sampler[name].values()]))
        _plot_perplexity(models, by_sampler[best], f"{model} ({best})", place)
    several = {model: by_sampler for model, by_sampler in curves.items() if len(by_sampler) > 1} or curves
    number = 0
    for model, by_sampler in several.items():
        for sampler, points in by_sampler.items():
            _plot_perplexity(samplers, points, sampler if len(several) == 1 else f"{model}: {sampler}", number)
            number += 1
    judge = Path(results[0]["judge"]["name"]).name
    for axes, title in ((models, "(a) models"), (samplers, "(b) samplers and grids")):
        format_axes(axes, "steps", f"generative perplexity\n{judge}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(title, loc="left", fontsize=10)
    return figure


def _plot_perplexity(axes: Axes, points: Mapping[int, Mapping[str, float]], name: str, number: int) -> None:
    """Plot one curve with its confidence intervals."""
    steps = sorted(points)
    value, error = error_bars([points[step] for step in steps])
    bars: dict[str, Any] = {"marker": "o", "ms": 4.5, "lw": 1.6, "elinewidth": 1.0, "capsize": 2}
    axes.errorbar(steps, value, error, label=plain_label(name), **bars, **line_style(number))
