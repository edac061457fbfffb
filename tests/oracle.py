"""An exact oracle for small problems: it enumerates every sequence and shares no formula with the library.

Transition matrices come from `scipy.linalg.expm` of the integrated rate matrix. Those of the hybrid process come from its
definition, with rates Q_t = P_t^{-1} dP_t/dt by a complex step. Everything is numpy in float64.
Arrays over sites are [N, L, S]: sequence, site, state.
Only `CASES`, at the end, names the library: it pairs each process with its noise.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import expm
from scipy.special import expit, logit

import m2s

Score = Callable[[np.ndarray, float], np.ndarray]  # (sequences [N, L], t) -> scores [N, L, S]


def derivative(function: Callable, t: float) -> np.ndarray:
    """d function / dt by a complex step: exact to rounding for an analytic function."""
    return np.imag(function(t + 1e-30j)) / 1e-30


@dataclass(frozen=True)
class Noise:
    """How one site is corrupted: `transition_matrix(t)[z, y]` = P_t(y|z), `rates(t)[y, k]` = Q_t(y -> k); clean ones first."""

    vocab: int
    states: int
    transition_matrix: Callable[[float], np.ndarray]
    rates: Callable[[float], np.ndarray]

    def step(self, s: float, t: float) -> np.ndarray:
        """P_{t|s}, from P_s P_{t|s} = P_t."""
        return np.linalg.solve(self.transition_matrix(s), self.transition_matrix(t))


def tabulated(rates: np.ndarray, sigma: Callable, vocab: int | None = None) -> Noise:
    """P_t = expm(sigma_t Q), Q_t = sigma_t' Q."""
    states = len(rates)
    return Noise(vocab or states, states, lambda t: expm(sigma(t) * rates), lambda t: derivative(sigma, t) * rates)


def hybrid(vocab: int, p: float) -> Noise:
    """GIDD: c = B sqrt(t(1-t)), B = 2p/(1-p), P_t = ((1-t) I + 1 (t e_mask + c u)^T) / (1+c)."""
    mask, spread = np.eye(vocab + 1)[vocab], np.append(np.full(vocab, 1 / vocab), 0.0)

    def transition_matrix(t: complex) -> np.ndarray:
        c = 2 * p / (1 - p) * np.sqrt(t * (1 - t))
        return ((1 - t) * np.eye(vocab + 1) + t * mask + c * spread) / (1 + c)

    return Noise(
        vocab, vocab + 1, transition_matrix, lambda t: np.linalg.solve(transition_matrix(t), derivative(transition_matrix, t))
    )


def with_diagonal(off: np.ndarray) -> np.ndarray:
    """A generator from its off-diagonal rates."""
    off = np.array(off, dtype=float)
    np.fill_diagonal(off, 0.0)
    return off - np.diag(off.sum(1))


def uniform_rates(vocab: int) -> np.ndarray:
    return with_diagonal(np.full((vocab, vocab), 1 / vocab))


def absorbing_rates(vocab: int) -> np.ndarray:
    rates = np.zeros((vocab + 1, vocab + 1))
    rates[:vocab, vocab] = 1.0
    return with_diagonal(rates)


def gaussian_rates(vocab: int, jump: float, width: float) -> np.ndarray:
    """Q(i -> j) = exp(-(|i-j| - 1)^2 / jump^2) min(1, pi_j/pi_i), pi a Gaussian of the given width about the middle level."""
    pi = [np.exp(-((i - (vocab - 1) / 2) ** 2) / (2 * width**2)) for i in range(vocab)]
    each = [[np.exp(-(((abs(i - j) - 1) / jump) ** 2)) * min(1, pi[j] / pi[i]) for j in range(vocab)] for i in range(vocab)]
    return with_diagonal(each)


def linear(t: complex) -> complex:
    """sigma = -log alpha, as in every schedule below; alpha = 1 - t."""
    return -np.log1p(-t)


def cosine(t: complex) -> complex:
    return -np.log(2 * np.sin(np.pi / 4 * (1 - t)) ** 2)


def log_linear(eps: float) -> Callable:
    return lambda t: -np.log(1 - (1 - eps) * t)


def exponential(horizon: float) -> Callable:
    return lambda t: horizon * t


def geometric(low: float, high: float) -> Callable:
    return lambda t: low ** (1 - t) * high**t


def h(s: np.ndarray, r: np.ndarray) -> np.ndarray:
    """h(s, r) = s - r log s + r log r - r, h(s, 0) = s."""
    s, r = np.broadcast_arrays(s, r)
    positive = r > 0
    safe = np.where(positive, r, 1.0)
    return np.where(positive, s - safe * np.log(np.where(positive, s, 1.0)) + safe * np.log(safe) - safe, s)


