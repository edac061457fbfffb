"""Which samplers turn p_t into p_s in one step, given the exact prediction: a proof of every declaration by enumeration.

The transition matrix of a step over all sequences is computed from the sampler itself, by integrating over its uniforms.
"""

import itertools

import numpy as np
import pytest

import closed_forms as forms
import exact_steps
import m2s
from closed_forms import log
from exact_steps import GivenNoise, Sites, tensor
from m2s.samplers import SAMPLERS, FirstHitting, Move, NamedSampler, Prediction, Preserves, Psi
from m2s.samplers.registry import make_sampler
from oracle import Oracle, absorbing_rates, exponential, linear, tabulated, uniform_rates
from step_cases import EXACT, permutations

pytestmark = pytest.mark.usefixtures("small_blocks")

VOCAB = 3
NOISES = {
    "uniform": (m2s.Uniform(VOCAB, m2s.Exponential(2.0)), tabulated(uniform_rates(VOCAB), exponential(2.0))),
    "uniform-linear": (m2s.Uniform(VOCAB, m2s.Linear()), tabulated(uniform_rates(VOCAB), linear)),
    "absorbing": (m2s.Absorbing(VOCAB, m2s.Linear()), tabulated(absorbing_rates(VOCAB), linear, VOCAB)),
}
ROUTES = ("route", "token", "jump")
# The process and the uniforms that a step of one site uses. Leaps that add up use one more for each jump: see below.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bayes": ("uniform", ROUTES),
    "euler": ("uniform", ROUTES),
    "analytic": ("uniform", ("token",)),
    "tau_leaping": ("uniform", ("route", "token")),
    "predictor_corrector": ("uniform", ROUTES),
    "ancestral": ("absorbing", ROUTES),
    "confidence": ("absorbing", ("token",)),
    "remasking": ("absorbing", ("route", "token")),
    "adaptive": ("uniform", ("token",)),
    "self_correcting": ("uniform", ("token",)),
    "psi": ("uniform", ("order", *ROUTES)),
    "absorbing_uniform": ("uniform", ROUTES),
    "entropy_bound": ("uniform", ("token", "jump")),
}
ELSEWHERE = {
    "first_hitting": "test_first_hitting_fills_any_number_of_sites_exactly",
    "informed": "test_uniform_samplers.py::test_only_a_uniform_choice_of_the_site_preserves_the_distribution",
    "ordinal_tau_leaping": "test_leaps_that_add_up_do_not_preserve_the_marginal",
    "forward_backward": "test_leaps_that_add_up_do_not_preserve_the_marginal",
}
T, S = 0.6, 0.35


def exact(name: str, length: int) -> tuple[m2s.Process, Oracle]:
    """A process and the enumeration of all sequences of some length."""
    process, noise = NOISES[name]
    return process, Oracle(noise, length)


def step_matrix(sampler: NamedSampler, name: str, purposes: tuple[str, ...], length: int, t: float, s: float) -> np.ndarray:
    """The transition matrix of a step over all sequences: sites are independent given x_t."""
    process, oracle = exact(name, length)
    x = oracle.noisy
    output = log(oracle.posterior(x, t)).reshape(x.size, -1)
    problem = Sites(m2s.Posterior(process), output, x.reshape(-1), *(np.full(x.size, time) for time in (t, s, t)))

    def step(rows: np.ndarray, uniforms: dict) -> np.ndarray:
        given = GivenNoise(
            {purpose: tensor(u[:, None]) for purpose, u in uniforms.items()} | {"site": tensor(rows[:, None] * 0.0)}
        )
        move = Move(tensor(problem.t[rows]), tensor(problem.s[rows]), tensor(np.ones(len(rows), dtype=int)))
        return sampler.step(problem.prediction(rows), move, given).squeeze(-1).numpy()

    found = exact_steps.exact_distribution(step, x.size, process.states, purposes, ways=60)
    return forms.joint_step(found.reshape(*x.shape, -1))


def distance(sampler: NamedSampler, length: int, t: float = T, s: float = S, name: str = "") -> float:
    """The total variation distance of p_t K to p_s."""
    default, purposes = CASES[sampler.name]
    name = name or default
    matrix = step_matrix(sampler, name, purposes, length, t, s)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=EXACT)
    _, oracle = exact(name, length)
    return forms.total_variation(oracle.marginal(t) @ matrix, oracle.marginal(s))


def of_name(name: str) -> NamedSampler:
    """The sampler with its default options. Psi has a corrector at the time T, and self-correction is a correction at T."""
    return Psi(kappa=0.7, low=0.0, high=1.0) if name == "psi" else make_sampler(name)


def test_every_sampler_of_the_reverse_process_declares_what_it_preserves() -> None:
    declared = {name for name, kind in SAMPLERS.items() if kind.preserves_marginal is not None}
    assert declared == {*CASES, *ELSEWHERE} == set(SAMPLERS) - {"autoregressive"}
    proved = {name: SAMPLERS[name].preserves_marginal for name in ELSEWHERE}
    assert proved.pop("first_hitting") is Preserves.ALL_SITES
    assert set(proved.values()) == {Preserves.NOTHING}


