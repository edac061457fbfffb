"""The exact distribution of complete samples, by multiplying the matrices of all steps, and samples of `m2s.sample`."""

import itertools
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

import closed_forms as forms
import m2s
from closed_forms import log
from exact_steps import tensor
from oracle import Case, absorbing_rates, linear, tabulated, uniform_rates
from step_cases import EXACT, MASKS, rates_of, score_of

pytestmark = pytest.mark.usefixtures("small_blocks")


SMALL = {
    "uniform": Case(m2s.Uniform(3, m2s.Linear()), tabulated(uniform_rates(3), linear), 3),
    "absorbing": Case(m2s.Absorbing(3, m2s.Linear()), tabulated(absorbing_rates(3), linear, 3), 3),
}


def step_form(case: Case, sampler: str, head: m2s.Head, strength: float) -> tuple[forms.StepForm, bool]:
    """The closed form of one step at all sites, and whether it starts at 1 - t_min."""
    process = case.process

    def closed_form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        mu = forms.posterior(process, output, k, at, head.offset == "exact")
        if s == 0:  # the last step of every sampler
            return mu
        if sampler in ("euler", "tau_leaping"):
            rates = rates_of(head, output, k, at)
            return (forms.euler if sampler == "euler" else forms.tau_leap)(rates, k, t - s)
        if sampler == "analytic":
            return forms.analytic(process, score_of(head, output, k, at), k, at, s)
        if sampler == "remasking":
            return forms.remasking(process, mu, k, at, s, strength)
        return forms.bayes(process, mu, k, at, s)

    return closed_form, sampler in ("euler", "tau_leaping", "analytic")


def exact_distribution_of_samples(
    case: Case,
    network: forms.Network,
    sampler: str,
    head: m2s.Head,
    grid: str,
    steps: int,
    t_min: float,
    strength: float = 0.1,
) -> np.ndarray:
    """The exact distribution of the samples over clean sequences."""
    closed_form, excludes_t_one = step_form(case, sampler, head, strength)
    ends = forms.grid(grid, steps, 1e-5 if sampler == "analytic" else None)
    p = forms.terminal_distribution(case.process, case.length, network, closed_form, ends, excludes_t_one, t_min)
    oracle = case.oracle()
    assert abs(p.sum() - 1) < 1e-9
    assert p[(oracle.noisy >= case.process.vocab).any(1)].sum() < EXACT
    return p[(oracle.noisy < case.process.vocab).all(1)]


@pytest.mark.parametrize("grid", ["linear", "cosine"])
@pytest.mark.parametrize("sampler", ["bayes", "euler", "analytic", "tau_leaping"])
@pytest.mark.parametrize("name", SMALL)
def test_terminal_distribution_converges(name: str, sampler: str, grid: str) -> None:
    """With the exact posterior, the distance to the data distribution decreases like 1/steps, also in the last doubling."""
    distance, order, message = errors_by_steps(name, sampler, grid, [8, 16, 32, 64])
    assert order > 0.8, message
    assert distance[3] < 1.05 * distance[2] * 2**-order, message


def errors_by_steps(
    name: str, sampler: str, grid: str, steps: list[int], strength: float = 0.1
) -> tuple[list[float], float, str]:
    """Distances to the data distribution, their order of decrease without the last, and a message."""
    case = SMALL[name]
    head, distribution = m2s.Posterior(case.process), case.oracle().distribution

    def network(x: np.ndarray, t: float) -> np.ndarray:
        return exact_logits(name, t)

    each = [exact_distribution_of_samples(case, network, sampler, head, grid, n, 1e-6, strength) for n in steps]
    distance = [forms.total_variation(p, distribution) for p in each]
    order = -np.polyfit(np.log2(steps[:-1]), np.log2(distance[:-1]), 1)[0]
    return distance, order, f"{name} {sampler} {grid}: order {order:.3f}, distances {distance} after {steps} steps"


