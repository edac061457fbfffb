"""The reverse equation of Figure 1 (b): the distribution that a wrong score generates, and its projection's."""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import m2s

START, END = 1e-10, 1e-9  # the reverse process runs from t = 1 - START to t = END
STEP = 0.02  # step of the integrator in sigma; the figure shows the result of half of it
CHUNK = 12  # integrator steps computed at once: below torch's threshold for threads, which slow down such small tensors


def reverse_generators(
    p: Float[Tensor, "3"], c: Float[Tensor, "C"], y1: int, t: Float[Tensor, "T"], process: m2s.Uniform
) -> Float[Tensor, "T 2 C 3 3"]:
    """Return the generators of the reverse Markov chain per unit of sigma.

    R(x -> y) = Q_t(y -> x) s_y(x) / sigma'(t) for y != x, and rows sum to zero. The scores are exact for the data distribution
    p, except that in every state x != y1 the score of the jump to y1 is multiplied by c.

    Args:
        p: [3] data distribution.
        c: [C] factors.
        y1: The token whose score is multiplied.
        t: [T] times.
        process: The forward process.

    Returns:
        [T, 2, C, 3, 3] generators, from state x (second to last axis) to y (last). Index 0 of the second axis uses the scores
        as they are, index 1 their projection onto the bridge polytope of x at t.
    """
    shape = (len(t), len(c), 3)
    x_t = torch.arange(3).expand(shape)
    score = m2s.score_from_leave_one_out(p.expand(*shape, 3), x_t, t, process)
    score[..., y1] *= c[:, None]
    projected = m2s.score_from_posterior(m2s.project(score, x_t, t, process), x_t, t, process)
    rates = process.rates_into(x_t, t) / process.schedule.sigma_prime(t)[:, None, None, None]
    jumps = rates.unsqueeze(1) * torch.stack([score, projected], 1)
    return jumps - torch.diag_embed(jumps.sum(-1))


def terminal_distribution(
    p: Float[Tensor, "3"], c: Float[np.ndarray, "C"], y1: int, process: m2s.Uniform, step: float = STEP
) -> Float[Tensor, "2 C 3"]:
    """Integrate the reverse equation dq/d(-sigma) = q R_sigma from the uniform distribution to the data, for every c.

    The classical Runge-Kutta method of order four with equal steps in sigma = -log alpha_t, in which the rates stay bounded,
    from t = 1 - 1e-10 to t = 1e-9.

    Args:
        p: [3] data distribution.
        c: [C] factors on the score of `y1`.
        y1: The token whose score is multiplied.
        process: The forward process.
        step: Largest step in sigma.

    Returns:
        [2, C, 3] generated distributions. Index 0: with the score as it is; index 1: projected (see `reverse_generators`).
    """
    last, first = -math.log(START), -math.log1p(-END)
    steps = math.ceil((last - first) / step)
    h = (last - first) / steps
    nodes = torch.linspace(last, first, 2 * steps + 1, dtype=torch.float64)  # ends and midpoints of the steps
    times = -torch.expm1(-nodes)
    factors = torch.from_numpy(np.asarray(c, dtype=np.float64))
    q = process.reference().expand(2, len(factors), 3)
    for start in range(0, steps, CHUNK):
        chunk = times[2 * start : 2 * min(start + CHUNK, steps) + 1]
        generators = reverse_generators(p, factors, y1, chunk, process)
        for i in range(0, len(chunk) - 1, 2):
            q = _runge_kutta(q, generators[i], generators[i + 1], generators[i + 2], h)
    return q


def _runge_kutta(q: Tensor, left: Tensor, middle: Tensor, right: Tensor, h: float) -> Float[Tensor, "2 C 3"]:
    """Take one step of q' = q R, given the generators at the start, the middle and the end of the step."""

    def flow(q: Tensor, generator: Tensor) -> Tensor:
        return (q.unsqueeze(-2) @ generator).squeeze(-2)

    k1 = flow(q, left)
    k2 = flow(q + h / 2 * k1, middle)
    k3 = flow(q + h / 2 * k2, middle)
    k4 = flow(q + h * k3, right)
    return q + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
