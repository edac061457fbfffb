"""The paper's figures that compare runs: traces of the loss, grids of samples, generative perplexity against steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from m2s.evaluate.bootstrap import reach
from m2s.report import Refused
from m2s.report.curves import column, label, look, settle
from m2s.report.run import Run
from m2s.report.samples import picture_grid

LAST = 0.25  # of a run, in the panel that enlarges its end
TRAILING = 0.03  # of a run, over which the strong curve is a mean


def trailing(values: np.ndarray, width: int) -> np.ndarray:
    """The mean over the last `width` values up to each, or over those that there are."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


def losses(runs: Sequence[Run]) -> Figure:
    """Loss over epochs, (a) all and (b) the last quarter: records pale, a trailing mean strong, the end of warm-up dashed."""
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    whole, end = figure.subplots(1, 2)
    low, high, longest = np.inf, -np.inf, 0.0
    for number, run in enumerate(runs):
        steps, bits = column(run.training, "step"), column(run.training, "bits")
        if not len(bits):
            raise Refused(f"{run.path} has no records of a loss in its log.jsonl yet")
        epochs = steps * run.record["config"]["run"]["batch"] / run.record["data"]["rows"]
        mean, style = trailing(bits, max(1, round(TRAILING * len(bits)))), look(number)
        late = steps >= (1 - LAST) * steps[-1]
        for axes, at in ((whole, slice(None)), (end, late)):
            axes.plot(epochs[at], bits[at], color=style["color"], lw=0.7, alpha=0.3)
            axes.plot(epochs[at], mean[at], lw=1.8, label=label(run.name), **style)
        warm = run.record["config"]["optimizer"]["warmup"] / steps[-1] * epochs[-1]
        whole.axvline(warm, color=style["color"], lw=0.8, ls="--")
        low, high, longest = min(low, mean[late].min()), max(high, mean[late].max()), max(longest, epochs[-1])
    room = 0.6 * (high - low) or 0.05 * high
    end.set_ylim(low - room, high + room)
    settle(whole, "epoch", "loss, bits per site", [column(run.training, "bits") for run in runs])
    settle(end, "epoch", "loss, bits per site")
    for axes, title in ((whole, "(a) the whole run"), (end, "(b) its last quarter")):
        axes.set_title(title, loc="left", fontsize=10)
    return figure


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
            raise Refused(f"{result['file']} does not say with how many steps it was drawn: give samples of m2s sample (.npz)")
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
        settle(axes, "steps", f"generative perplexity, {judge}")
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
