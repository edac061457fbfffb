"""Closed forms of posteriors, scores and sampler steps, in numpy over S x S matrices.

They are the independent definitions that the samplers are tested against. Arrays are [N, L, S] over sequences, sites and
states, as in `oracle.py`.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

import m2s
from m2s.samplers.grid import GRIDS


def log(p: np.ndarray) -> np.ndarray:
    """log p, -inf at 0, without a warning."""
    with np.errstate(divide="ignore"):
        return np.log(p)


def times(*values: float) -> tuple[torch.Tensor, ...]:
    """Scalars as float64 tensors."""
    return tuple(torch.tensor(value, dtype=torch.float64) for value in values)


def transition(process: m2s.Process, t: float) -> np.ndarray:
    """P_t, [S, S]."""
    return process.transition_matrix(*times(t)).numpy()


def step_transition(process: m2s.Process, s: float, t: float) -> np.ndarray:
    """P_{t|s}, [S, S]."""
    return process.step_transition_matrix(*times(s, t)).numpy()


def forward_rates(process: m2s.Process, t: float) -> np.ndarray:
    """Q_t with a zero diagonal, [S, S]."""
    rates = process.rates(*times(t)).numpy().copy()
    np.fill_diagonal(rates, 0.0)
    return rates


def one_hot(k: np.ndarray, states: int) -> np.ndarray:
    """Unit vectors, [..., S]."""
    return np.eye(states)[k]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def posterior(process: m2s.Process, logits: np.ndarray, k: np.ndarray, t: float, offset: bool = False) -> np.ndarray:
    """mu over all states, restricted to z with P_t(k|z) > 0. With `offset` mu_z ∝ e^{logit_z} P_t(k|z)."""
    column = np.moveaxis(transition(process, t)[:, k], 0, -1)[..., : process.vocab]
    clean = logits[..., : process.vocab] + (log(column) if offset else 0.0)
    if process.mask is not None:  # under a mask a clean token has one origin; every other process reaches all tokens
        clean = np.where(column > 0, clean, -np.inf)
    nowhere = (clean == -np.inf).all(-1, keepdims=True)  # a token that has probability 0 at t = 1
    mu = softmax(np.where(nowhere, 0.0, clean))
    return np.concatenate([mu, np.zeros((*k.shape, process.states - process.vocab))], -1)


def score_from_posterior(process: m2s.Process, mu: np.ndarray, k: np.ndarray, t: float) -> np.ndarray:
    """s_y = sum_z mu_z P_t(y|z) / P_t(k|z), 1 at k."""
    p = transition(process, t)
    column = np.moveaxis(p[:, k], 0, -1)
    w = np.divide(mu, column, out=np.zeros_like(mu), where=column > 0)
    return np.where(one_hot(k, process.states) > 0, 1.0, w @ p)


def bayes(process: m2s.Process, mu: np.ndarray, k: np.ndarray, t: float, s: float) -> np.ndarray:
    """Eq. 19: sum_z mu_z P_s(y|z) P_{t|s}(k|y) / P_t(k|z)."""
    column = np.moveaxis(transition(process, t)[:, k], 0, -1)
    w = np.divide(mu, column, out=np.zeros_like(mu), where=column > 0)
    return (w @ transition(process, s)) * np.moveaxis(step_transition(process, s, t)[:, k], 0, -1)


def reverse_rates(process: m2s.Process, score: np.ndarray, k: np.ndarray, t: float) -> np.ndarray:
    """Q_t(y -> k) s_y, 0 at k."""
    weight = np.moveaxis(forward_rates(process, t)[:, k], 0, -1)
    return np.where(weight > 0, weight, 0.0) * np.where(weight > 0, score, 0.0)


def euler(rates: np.ndarray, k: np.ndarray, step: float) -> np.ndarray:
    """The next token moves with (t - s) times the rates, normalized where they exceed one; otherwise it stays."""
    moved = step * rates
    moved = moved / np.maximum(moved.sum(-1, keepdims=True), 1.0)
    return moved + one_hot(k, rates.shape[-1]) * (1 - moved.sum(-1, keepdims=True))


def tau_leap(rates: np.ndarray, k: np.ndarray, step: float) -> np.ndarray:
    """The next token moves if there is exactly one jump, of a Poisson number."""
    mean = step * rates.sum(-1, keepdims=True)
    moved = step * rates * np.exp(-mean)
    return moved + one_hot(k, rates.shape[-1]) * (1 - moved.sum(-1, keepdims=True))


def analytic_weights(process: m2s.Process, score: np.ndarray, k: np.ndarray, t: float, s: float) -> np.ndarray:
    """(s P_{t|s}^{-1})_y P_{t|s}(k|y), by a linear solve."""
    score = np.where(one_hot(k, process.states) > 0, 1.0, score)
    step = step_transition(process, s, t)
    earlier = np.linalg.solve(step.T, score.reshape(-1, process.states).T).T.reshape(score.shape)
    return earlier * np.moveaxis(step[:, k], 0, -1)


def analytic(process: m2s.Process, score: np.ndarray, k: np.ndarray, t: float, s: float) -> np.ndarray:
    """The positive part of the weights, normalized; 0 at the mask in the last step. NaN where no weight is positive."""
    weights = np.maximum(analytic_weights(process, score, k, t, s), 0.0)
    if process.mask is not None and s == 0:
        weights[..., process.mask] = 0.0
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, out=np.full_like(weights, np.nan), where=total > 0)


def remasking(process: m2s.Process, mu: np.ndarray, k: np.ndarray, t: float, s: float, strength: float) -> np.ndarray:
    """ReMDM: sigma = strength min(1, (1 - alpha_s)/alpha_t)."""
    alpha_t, alpha_s = (float(transition(process, time)[0, 0]) for time in (t, s))
    sigma = strength * (min(1.0, (1 - alpha_s) / alpha_t) if alpha_t > 0 else 1.0)
    mask = np.eye(process.states)[process.mask]
    reveal = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
    masked = (k == process.mask)[..., None]
    return np.where(masked, reveal * mu + (1 - reveal) * mask, sigma * mask + (1 - sigma) * one_hot(k, process.states))


def psi(process: m2s.Process, mu: np.ndarray, k: np.ndarray, t: float, s: float, kappa: float) -> np.ndarray:
    """kappa times the Bayes step, and 1 - kappa times mu P_s (arXiv:2602.21185)."""
    return kappa * bayes(process, mu, k, t, s) + (1 - kappa) * (mu @ transition(process, s))


def absorbing_uniform(
    process: m2s.Process, mu: np.ndarray, k: np.ndarray, t: float, s: float, strength: float = 0.0
) -> np.ndarray:
    """Sum over z ~ mu of Pr(X_s = y | X_t = k, X_0 = z) in the absorbing form of uniform noise.

    By enumeration of the noise token u of a site and of when the site becomes u: after t, between s and t, or before s. With
    probability `strength` z is corrupted to time s in place of this.
    """
    vocab = process.vocab
    alpha_t, alpha_s = (float(transition(process, time)[0, 0] - transition(process, time)[1, 0]) for time in (t, s))
    joint = np.zeros((vocab, vocab, vocab))  # [z, k, y]
    for z, u in itertools.product(range(vocab), repeat=2):
        joint[z, z, z] += alpha_t / vocab
        joint[z, u, z] += (alpha_s - alpha_t) / vocab
        joint[z, u, u] += (1 - alpha_s) / vocab
    kernel = joint / joint.sum(-1, keepdims=True)
    moved = np.einsum("...z,z...y->...y", mu, kernel[:, k])
    return (1 - strength) * moved + strength * (mu @ transition(process, s))


def joint_step(distributions: np.ndarray) -> np.ndarray:
    """Rows of the transition matrix of a step in which sites move independently: [N, L, S] -> [N, S^L], last site fastest."""
    out = distributions[:, 0]
    for site in range(1, distributions.shape[1]):
        out = (out[:, :, None] * distributions[:, site][:, None, :]).reshape(len(out), -1)
    return out


Network = Callable[[np.ndarray, float], np.ndarray]  # (all sequences [N, L], the network's time) -> output [N, L, S]
# (output, k, t, s, time of the prediction) -> distributions of the next token, [..., S]
StepForm = Callable[[np.ndarray, np.ndarray, float, float, float], np.ndarray]


def terminal_distribution(
    process: m2s.Process,
    length: int,
    network: Network,
    closed_form: StepForm,
    ends: Sequence[float],
    excludes_t_one: bool,
    t_min: float,
) -> np.ndarray:
    """The exact distribution of the samples over all S^L states.

    Args:
        process: The process; sampling starts from its reference distribution.
        length: L, the number of sites.
        network: The network's output at all sequences.
        closed_form: The distribution of one step.
        ends: The times of the steps, from 1 to 0.
        excludes_t_one: The prediction at t = 1 is used as one at 1 - t_min.
        t_min: The network sees times in [t_min, 1 - t_min].

    Returns:
        Probabilities, [S^L].
    """
    x = np.array(list(itertools.product(range(process.states), repeat=length)))
    p = joint_step(np.broadcast_to(process.reference().numpy(), (1, length, process.states)))[0]
    for t, s in itertools.pairwise(ends):
        at = min(t, 1 - t_min) if excludes_t_one else t
        p = p @ joint_step(closed_form(network(x, network_time(t, t_min)), x, t, min(s, at), at))
    return p


def network_time(t: float, t_min: float) -> float:
    """The time that the network sees."""
    return min(max(t, t_min), 1 - t_min)


def grid(name: str, steps: int, end: float | None = None) -> list[float]:
    """The times of a grid. With `end` they are scaled to [end, 1] and followed by 0, as in the analytic sampler."""
    ends = GRIDS[name](steps)
    return ends if end is None else [end + (1 - end) * t for t in ends] + [0.0]


def total_variation(p: np.ndarray, q: np.ndarray) -> float:
    """Half the sum of |p - q|."""
    return float(np.abs(p - q).sum() / 2)
