"""The paper's figures that compare runs: losses, audits above them, grids of samples, generative perplexity over steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from m2s.errors import UserError
from m2s.evaluation.bootstrap import reach
from m2s.report import audit
from m2s.report.curves import column, format_axes, label, look
from m2s.report.read_run import Run
from m2s.report.samples import picture_grid
from m2s.report.toy import MUTED, SMALL

LAST = 0.25  # of a run, in the panel that enlarges its end
TRAILING = 0.03  # of a run, over which the strong curve is a mean


def trailing(values: np.ndarray, width: int) -> np.ndarray:
    """The mean over the last `width` values up to each, or over those that there are."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


@dataclass(frozen=True)
class Trace:
    """The loss of a run over its epochs: as recorded, and its trailing mean."""

    epochs: Float[np.ndarray, "n"]
    bits: Float[np.ndarray, "n"]
    mean: Float[np.ndarray, "n"]
    late: Bool[np.ndarray, "n"]  # the last quarter
    warm: float  # where the warm-up ends

    @classmethod
    def of(cls, run: Run) -> "Trace":
        steps, bits = column(run.training, "step"), column(run.training, "bits")
        if not len(bits):
            raise UserError(f"{run.path} has no records of a loss in its log.jsonl yet")
        epoch = run.record["data"]["rows"] / run.record["config"]["run"]["batch"]  # in steps
        warm = run.record["config"]["optimizer"]["warmup"] / epoch
        mean = trailing(bits, max(1, round(TRAILING * len(bits))))
        return cls(steps / epoch, bits, mean, steps >= (1 - LAST) * steps[-1], warm)

    def draw(self, axes: Axes, name: str, number: int, at: Any = slice(None)) -> None:
        """The records `at`, pale, and their mean, strong."""
        style = look(number)
        axes.plot(self.epochs[at], self.bits[at], color=style["color"], lw=0.7, alpha=0.3)
        axes.plot(self.epochs[at], self.mean[at], lw=1.8, label=label(name), **style)


def losses(runs: Sequence[Run]) -> Figure:
    """Loss over epochs, (a) all and (b) the last quarter: records pale, a trailing mean strong, the end of warm-up dashed."""
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    whole, end = figure.subplots(1, 2)
    traces = [Trace.of(run) for run in runs]
    for number, (run, trace) in enumerate(zip(runs, traces, strict=True)):
        trace.draw(whole, run.name, number)
        trace.draw(end, run.name, number, trace.late)
        whole.axvline(trace.warm, color=look(number)["color"], lw=0.8, ls="--")
    last = np.concatenate([trace.mean[trace.late] for trace in traces])
    room = 0.6 * (last.max() - last.min()) or 0.05 * last.max()
    end.set_ylim(last.min() - room, last.max() + room)
    format_axes(whole, "epoch", "loss, bits per site", [trace.bits for trace in traces])
    format_axes(end, "epoch", "loss, bits per site")
    for axes, title in ((whole, "(a) the whole run"), (end, "(b) its last quarter")):
        axes.set_title(title, loc="left", fontsize=10)
    return figure


