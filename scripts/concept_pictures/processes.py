"""One digit under four forward processes, and alpha_t of the schedules."""

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import m2s
from concept_pictures.common import label, text, title, transparent_figure
from m2s.report.style import COLORS, INK, LINE_STYLES, MUTED, SMALL, spread_labels

LEVELS, SIDE, DIGIT, SEED = 17, 8, 3, 4
TIMES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"  # a token of an image as one character
MASK = (0.835, 0.369, 0.0)  # vermillion, which is no gray
PROCESSES = {
    "Uniform": m2s.Uniform(LEVELS, m2s.Linear()),
    "Absorbing": m2s.Absorbing(LEVELS, m2s.Linear()),
    "Hybrid": m2s.Hybrid(LEVELS, p_uniform=0.5),
    "RateMatrix.gaussian": m2s.RateMatrix.gaussian(LEVELS, m2s.GeometricRate(60.0), jump_width=1.0),
}
SCHEDULES = {
    "Linear": m2s.Linear(),
    "Cosine": m2s.Cosine(),
    "LogLinear(0.1)": m2s.LogLinear(0.1),
    "Exponential(5)": m2s.Exponential(5.0),
    "Geometric(0.1, 8)": m2s.Geometric(0.1, 8.0),
    "GeometricRate(8)": m2s.GeometricRate(8.0),
}


def trajectory(process: m2s.Process, x_0: torch.Tensor) -> list[str]:
    """Return one path of the forward process at all times, each state as a string.

    Args:
        process: The process.
        x_0: The clean image, [sites].
    """
    generator = torch.Generator().manual_seed(SEED)
    x, states = x_0, []
    for s, t in zip((0.0, *TIMES), TIMES, strict=False):
        times = (torch.tensor(time, dtype=torch.float64) for time in (s, t))
        rows = process.step_transition_matrix(*times)[x] if t > s else torch.eye(process.states, dtype=torch.float64)[x]
        x = torch.multinomial(rows.clamp(min=0), 1, generator=generator).squeeze(-1)
        states.append("".join(SYMBOLS[token] for token in x.tolist()))
    return states


def compute() -> dict[str, Any]:
    """Return the states of one digit under every process, and alpha over t for every schedule."""
    digits = m2s.data.load("digits")
    number = int((digits.train_labels == DIGIT).nonzero()[0])
    x_0 = digits.train[number].long().reshape(-1)
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    return {
        "times": list(TIMES),
        "paths": {name: trajectory(process, x_0) for name, process in PROCESSES.items()},
        "prior_kl": {name: float(process.prior_kl(x_0[:1], t[-1:])) for name, process in PROCESSES.items()},
        "t": t.tolist(),
        "alpha": {name: schedule.alpha(t).tolist() for name, schedule in SCHEDULES.items()},
        "alpha_one": {name: float(schedule.alpha(t[-1])) for name, schedule in SCHEDULES.items()},
    }


def image(state: str) -> np.ndarray:
    """Return the colors of a state, dark where the token is large, [SIDE, SIDE, 3].

    Args:
        state: A state as a string.
    """
    tokens = np.array([SYMBOLS.index(symbol) for symbol in state]).reshape(SIDE, SIDE)
    gray = 1 - 0.9 * np.minimum(tokens, LEVELS - 1)[..., None] / (LEVELS - 1)
    return np.where((tokens == LEVELS)[..., None], MASK, gray * np.ones(3))


def draw(values: dict[str, Any]) -> Figure:
    """Draw the picture.

    Args:
        values: The numbers of `compute`.
    """
    figure = transparent_figure(7.3)
    above, below = figure.subfigures(2, 1, height_ratios=(1.42, 1.0))
    for part in (above, below):
        part.patch.set_visible(False)
    panels = above.subplots(len(values["paths"]), len(values["times"]))
    for row, (name, states) in zip(panels, values["paths"].items(), strict=True):
        for axes, state in zip(row, states, strict=True):
            axes.imshow(np.kron(image(state), np.ones((8, 8, 1))), interpolation="none")
            axes.set_xticks([])
            axes.set_yticks([])
            for spine in axes.spines.values():
                spine.set_color(MUTED)
        row[0].set_ylabel(name.replace(".", ".\n"), fontsize=SMALL + 0.5, color=INK, rotation=0, ha="right", va="center")
    for axes, t in zip(panels[0], values["times"], strict=True):
        axes.set_title(f"t = {t:g}", fontsize=SMALL + 0.5, color=INK)
    axes = below.subplots()
    ends = []
    for number, (name, alpha) in enumerate(values["alpha"].items()):
        axes.plot(values["t"], alpha, color=COLORS[number], lw=2.0, ls=LINE_STYLES[number % len(LINE_STYLES)])
        ends.append((alpha[30], name, number))
    # The curves meet at both ends, so the labels are in the order of the curves at t = 0.3.
    for place, (_, name, number) in zip(spread_labels([end[0] for end in ends], 0.105), ends, strict=True):
        style = {"color": COLORS[number], "ls": LINE_STYLES[number % len(LINE_STYLES)], "lw": 2.0}
        axes.plot([1.025, 1.075], [place, place], clip_on=False, **style)
        text(axes, (1.09, place), name, COLORS[number], SMALL + 0.5, va="center", fontweight="bold")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.03)
    label(axes, "time t", r"$\alpha_t$")
    title(axes, "Schedules")
    return figure
