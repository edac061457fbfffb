"""The counter of a random number, and the same sample in batches of 1, 5 and 16."""

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

import m2s
from concept_pictures.common import transparent_figure
from m2s.report.style import BAND, BOX, INK, MUTED, SMALL, TEXT, TITLE, VERMILLION
from m2s.samplers import CounterNoise

CHECKPOINT, SEED, STEPS, SAMPLE, SIDE, LEVELS = "builtin:digits-m2s-offset", 0, 16, 3, 8, 17
BATCHES = {1: 3, 5: 0, 16: 0}
"""The number of samples of each call, and the number of its first sample."""
SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"
COUNTER = ("sample i", "step", "site", "purpose")
WIDTH, HEIGHT = 8.9, 4.25


def compute() -> dict[str, Any]:
    """Return the samples of every batch, and some uniform numbers with their counters."""
    torch.set_num_threads(1)
    checkpoint = m2s.load(CHECKPOINT)
    model, head = checkpoint.model.eval(), checkpoint.head
    batches = {}
    for count, start in BATCHES.items():
        drawn = m2s.sample(model, head, (count, SIDE * SIDE), STEPS, seed=SEED, start=start)
        batches[str(count)] = {"start": start, "samples": ["".join(SYMBOLS[token] for token in row) for row in drawn.tolist()]}
    noise = CounterNoise(SEED, torch.tensor([SAMPLE]), length=SIDE * SIDE, step=1)
    return {
        "checkpoint": CHECKPOINT,
        "seed": SEED,
        "steps": STEPS,
        "sample": SAMPLE,
        "batches": batches,
        "uniforms": {purpose: noise(purpose)[0, :3].tolist() for purpose in ("route", "token", "jump")},
    }


def draw(values: dict[str, Any]) -> Figure:
    """Draw the picture.

    Args:
        values: The numbers of `compute`.
    """
    figure = transparent_figure(HEIGHT, None, WIDTH)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(0, HEIGHT)
    axes.set_axis_off()
    _draw_counter(axes, values)
    _draw_batches(axes, values)
    return figure


def _box(axes: Axes, place: tuple[float, float], size: tuple[float, float], words: str, color: str) -> None:
    """A box with words."""
    axes.add_patch(FancyBboxPatch(place, *size, boxstyle="round,pad=0,rounding_size=0.07", fc=color, ec=MUTED, lw=1.0))
    axes.text(place[0] + size[0] / 2, place[1] + size[1] / 2, words, ha="center", va="center", fontsize=TEXT + 1, color=INK)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """An arrow between boxes."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.4, "mutation_scale": 13})


def _draw_counter(axes: Axes, values: dict[str, Any]) -> None:
    """Key and counter go through Philox and give one uniform number."""
    axes.text(0.1, HEIGHT - 0.3, "One number is a function of its counter", fontsize=TITLE, fontweight="bold", color=INK)
    for number, words in enumerate(COUNTER):
        _box(axes, (0.1 + 1.0 * number, 3.02), (0.94, 0.42), words, BAND)
    axes.text(0.1, 3.58, "counter, four words of 32 bits", fontsize=SMALL + 1, color=MUTED)
    _box(axes, (0.1, 2.08), (0.94, 0.42), "seed", BOX)
    axes.text(0.1, 1.86, "key, 64 bits", fontsize=SMALL + 1, color=MUTED, va="center")
    _box(axes, (1.5, 1.98), (1.75, 0.62), "Philox4x32-10", BOX)
    _arrow(axes, (2.37, 3.02), (2.37, 2.62))
    _arrow(axes, (1.06, 2.29), (1.48, 2.29))
    _arrow(axes, (2.37, 1.98), (2.37, 1.58))
    _box(axes, (1.32, 1.10), (2.1, 0.46), "uniform in [0, 1)", BOX)
    lines = [
        f"seed {values['seed']}, sample {values['sample']}, step 1, site 0:",
        *(f"{purpose:6s} {found[0]:.6f}" for purpose, found in values["uniforms"].items()),
    ]
    for number, line in enumerate(lines):
        family = {"family": "monospace"} if number else {}
        axes.text(1.32, 0.88 - 0.22 * number, line, fontsize=SMALL + 1, color=INK, va="center", **family)


def _draw_batches(axes: Axes, values: dict[str, Any]) -> None:
    """The samples of every batch; the same one is framed."""
    left, size, gap = 4.75, 0.46, 0.06
    number = values["sample"]
    axes.text(left, HEIGHT - 0.3, f"Sample {number} is the same in every batch", fontsize=TITLE, fontweight="bold", color=INK)
    top = HEIGHT - 0.62
    for count, batch in values["batches"].items():
        axes.text(left, top, f"n={count}, start={batch['start']}", fontsize=SMALL + 1.5, color=INK, va="center")
        for place, state in enumerate(batch["samples"]):
            column, row = place % 8, place // 8
            x, y = left + column * (size + gap), top - 0.17 - (row + 1) * size - row * gap
            tokens = np.array([SYMBOLS.index(symbol) for symbol in state]).reshape(SIDE, SIDE)
            gray = np.repeat(1 - 0.9 * tokens[..., None] / (LEVELS - 1), 3, -1)
            axes.imshow(np.kron(gray, np.ones((6, 6, 1))), extent=(x, x + size, y, y + size), interpolation="none", zorder=2)
            same = place + batch["start"] == number
            axes.add_patch(
                Rectangle(
                    (x, y), size, size, fill=False, ec=VERMILLION if same else MUTED, lw=3.0 if same else 0.7, zorder=3 + same
                )
            )
        rows = -(-len(batch["samples"]) // 8)
        top -= 0.17 + rows * (size + gap) + 0.30
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(0, HEIGHT)
    axes.set_aspect("auto")