def quadrature(low: float, high: float, order: int = 8) -> list[tuple[float, float]]:
    """Nodes and weights for an integral over t in [low, high], Gauss-Legendre in logit(t), where both ends are smooth."""
    node, weight = np.polynomial.legendre.leggauss(order)
    edge = np.linspace(logit(low), logit(high), 1 + int(np.ceil((logit(high) - logit(low)) / 2)))
    u = (edge[:-1, None] + edge[1:, None]) / 2 + np.diff(edge)[:, None] / 2 * node
    t = expit(u).ravel()
    return list(zip(t, (np.diff(edge)[:, None] / 2 * weight).ravel() * t * (1 - t), strict=True))


class Oracle:
    """A data distribution over all vocab^L sequences under a noise.

    `clean` and `noisy` list all sequences; the last site changes fastest.
    """

    def __init__(self, noise: Noise, length: int, seed: int = 0) -> None:
        self.noise, self.length = noise, length
        self.clean = np.array(list(itertools.product(range(noise.vocab), repeat=length)))
        self.noisy = np.array(list(itertools.product(range(noise.states), repeat=length)))
        self.power = noise.states ** np.arange(length)[::-1]
        distribution = np.exp(1.5 * np.random.default_rng(seed).normal(size=len(self.clean)))
        self.distribution = distribution / distribution.sum()
        self.indicator = np.eye(noise.states)[self.clean]  # [x_0, site, z]

    def index(self, x: np.ndarray) -> np.ndarray:
        """Place of each sequence in `noisy`."""
        return x @ self.power

    def factors(self, x: np.ndarray, t: float) -> np.ndarray:
        """P_t(x^i | x_0^i) as [x_0, x, site]."""
        return self.noise.transition_matrix(t)[self.clean[:, None, :], x[None, :, :]]

    def likelihood(self, x: np.ndarray, t: float) -> np.ndarray:
        """q_t(x | x_0) = prod_i P_t(x^i | x_0^i) as [x_0, x]."""
        return self.factors(x, t).prod(-1)

    def marginal(self, t: float) -> np.ndarray:
        """p_t over all noisy sequences."""
        return self.distribution @ self.likelihood(self.noisy, t)

    def neighbors(self, x: np.ndarray) -> np.ndarray:
        """Place of x^{i->y} in `noisy` as [N, site, y]."""
        without = self.index(x)[:, None] - x * self.power
        return without[..., None] + self.power[:, None] * np.arange(self.noise.states)

    def score(self, x: np.ndarray, t: float) -> np.ndarray:
        """p_t(x^{i->y}) / p_t(x)."""
        p = self.marginal(t)
        return p[self.neighbors(x)] / p[self.index(x)][:, None, None]

    def posterior(self, x: np.ndarray, t: float) -> np.ndarray:
        """Pr(X_0^i = z | X_t = x), by summing the joint distribution."""
        joint = self.distribution[:, None] * self.likelihood(x, t)
        return np.einsum("cn,clz->nlz", joint, self.indicator) / joint.sum(0)[:, None, None]

    def leave_one_out(self, x: np.ndarray, t: float) -> np.ndarray:
        """Pr(X_0^i = z | X_t^{-i}): the same sum without the factor of site i."""
        factors, out = self.factors(x, t), []
        for i in range(self.length):
            joint = self.distribution[:, None] * np.delete(factors, i, axis=-1).prod(-1)
            out.append(joint.T @ self.indicator[:, i] / joint.sum(0)[:, None])
        return np.stack(out, 1)

    def bridge(self, posterior: np.ndarray, x: np.ndarray, t: float) -> np.ndarray:
        """sum_z mu_z P_t(y|z) / P_t(x^i|z) over the z from which x^i can be reached, term by term."""
        transition = self.noise.transition_matrix(t)
        likelihood = transition[:, x].transpose(1, 2, 0)  # [N, L, z]
        ratio = np.divide(posterior, likelihood, out=np.zeros_like(posterior), where=likelihood > 0)
        return ratio @ transition

    def weights(self, x: np.ndarray, t: float) -> np.ndarray:
        """Q_t(y -> x^i) for y != x^i, 0 at x^i."""
        rates = self.noise.rates(t)
        np.fill_diagonal(rates, 0.0)
        return rates[:, x].transpose(1, 2, 0)

    def losses(self, score: np.ndarray, x: np.ndarray, t: float) -> np.ndarray:
        """sum_{y != k} Q_t(y -> k) h(s_y, P_t(y|z)/P_t(k|z)) as [N, L, z]; 0 for a z from which k cannot be reached."""
        transition, weight = self.noise.transition_matrix(t)[: self.noise.vocab], self.weights(x, t)
        likelihood = transition[:, x].transpose(1, 2, 0)[..., None]
        ratio = np.divide(
            transition, likelihood, out=np.zeros(likelihood.shape[:-1] + transition.shape[-1:]), where=likelihood > 0
        )
        counted = (weight[:, :, None, :] > 0) & (likelihood > 0)
        s = np.where(counted, score[:, :, None, :], 1.0)
        return np.where(counted, weight[:, :, None, :] * h(s, ratio), 0.0).sum(-1)

    def expected(self, losses: np.ndarray, t: float) -> np.ndarray:
        """E[sum_i loss_i(X_t, x_0^i) | x_0] for every clean sequence, from losses [N, L, z] over all noisy ones."""
        site = np.stack([losses[:, i, self.clean[:, i]] for i in range(self.length)]).sum(0)  # [x, x_0]
        return (self.likelihood(self.noisy, t) * site.T).sum(1)

    def path_rate(self, score: np.ndarray, t: float) -> float:
        """sum_x p_t(x) sum_{i,y} Q_t(y -> x^i) h(s_y, s*_y): what a wrong score adds to the path-space KL per unit of time."""
        weight = self.weights(self.noisy, t)
        exact = np.where(weight > 0, self.score(self.noisy, t), 1.0)
        excess = np.where(weight > 0, weight * h(np.where(weight > 0, score, 1.0), exact), 0.0).sum((1, 2))
        return float(self.marginal(t) @ excess)

    def reverse_rates(self, score: np.ndarray, x: np.ndarray, t: float) -> np.ndarray:
        """Rate of x -> x^{i->y} in the reverse process: Q_t(y -> x^i) s_y, 0 at y = x^i."""
        weight = self.weights(x, t)
        return weight * np.where(weight > 0, score, 0.0)

    def terminal(self, score: Score, reference: np.ndarray, high: float, low: float) -> np.ndarray:
        """Distribution at `low` of the reverse process with any score, from independent sites at time `high`.

        `reference` is the distribution of every site, [S], or one for each, [L, S].
        """
        into = self.neighbors(self.noisy).ravel()

        def slope(u: float, p: np.ndarray) -> np.ndarray:
            t = expit(u)
            flow = p[:, None, None] * self.reverse_rates(score(self.noisy, t), self.noisy, t)
            return t * (1 - t) * (flow.sum((1, 2)) - np.bincount(into, flow.ravel(), len(p)))

        sites = np.broadcast_to(reference, (self.length, reference.shape[-1]))
        start = np.stack([sites[i, self.noisy[:, i]] for i in range(self.length)]).prod(0)
        return solve_ivp(slope, (logit(high), logit(low)), start, method="DOP853", rtol=1e-10, atol=1e-13).y[:, -1]


