"""Transition matrices, rates and corruption of every process, against the oracle, closed forms and 80 digits."""

import mpmath
import numpy as np
import pytest
import torch
from scipy.linalg import logm
from scipy.special import gammaln
from scipy.stats import chisquare

import m2s
from oracle import CASES

EVERY = pytest.mark.parametrize("name", CASES)


def tensor(value: np.ndarray) -> torch.Tensor:
    return torch.as_tensor(np.ascontiguousarray(value))


def at(t: float) -> torch.Tensor:
    return torch.tensor(t, dtype=torch.float64)


@EVERY
def test_transition_matrices_and_rates(name: str) -> None:
    """P_t, P_{t|s} and Q_t are the oracle's; rows sum to one and to zero; entries are non-negative."""
    process, oracle = CASES[name].process, CASES[name].oracle()
    t, s = (
        torch.tensor([1e-6, 1e-3, 0.3, 0.97, 0.999], dtype=torch.float64),
        torch.tensor([0, 1e-4, 0.1, 0.9, 0.2], dtype=torch.float64),
    )
    kernel, step, rates = process.transition_matrix(t), process.step_transition_matrix(s, t), process.rates(t)
    for n, (early, late) in enumerate(zip(s.tolist(), t.tolist(), strict=True)):
        np.testing.assert_allclose(kernel[n], oracle.noise.transition_matrix(late), rtol=1e-9, atol=1e-13)
        np.testing.assert_allclose(step[n], oracle.noise.step(early, late), atol=1e-12)
        np.testing.assert_allclose(rates[n], oracle.noise.rates(late), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(kernel.sum(-1), 1, rtol=1e-13)
    np.testing.assert_allclose(step.sum(-1), 1, rtol=1e-13)
    assert (kernel >= 0).all()
    assert (step >= 0).all()
    reference = np.full(process.vocab, 1 / process.vocab) @ oracle.noise.transition_matrix(1 - 1e-15)[: process.vocab]
    if name == "tabulated-absorbing":  # sampling starts from masks although alpha_1 > 0
        reference = np.eye(process.states)[-1]
    np.testing.assert_allclose(process.reference(), reference, atol=1e-7)


@EVERY
def test_chapman_kolmogorov(name: str) -> None:
    """P_s P_{t|s} = P_t and P_{t|s} = P_{u|s} P_{t|u}."""
    process = CASES[name].process
    s, u, t = torch.rand(3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).sort(0).values
    np.testing.assert_allclose(
        process.transition_matrix(s) @ process.step_transition_matrix(s, t), process.transition_matrix(t), atol=1e-13
    )
    np.testing.assert_allclose(
        process.step_transition_matrix(s, u) @ process.step_transition_matrix(u, t),
        process.step_transition_matrix(s, t),
        atol=1e-13,
    )


@EVERY
def test_forward_equation(name: str) -> None:
    """dP_t/dt = P_t Q_t, by a fourth-order difference."""
    process = CASES[name].process
    t, step = torch.linspace(0.05, 0.95, 19, dtype=torch.float64), 1e-3
    near, far = (process.transition_matrix(t + n * step) - process.transition_matrix(t - n * step) for n in (1, 2))
    np.testing.assert_allclose((8 * near - far) / (12 * step), process.transition_matrix(t) @ process.rates(t), atol=2e-6)


def test_pure_birth_chain_is_poisson() -> None:
    """A pure-birth chain, which is defective, to a relative 1e-12 in every entry: e^-sigma sigma^n / n!."""
    states = 30
    process = m2s.RateMatrix.birth_death(torch.ones(states - 1), torch.zeros(states - 1), m2s.Exponential(10.0))
    for t in (1e-7, 1e-3, 0.1, 1.0):
        kernel = process.transition_matrix(at(t)).numpy()
        sigma, jumps = 10 * t, np.arange(states)
        distribution = np.exp(-sigma + jumps * np.log(sigma) - gammaln(jumps + 1))
        for z in range(states - 1):
            np.testing.assert_allclose(kernel[z, z : states - 1], distribution[: states - 1 - z], rtol=1e-12)
            assert (kernel[z, :z] == 0).all()


@pytest.mark.parametrize("t", [1e-6, 0.01, 0.5, 1.0])
def test_birth_death_chain_in_eighty_digits(t: float) -> None:
    """Every entry of a birth-death transition matrix to a relative 1e-12, the tiny ones included."""
    generator = np.random.default_rng(0)
    birth, death = np.exp(2 * generator.normal(size=(2, 9)))
    process = m2s.RateMatrix.birth_death(tensor(birth), tensor(death), m2s.Exponential(3.0))
    with mpmath.workdps(80):
        rates = mpmath.zeros(10)
        for i in range(9):
            rates[i, i + 1], rates[i + 1, i] = mpmath.mpf(birth[i]), mpmath.mpf(death[i])
        for i in range(10):
            rates[i, i] = -sum(rates[i, j] for j in range(10) if j != i)
        exact = mpmath.expm(rates * mpmath.mpf(3) * mpmath.mpf(t), method="taylor")
        expected = np.array([[float(exact[i, j]) for j in range(10)] for i in range(10)])
    np.testing.assert_allclose(process.transition_matrix(at(t)), expected, rtol=1e-12)


def d3pm_step(kind: str, vocab: int, beta: float) -> np.ndarray:
    """One step of D3PM, appendix A.2, entry by entry."""
    if kind == "uniform":
        return (1 - beta) * np.eye(vocab) + beta / vocab
    if kind == "absorbing":
        return (1 - beta) * np.eye(vocab + 1) + beta * np.eye(vocab + 1)[[vocab] * (vocab + 1)]
    width = (vocab - 1) ** 2 * beta
    norm = sum(np.exp(-4 * n**2 / width) for n in range(-(vocab - 1), vocab))
    step = np.array([[np.exp(-4 * (i - j) ** 2 / width) / norm if i != j else 0.0 for j in range(vocab)] for i in range(vocab)])
    return step + np.diag(1 - step.sum(1))


@pytest.mark.parametrize("kind", ["uniform", "absorbing", "gaussian"])
def test_chain_products(kind: str) -> None:
    """A chain's matrix at t = n/T is the product of its first n steps, and its step matrix the product in between."""
    vocab, betas = 6, np.linspace(0.02, 0.4, 8)
    process = getattr(m2s.Chain, kind)(vocab, tensor(betas), dtype=torch.float64)
    steps = [d3pm_step(kind, vocab, beta) for beta in betas]
    assert process.vocab == vocab
    for n in range(9):
        product = np.linalg.multi_dot([np.eye(len(steps[0])), np.eye(len(steps[0])), *steps[:n]])
        np.testing.assert_allclose(process.transition_matrix(at(n / 8)), product, atol=1e-14)
        rest = np.linalg.multi_dot([np.eye(len(steps[0])), np.eye(len(steps[0])), *steps[n:]])
        np.testing.assert_allclose(process.step_transition_matrix(at(n / 8), at(1.0)), rest, atol=1e-14)
    if kind == "gaussian":
        assert np.abs(steps[0] @ steps[-1] - steps[-1] @ steps[0]).max() > 1e-6
        assert (logm(process.transition_matrix(at(1.0)).numpy())[~np.eye(vocab, dtype=bool)] < -1e-9).any()


@EVERY
@pytest.mark.parametrize("t", [0.05, 0.5, 0.9])
def test_corruption_frequencies(name: str, t: float) -> None:
    """x_t ~ P_t(. | x_0), by a chi-square test for every clean token; impossible states never occur."""
    process, oracle = CASES[name].process, CASES[name].oracle()
    count = 100_000
    x_0 = torch.arange(process.vocab).expand(count, process.vocab)
    x_t = process.corrupt(x_0, torch.full((count,), t), torch.Generator().manual_seed(1)).numpy()
    for z in range(process.vocab):
        observed, expected = (
            np.bincount(x_t[:, z], minlength=process.states),
            oracle.noise.transition_matrix(np.float32(t).item())[z] * count,
        )
        possible = expected > 1e-9
        assert (observed[~possible] == 0).all()
        assert chisquare(observed[possible], expected[possible] * count / expected[possible].sum()).pvalue > 1e-4
    pair = np.bincount(x_t[:, 0] * process.states + x_t[:, 1], minlength=process.states**2)
    joint = np.outer(oracle.noise.transition_matrix(t)[0], oracle.noise.transition_matrix(t)[1]).ravel() * count
    assert chisquare(pair[joint > 5], joint[joint > 5] * pair[joint > 5].sum() / joint[joint > 5].sum()).pvalue > 1e-4


@pytest.mark.parametrize(("dtype", "states"), [(torch.float32, 10), (torch.float32, 50), (torch.bfloat16, 5)])
def test_rates_whose_diagonal_was_rounded(dtype: torch.dtype, states: int) -> None:
    """The rows of a rate matrix in a narrow dtype sum to zero up to its rounding. A row that is wrong by more is an error."""
    rates = torch.rand(states, states, generator=torch.Generator().manual_seed(states)).to(dtype)
    rates.fill_diagonal_(0)
    rates = rates - torch.diag(rates.sum(-1))
    assert rates.double().sum(-1).abs().max() > 1e-7
    process = m2s.RateMatrix(rates, m2s.Linear())
    assert process.generator.sum(-1).abs().max() < 1e-14
    rates[1, 1] *= 1.02
    with pytest.raises(ValueError, match="row 1 of rates sums to"):
        m2s.RateMatrix(rates, m2s.Linear())