@pytest.mark.parametrize("name", CASES)
def test_one_site(name: str) -> None:
    """Sequences of one token: the distance is zero exactly where the sampler declares that it is."""
    sampler = of_name(name)
    found = distance(sampler, 1, S, S) if name == "self_correcting" else distance(sampler, 1)
    if sampler.preserves_marginal is Preserves.ONE_SITE:
        assert found < EXACT
    else:
        assert sampler.preserves_marginal is Preserves.NOTHING and found > 0.005, found


def test_euler_preserves_the_marginal_of_one_site_where_alpha_is_linear_in_time() -> None:
    """p_t is then linear in t, and Euler's step is exact for a linear function. With another schedule it is of first order."""
    assert distance(of_name("euler"), 1, name="uniform-linear") < EXACT
    long, short = (distance(of_name("euler"), 1, T, T - h) for h in (0.04, 0.01))
    assert abs(np.log(long / short) / np.log(4) - 2) < 0.1


@pytest.mark.parametrize("name", [name for name in CASES if SAMPLERS[name].preserves_marginal is Preserves.ONE_SITE])
def test_several_sites_in_one_step_are_not_exact(name: str) -> None:
    """Two sites: each has its marginal distribution, but they are drawn independently given x_t."""
    sampler = of_name(name)
    assert distance(sampler, 2) > 1e-3


@pytest.mark.parametrize("name", ["bayes", "absorbing_uniform", "psi"])
def test_the_error_of_several_sites_in_short_steps(name: str) -> None:
    """It is of second order in t - s for bayes and absorbing_uniform, and tends to a constant for the corrector of psi."""
    sampler = of_name(name)
    long, short = (distance(sampler, 2, T, T - h) for h in (0.04, 0.01))
    if name == "psi":
        assert short > 0.001 and long < 2 * short
    else:
        assert abs(np.log(long / short) / np.log(4) - 2) < 0.1
    if name == "absorbing_uniform":
        assert short < distance(of_name("bayes"), 2, T, T - 0.01)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_first_hitting_fills_any_number_of_sites_exactly(length: int) -> None:
    """From all masks, L steps that reveal one token each give the data distribution, for any L."""
    process, oracle = exact("absorbing", length)
    x, at, half = oracle.noisy, np.arange(len(oracle.noisy)), 0.5
    output = log(oracle.posterior(x, half))
    matrix, orders = np.zeros((len(x), len(x))), permutations(length)
    for order in orders:
        site = np.where(x == process.mask, order, 2.0).argmin(-1)

        def step(rows: np.ndarray, u: dict, order: np.ndarray = order, site: np.ndarray = site) -> np.ndarray:
            time = tensor(np.full(len(rows), half))
            noise = {
                "order": tensor(np.tile(order, (len(rows), 1))),
                "token": tensor(np.repeat(u["token"][:, None], length, 1)),
            }
            prediction = Prediction(m2s.Posterior(process), tensor(output[rows]), tensor(x[rows]), time)
            new = FirstHitting().step(prediction, Move(time, time, tensor(np.ones(len(rows), dtype=int))), GivenNoise(noise))
            others = np.arange(length) != site[rows][:, None]
            assert (new.numpy() == x[rows])[others].all()
            return new.numpy()[np.arange(len(rows)), site[rows]]

        drawn = exact_steps.exact_distribution(step, len(x), process.states, ["token"])
        np.add.at(matrix, (at[:, None], oracle.neighbors(x)[at, site]), drawn / len(orders))
    p = (x == process.mask).all(-1).astype(float) @ np.linalg.matrix_power(matrix, length)
    np.testing.assert_allclose(p[(x < process.mask).all(-1)], oracle.distribution, atol=EXACT)


def test_leaps_that_add_up_do_not_preserve_the_marginal() -> None:
    """One site with three levels: Poisson displacements that add up and are clipped. forward_backward takes these leaps too."""
    process, oracle = exact("uniform", 1)
    x = oracle.noisy
    rates = forms.reverse_rates(process, oracle.score(x, T)[:, 0], x[:, 0], T)
    matrix = np.zeros((VOCAB, VOCAB))
    for k in range(VOCAB):
        mean = (T - S) * rates[k]  # independent Poisson numbers of jumps by each displacement
        for counts in itertools.product(range(12), repeat=VOCAB - 1):
            targets = [y for y in range(VOCAB) if y != k]
            logs = [n * np.log(mean[y]) - mean[y] - sum(np.log(range(1, n + 1))) for n, y in zip(counts, targets, strict=True)]
            end = k + sum(n * (y - k) for n, y in zip(counts, targets, strict=True))
            matrix[k, min(max(end, 0), VOCAB - 1)] += np.exp(sum(logs))
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-6)
    assert forms.total_variation(oracle.marginal(T) @ matrix, oracle.marginal(S)) > 0.005