@lru_cache(maxsize=1000)
def exact_logits(name: str, t: float) -> np.ndarray:
    """log mu of every sequence."""
    oracle = SMALL[name].oracle()
    return log(oracle.posterior(oracle.noisy, t))


@pytest.mark.parametrize("grid", ["linear", "cosine"])
def test_remasking_converges_more_slowly_with_greater_strength(grid: str) -> None:
    """The strength is a fraction of the largest remasking probability, not a rate, so short steps remask as much as long ones.

    The error decreases like steps^(-1/2) only. With strength 0 this is the ancestral sampler, of order one.
    """
    strong, order, message = errors_by_steps("absorbing", "remasking", grid, [16, 32, 64, 128], strength=1.0)
    assert 0.5 < order < 0.65, message
    assert strong[3] < 1.05 * strong[2] * 2**-0.5, message
    none, order, message = errors_by_steps("absorbing", "remasking", grid, [8, 16, 32, 64], strength=0.0)
    assert order > 0.8 and none[3] < 1.05 * none[2] * 2**-order, message
    ancestral, _, _ = errors_by_steps("absorbing", "bayes", grid, [8, 16, 32, 64])
    np.testing.assert_allclose(none, ancestral, atol=1e-11)
    assert strong[1] > 2 * none[2]


@pytest.mark.parametrize("name", MASKS)
def test_first_hitting_has_no_discretization_error(name: str) -> None:
    """One token a call, from the exact posterior, which does not depend on time, gives the data distribution."""
    oracle, process = MASKS[name].oracle(), MASKS[name].process
    early, late = (oracle.posterior(oracle.noisy, t) for t in (0.2, 0.8))
    np.testing.assert_allclose(early, late, atol=1e-11)
    x, masked = oracle.noisy, oracle.noisy == process.mask
    left = masked.sum(1)
    matrix = np.diag((left == 0).astype(float))
    into = oracle.neighbors(x)
    for i, y in itertools.product(range(oracle.length), range(process.vocab)):
        rows = np.flatnonzero(masked[:, i])
        matrix[rows, into[rows, i, y]] += early[rows, i, y] / left[rows]
    p = (left == oracle.length).astype(float)
    for _ in range(oracle.length):
        p = p @ matrix
    np.testing.assert_allclose(p[left == 0], oracle.distribution, atol=1e-10)
    assert forms.total_variation(p[left == 0], oracle.distribution) < 1e-10


def check_agreement(samples: np.ndarray, case: Case, distribution: np.ndarray) -> None:
    """Pearson's chi-square test of samples against a distribution. Cells with an expected count below five are merged."""
    oracle = case.oracle()
    counts = np.bincount(samples @ case.process.vocab ** np.arange(case.length)[::-1], minlength=len(oracle.clean))
    wanted = len(samples) * distribution
    rare = wanted < 5
    counts, wanted = (np.append(x[~rare], x[rare].sum()) if rare.any() else x for x in (counts, wanted))
    assert chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue > 1e-4
    assert (counts[wanted == 0] == 0).all()


SAMPLES, CALLS = 20_000, 6
LOOP = [("uniform", "bayes"), ("uniform", "euler"), ("uniform", "analytic"), ("uniform", "tau_leaping")]
LOOP += [("absorbing", "bayes"), ("absorbing", "euler"), ("absorbing", "tau_leaping"), ("absorbing", "remasking")]