def audited(audits: Mapping[Path, audit.Found], runs: Sequence[Run]) -> Figure:
    """The paper's figure of audits and losses: (a) which scores have a posterior, (b) where weights of the sampler are
    negative, then a panel for each data set with the losses of the runs on it. A name has one colour in all panels."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(_data(run), []).append(run)
    names = _apart({path: Path(found["checkpoint"]).name for path, found in audits.items()})
    for group in groups.values():
        names |= _apart({run.path: run.path.resolve().name for run in group})
    ordered = dict.fromkeys(names[path] for path in [*(run.path for run in runs), *audits])
    numbers = {name: number for number, name in enumerate(ordered)}
    shown = [audit.Shown(label(names[path]), look(numbers[names[path]])["color"], found) for path, found in audits.items()]

    places = ascii_lowercase[: 2 + len(groups)]
    rows = [(places[at : at + 2] * 2)[:2] for at in range(0, len(places), 2)]  # one without a neighbour is as wide as two
    figure = Figure(figsize=(11, 4.1 * len(rows)), layout=audit.layout())
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic("\n".join(rows))
    audit.draw_shares(panels["a"], shown)
    audit.draw_weights(panels["b"], shown)
    for letter, (data, group) in zip(places[2:], groups.items(), strict=True):
        axes = panels[letter]
        traces = {names[run.path]: Trace.of(run) for run in group}
        for name, trace in traces.items():
            trace.draw(axes, f"{name}, {trace.mean[-1]:.3f} at the end", numbers[name])
        format_axes(axes, "epochs of training", "score entropy, bits per site", [trace.bits for trace in traces.values()])
        audit.title(axes, letter, f"Training loss on {label(data[0])}", pad=12)
    figure.supxlabel("\n".join(f"{one.name}: {audit.counted(one.found)}" for one in shown), fontsize=SMALL, color=MUTED)
    return figure


def _apart(names: Mapping[Path, str]) -> dict[Path, str]:
    """Each name, or the whole path where two would be called the same."""
    taken = list(names.values())
    return {path: name if taken.count(name) == 1 else str(path) for path, name in names.items()}


def _data(run: Run) -> tuple[Any, ...]:
    """What a run was trained on: its name first, then all that makes it another."""
    data = run.record["config"]["data"]
    return (Path(data["folder"]).name if data["name"] == "text" else data["name"], *run.record["data"].values())


@dataclass(frozen=True)
class Grid:
    """Images to show under a name."""

    name: str
    tokens: Int[torch.Tensor, "n L"]
    shape: tuple[int, ...]
    levels: int


def grids(panels: Sequence[Grid]) -> Figure:
    """Grids of images side by side."""
    figure = Figure(figsize=(3.4 * len(panels), 3.7), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.imshow(picture_grid(panel.tokens, panel.shape, panel.levels), interpolation="nearest")
        axes.set_title(label(panel.name), fontsize=10)
        axes.set_axis_off()
    return figure


def against_steps(results: Sequence[Mapping[str, Any]]) -> Figure:
    """Generative perplexity over the steps of a sampler: (a) a curve for each model, its best; (b) for each sampler and grid.

    A model is named by the folder that its samples lie in.
    """
    curves: dict[str, dict[str, dict[int, Mapping[str, float]]]] = {}
    for result in results:
        settings = result["settings"]
        if not settings or "steps" not in settings:
            raise UserError(
                f"{result['file']} does not say with how many steps it was drawn: give samples of m2s sample (.npz)"
            )
        how = f"{settings['sampler']}, {settings['grid']}"
        curves.setdefault(Path(result["file"]).parent.name, {}).setdefault(how, {})[settings["steps"]] = result["perplexity"]
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    models, samplers = figure.subplots(1, 2)
    number = 0
    for place, (model, by_sampler) in enumerate(curves.items()):
        best = min(by_sampler, key=lambda how: np.mean([point["value"] for point in by_sampler[how].values()]))
        _curve(models, by_sampler[best], label(f"{model} ({best})"), place)
        for how, points in by_sampler.items():
            _curve(samplers, points, label(how if len(curves) == 1 else f"{model}: {how}"), number)
            number += 1
    judge = Path(results[0]["judge"]["name"]).name
    for axes, title in ((models, "(a) models"), (samplers, "(b) samplers and grids")):
        format_axes(axes, "steps", f"generative perplexity, {judge}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(title, loc="left", fontsize=10)
    return figure


def _curve(axes: Any, points: Mapping[int, Mapping[str, float]], name: str, number: int) -> None:
    steps = sorted(points)
    value, error = reach([points[step] for step in steps])
    style = look(number)
    axes.errorbar(steps, value, error, marker="o", ms=4.5, lw=1.6, elinewidth=1.0, capsize=2, label=name, **style)
