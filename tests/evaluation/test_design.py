"""Designs of noise: each pass alone has the distribution of the forward process, and the estimate its exact expectation."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import binom

import m2s
from exact_steps import GivenNoise, unchecked
from m2s.evaluation.likelihood import ESTIMATORS, Options, World, random_network
from m2s.evaluation.likelihood.base import Term, reconstruction
from m2s.evaluation.likelihood.design import PLAIN, Design, Noise, nelbo_groups
from m2s.evaluation.likelihood.levels import COUNT, POSITION, Point, Times
from m2s.evaluation.likelihood.touched import Touched, Untouched, draw_number
from m2s.ops.counter_noise import CounterNoise

HEADS = {
    "masks": m2s.Posterior(m2s.Absorbing(2, m2s.LogLinear(1e-2))),
    "uniform": m2s.Posterior(m2s.Uniform(3, m2s.Linear())),
    "hybrid": m2s.Posterior(m2s.Hybrid(2, p_uniform=0.4)),
}


@pytest.mark.parametrize("least", [0, 1])
def test_number_of_replaced_tokens_inverts_the_binomial_distribution(least: int) -> None:
    """By enumeration of the uniform number: the thresholds are those of scipy's distribution."""
    alpha, length = 0.7, 6
    p = np.array([binom.pmf(n, length, 1 - alpha) for n in range(length + 1)])
    p[:least] = 0
    edges = np.cumsum(p) / p.sum()
    below, above = edges[least:-1] - 1e-12, edges[least:-1] + 1e-12
    for place, expected in ((below, 0), (above, 1)):
        u = torch.from_numpy(place)
        found = draw_number(torch.full_like(u, alpha), torch.full((len(u),), length), u, least)
        assert (found.numpy() == np.arange(least, length) + expected).all()


def passes_of_a_sweep(order: tuple[int, ...], shifts: np.ndarray, alphas: list[float]) -> torch.Tensor:
    """The replaced positions of every pass, [m, B, L], for a given order of positions and B shifts."""
    places = torch.tensor([order]).double().argsort(-1).double().repeat(len(shifts), 1)
    numbers = GivenNoise({POSITION: places}, {COUNT: torch.from_numpy(shifts)})
    noise = Noise(HEADS["masks"], Design(stratified=True, coupling="sweep"), Times(0.1, 1.0), len(alphas), 0, 0)
    alpha = torch.tensor(alphas, dtype=torch.float64).unsqueeze(-1).expand(-1, len(shifts))
    free = torch.ones(len(shifts), len(order), dtype=torch.bool)
    return torch.stack(noise._sweep([numbers] * len(alphas), alpha, free))


def test_every_pass_of_a_sweep_replaces_positions_independently() -> None:
    """All orders and a fine grid of shifts: at each pass the set of positions has its product distribution."""
    alphas, length, grid = [0.9, 0.6, 0.6, 0.2], 3, 2000
    counts = np.zeros((len(alphas), 2**length))
    orders = list(itertools.permutations(range(length)))
    for order in orders:
        found = passes_of_a_sweep(order, (np.arange(grid) + 0.5) / grid, alphas)
        places = (found.long() * 2 ** torch.arange(length)).sum(-1)
        counts += np.stack([np.bincount(each, minlength=2**length) for each in places.numpy()])
    for alpha, count in zip(alphas, counts / (grid * len(orders)), strict=True):
        sizes = np.array([bin(place).count("1") for place in range(2**length)])
        np.testing.assert_allclose(count, (1 - alpha) ** sizes * alpha ** (length - sizes), atol=2 * length / grid)


def test_a_sweep_takes_positions_without_replacement() -> None:
    """Passes that together replace no more positions than there are replace different ones."""
    found = passes_of_a_sweep((2, 0, 3, 1), np.linspace(0, 0.99, 50), [0.75, 0.75, 0.75, 0.75]).long()
    few = found.sum((0, 2)) <= 4
    assert few.any()
    assert int(found.sum(0)[few].max()) <= 1


def test_antithetic_passes_mirror_the_noise() -> None:
    """At half of the tokens replaced, a pair of passes replaces every position exactly once."""
    noise = Noise(HEADS["masks"], Design(coupling="antithetic"), Times(0.1, 1.0), 2, 3, 0)
    each = [CounterNoise(3, torch.arange(5), 8, number) for number in range(2)]
    free = torch.ones(5, 8, dtype=torch.bool)
    first, second = noise._independent(each, torch.full((2, 5), 0.5, dtype=torch.float64), free)
    assert (first ^ second).all()


@pytest.mark.parametrize("name", HEADS)
def test_the_split_of_a_time_is_exact(name: str) -> None:
    """The parts with and without replaced tokens add up to the mean at one time."""
    head = HEADS[name]
    world = World(random_network(head.process, 2), head, 2)
    parts = [world.expected(Term("reconstruction", levels(0.2), reconstruction)) for levels in (Untouched, Touched, Point)]
    torch.testing.assert_close(parts[0] + parts[1], parts[2], rtol=1e-10, atol=1e-12)


DESIGNS = {
    "plain": PLAIN,
    "efficient": None,
    "all": Design(0.1, stratified=True, coupling="sweep", split=True, last_every=8),
    "antithetic": Design(importance=0.1, stratified=True, coupling="antithetic"),
    "sweep": Design(importance=0.1, coupling="sweep", split=True),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("design", DESIGNS)
def test_designs_are_unbiased(name: str, design: str) -> None:
    """The mean over many groups is the enumerated NELBO of each clean sequence."""
    head, copies, options = HEADS[name], 400, Options(t_min=0.05)
    model = random_network(head.process, 2, scale=0.5)
    world = World(model, head, 2, options)
    exact = world.nats(ESTIMATORS["nelbo"])
    with unchecked():
        nats, _ = nelbo_groups(model, head, world.clean.repeat(copies, 1), DESIGNS[design], 1, 4, 7, 10_000, options)
    each = nats[0].reshape(copies, -1)
    error = each.std(0) / copies**0.5
    assert ((each.mean(0) - exact).abs() < 4.5 * error + 1e-9).all()
    assert (error < 0.2 * exact).all()


def test_the_efficient_design_has_less_variance_per_call() -> None:
    head = HEADS["masks"]
    model, x_0 = random_network(head.process, 6, scale=0.3), torch.zeros(60, 6, dtype=torch.long)
    cost = {}
    for name in ("plain", "efficient"):
        with unchecked():
            nats, calls = nelbo_groups(model, head, x_0, DESIGNS[name], 6, 8, 1, 1000)
        cost[name] = float(nats.var(0).mean()) * calls
    assert cost["plain"] > 3 * cost["efficient"]


def test_a_tabulated_process_is_an_error() -> None:
    head = m2s.Posterior(m2s.RateMatrix.uniform(3, m2s.Exponential(3.0)))
    with pytest.raises(ValueError, match="needs uniform, masking or hybrid noise"):
        nelbo_groups(random_network(head.process, 2), head, torch.zeros(1, 2, dtype=torch.long))