class Network:
    """A random network: logits a[x] + t b[x], one row for each noisy sequence.

    `logits` takes numpy arrays; called as a model, it takes and returns tensors.
    """

    def __init__(self, oracle: Oracle, seed: int, scale: float = 1.0) -> None:
        size = (2, len(oracle.noisy), oracle.length, oracle.noise.states)
        self.oracle, self.table = oracle, scale * np.random.default_rng(seed).normal(size=size)

    def logits(self, x: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        at = self.oracle.index(x)
        return self.table[0, at] + np.reshape(t, (-1, 1, 1)) * self.table[1, at]

    def posterior(self, x: np.ndarray, t: float) -> np.ndarray:
        """Softmax over the clean tokens."""
        mu = np.exp(self.logits(x, t))
        mu[..., self.oracle.noise.vocab :] = 0.0
        return mu / mu.sum(-1, keepdims=True)

    def __call__(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.logits(x_t.numpy(), t.double().numpy()))


@dataclass(frozen=True)
class Case:
    """A process of the library, the oracle's noise for it, and the length at which all sequences are enumerated."""

    process: m2s.Process
    noise: Noise
    length: int

    def oracle(self, seed: int = 0) -> Oracle:
        return Oracle(self.noise, self.length, seed)


_birth, _death = [1.0, 0.5, 2.0], [0.25, 1.5, 0.75]  # exact in float32
CASES = {
    "uniform-linear": Case(m2s.Uniform(3, m2s.Linear()), tabulated(uniform_rates(3), linear), 4),
    "uniform-exponential": Case(m2s.Uniform(4, m2s.Exponential(5.0)), tabulated(uniform_rates(4), exponential(5.0)), 3),
    "absorbing-linear": Case(m2s.Absorbing(3, m2s.Linear()), tabulated(absorbing_rates(3), linear, 3), 4),
    "absorbing-cosine": Case(m2s.Absorbing(4, m2s.Cosine()), tabulated(absorbing_rates(4), cosine, 4), 3),
    "hybrid-0.2": Case(m2s.Hybrid(3, p_uniform=0.2), hybrid(3, 0.2), 4),
    "hybrid-0.6": Case(m2s.Hybrid(4, p_uniform=0.6), hybrid(4, 0.6), 3),
    "gaussian": Case(
        m2s.RateMatrix.gaussian(4, m2s.Exponential(3.0), 2.0, 1.5), tabulated(gaussian_rates(4, 2.0, 1.5), exponential(3.0)), 3
    ),
    "birth-death": Case(
        m2s.RateMatrix.birth_death(torch.tensor(_birth), torch.tensor(_death), m2s.LogLinear(1e-2)),
        tabulated(with_diagonal(np.diag(_birth, 1) + np.diag(_death, -1)), log_linear(1e-2)),
        3,
    ),
    "tabulated-absorbing": Case(
        m2s.RateMatrix.absorbing(3, m2s.LogLinear(1e-3)), tabulated(absorbing_rates(3), log_linear(1e-3), 3), 4
    ),
}
