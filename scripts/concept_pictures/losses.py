"""The integrand of the NELBO over t, and its three terms against the exact NLL, in a world that is enumerated."""

from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

import m2s
from concept_pictures.common import label, text, title, transparent_figure
from m2s.evaluation.likelihood import ESTIMATORS, Options, World, exact_network, random_network
from m2s.evaluation.likelihood.reverse import exact_nll
from m2s.report.style import BAND, BLUE, GREEN, INK, SMALL, VERMILLION

VOCAB, LENGTH, SEED, SPREAD, NOISE = 3, 3, 0, 1.5, 0.35
ENDS = (0.001, 0.01, 0.05, 0.1, 0.2)  # t_min of the bars
PURPLE = "#9B4F96"


def data_distribution() -> torch.Tensor:
    """Return the distribution that `exact_network` knows, over all clean sequences."""
    normal = torch.randn(VOCAB**LENGTH, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    return torch.softmax(SPREAD * normal, 0)


def integrand(world: World, data: torch.Tensor, t: float) -> float:
    """Return the expected score entropy of a sequence at one time, in nats.

    Args:
        world: The world.
        data: The data distribution.
        t: The time.
    """
    process, head = world.head.process, world.head
    first, second = torch.cartesian_prod(torch.arange(len(world.clean)), torch.arange(len(world.noisy))).unbind(-1)
    x_0, x_t, times = world.clean[first], world.noisy[second], torch.full((len(first),), t, dtype=torch.float64)
    probability = process.rows(x_0, times).gather(-1, x_t.unsqueeze(-1)).squeeze(-1).prod(-1) * data[first]
    output = world.output(torch.tensor([t]))[0][second]
    return float(probability @ m2s.score_entropy(head, output, x_0, x_t, times).sum(-1))


def terms(world: World, data: torch.Tensor) -> dict[str, float]:
    """Return the terms of the NELBO and the exact NLL of the reverse process, averaged over the data, in nats.

    Args:
        world: The world.
        data: The data distribution.
    """
    found = {"integral": 0.0, "prior": 0.0, "reconstruction": 0.0}
    for term in ESTIMATORS["nelbo"].build(world.head, world.options):
        found[term.name] += float(data @ world.expected(term))
    nll, _ = exact_nll(world, ESTIMATORS["nelbo"])
    return {"t_min": world.options.t_min, **found, "nelbo": sum(found.values()), "nll": float(data @ nll)}


def compute() -> dict[str, Any]:
    """Return the integrand of an exact and of an imperfect network, and the terms of the latter over t_min."""
    head, data = m2s.Posterior(m2s.Uniform(VOCAB, m2s.Linear())), data_distribution()
    exact = exact_network(head, LENGTH, SEED, SPREAD)
    noise = random_network(head.process, LENGTH, seed=1, scale=NOISE)
    networks = {"exact": exact, "imperfect": lambda x_t, t: exact(x_t, t) + noise(x_t, t)}
    times = [0.005, *(number / 50 for number in range(1, 50)), 0.995]
    worlds = {name: World(network, head, LENGTH) for name, network in networks.items()}
    curves = {name: [integrand(world, data, t) for t in times] for name, world in worlds.items()}
    bars = {
        name: [terms(World(network, head, LENGTH, Options(t_min=t_min)), data) for t_min in ENDS]
        for name, network in networks.items()
    }
    return {"entropy": float(-(data @ data.log())), "t": times, "integrand": curves, "terms": bars}


def draw(values: dict[str, Any]) -> Figure:
    """Draw the picture.

    Args:
        values: The numbers of `compute`.
    """
    figure = transparent_figure(4.2)
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.25))
    _draw_integrand(left, values)
    _draw_terms(right, values)
    return figure


def _draw_integrand(axes: Axes, values: dict[str, Any]) -> None:
    """The integrand of both networks; the area between them is what the error of a network costs."""
    t, exact, imperfect = values["t"], values["integrand"]["exact"], values["integrand"]["imperfect"]
    axes.fill_between(t, exact, imperfect, color=VERMILLION, alpha=0.18, lw=0)
    axes.plot(t, imperfect, color=VERMILLION, lw=2.2, ls=(0, (5, 1.5)))
    axes.plot(t, exact, color=BLUE, lw=2.2)
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    text(axes, (t[10], imperfect[10]), "  imperfect network", VERMILLION, SMALL + 0.5, va="bottom", fontweight="bold")
    text(axes, (0.08, 1.5), "exact network", BLUE, SMALL + 0.5, fontweight="bold")
    label(axes, "time t", "expected score entropy, nats per sequence")
    title(axes, "The integrand")


def _draw_terms(axes: Axes, values: dict[str, Any]) -> None:
    """The terms, stacked, and the exact NLL of the same reverse process."""
    rows = values["terms"]["imperfect"]
    places = list(range(len(rows)))
    below = [0.0] * len(rows)
    colors = {"integral": BAND, "prior": PURPLE, "reconstruction": GREEN}
    for name, color in colors.items():
        heights = [row[name] for row in rows]
        axes.bar(places, heights, 0.62, bottom=below, color=color, label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    for place, row in zip(places, rows, strict=True):
        line = {
            "color": INK,
            "lw": 2.4,
            "solid_capstyle": "butt",
            "path_effects": [withStroke(linewidth=3.8, foreground="#FFFFFF")],
        }
        axes.plot([place - 0.42, place + 0.42], [row["nll"]] * 2, label=None if place else "exact NLL", **line)
    axes.axhline(values["entropy"], color=INK, lw=1.2, ls=":", label="entropy of the data")
    axes.set_xticks(places, [f"{row['t_min']:g}" for row in rows])
    axes.set_ylim(0, 1.42 * max(below))
    label(axes, r"$t_{\min}$, where both ends of time are cut", "nats per sequence")
    axes.grid(visible=False, axis="x")
    axes.legend(fontsize=SMALL, ncols=2, loc="upper left", frameon=False, labelcolor=INK)
    title(axes, "The three terms, imperfect network")