@pytest.mark.parametrize(("name", "sampler"), [*LOOP, ("absorbing", "first_hitting"), ("uniform", "predictor_corrector")])
def test_samples_have_the_exact_distribution(name: str, sampler: str) -> None:
    """20,000 samples of `m2s.sample` with the exact network, against the exact distribution of its steps."""
    case = SMALL[name]
    oracle, head = case.oracle(), m2s.Posterior(case.process)

    def table(t: float) -> np.ndarray:
        return exact_logits(name, float(np.float32(t)))  # the network sees a float32 time

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        assert (t.dtype == torch.float32 and (t == t[0]).all()) or sampler == "first_hitting"
        return tensor(table(0.5 if sampler == "first_hitting" else float(t[0]))[oracle.index(x_t.numpy())])

    samples = m2s.sample(model, head, (SAMPLES, case.length), CALLS, sampler, "cosine", seed=3, micro_batch=5000).numpy()
    if sampler == "first_hitting":
        distribution = oracle.distribution  # the posterior under a mask does not depend on time
    elif sampler == "predictor_corrector":
        distribution = corrected(case, table)
    else:
        distribution = exact_distribution_of_samples(case, lambda x, t: table(t), sampler, head, "cosine", CALLS, 1e-3)
        assert forms.total_variation(distribution, oracle.distribution) > 0.002
    check_agreement(samples, case, distribution)


def corrected(case: Case, table: Callable[[float], np.ndarray]) -> np.ndarray:
    """The distribution after Bayes steps, each but the last followed by one Gibbs move at one site."""
    process, oracle, t_min = case.process, case.oracle(), 1e-3
    x, ends = oracle.noisy, forms.grid("cosine", CALLS)
    p = np.full(len(x), 1 / len(x))
    for t, s in itertools.pairwise(ends):
        at = min(t, 1 - t_min)
        mu = forms.posterior(process, table(forms.network_time(t, t_min)), x, at)
        p = p @ forms.joint_step(mu if s == 0 else forms.bayes(process, mu, x, at, s))
        if s > 0:
            score = forms.score_from_posterior(process, forms.posterior(process, table(s), x, s), x, s)
            matrix = np.zeros((len(x), len(x)))
            gibbs_distribution = score / score.sum(-1, keepdims=True) / case.length
            np.add.at(matrix, (np.arange(len(x))[:, None, None], oracle.neighbors(x)), gibbs_distribution)
            p = p @ matrix
    return p


class Tiny(torch.nn.Module):
    """A small network over all sites at once."""

    def __init__(self, states: int, length: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(states, 16)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(16 * length + 2, 64), torch.nn.SiLU(), torch.nn.Linear(64, 64), torch.nn.SiLU()
        )
        self.last = torch.nn.Linear(64, length * states)
        self.shape = (length, states)

    def forward(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        time = torch.stack([t, torch.log(t)], -1)
        return self.last(self.body(torch.cat([self.embed(x_t).flatten(1), time], -1))).unflatten(-1, self.shape)


@pytest.mark.parametrize(("name", "offset"), [("uniform", "exact"), ("absorbing", "none")])
def test_samples_of_a_trained_network_have_its_exact_distribution(name: str, offset: str) -> None:
    """Samples of a trained network have the exact distribution of its steps, which is not that of the data."""
    case = SMALL[name]
    oracle, head = case.oracle(), m2s.Posterior(case.process, offset=offset)
    model = Tiny(case.process.states, case.length)
    objective = m2s.Objective(model, head)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(100):
        x_0 = tensor(oracle.clean[rng.choice(len(oracle.clean), 256, p=oracle.distribution)])
        loss = objective(x_0, m2s.stratified_times(256, 1e-3, 1 - 1e-3)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-20:]) < np.mean(losses[:10])

    def network(x: np.ndarray, t: float) -> np.ndarray:
        with torch.no_grad():
            return model(tensor(x), torch.full((len(x),), t)).double().numpy()

    for sampler in ("bayes", "euler"):
        distribution = exact_distribution_of_samples(case, network, sampler, head, "cosine", CALLS, 1e-3)
        samples = m2s.sample(model, head, (SAMPLES, case.length), CALLS, sampler, "cosine", seed=5, micro_batch=5000)
        check_agreement(samples.numpy(), case, distribution)
        assert 0.01 < forms.total_variation(distribution, oracle.distribution) < 0.5
