"""The numbers of Figure 1."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import m2s
from m2s.errors import UserError
from m2s.report.toy.reverse_process import STEP, terminal_distribution

DATA_DISTRIBUTION = (0.7, 0.2, 0.1)
TIME = 0.5

Array = Float[np.ndarray, "..."]


@dataclass(frozen=True)
class ToyData:
    """Every number of Figure 1.

    Arrays over c are in the order of `c`. Vectors over tokens are in the order of the data distribution.

    Args:
        distribution: The data distribution of the three tokens.
        time: The time t of panels (a) and (c).
        rho: rho_t = P_t(y|x) / P_t(x|x) for y != x.
        current: k, the current token: the rarest.
        first: y1, the token whose score is scaled.
        second: y2, the third token.
        posterior: Pr(X_0 = . | X_t = k).
        score: s*, the exact scores of y1 and y2.
        box: [c_-, c_+], the c for which s^(c) is in the coordinate box.
        band: The c for which s^(c) is in the bridge polytope, so that it has a posterior.
        c: [C] factors.
        excess: [C] h(c s*, s*) in nats.
        gradient: [C] derivative of `excess` in the log-score of y1.
        signed: [C, 3] signed posterior of s^(c).
        tv: [C] total variation between the data and the distribution generated with the score of y1 multiplied by c.
        tv_projected: [C] the same with the score projected onto the bridge polytope at every time.
        integrator_error: Largest change of `tv` and `tv_projected` when the step of the integrator is halved.
        triangle: Corners of the bridge polytope: the posterior is certain of k, of y1, of y2.
        c_a: Factor of point A.
        a: Point A, s^(c_a).
        a_signed: Signed posterior of A.
        b: Point B, the realizable score nearest to A.
        b_posterior: Posterior of B.
    """

    distribution: tuple[float, ...]
    time: float
    rho: float
    current: int
    first: int
    second: int
    posterior: tuple[float, ...]
    score: tuple[float, float]
    box: tuple[float, float]
    band: tuple[float, float]
    c: Array
    excess: Array
    gradient: Array
    signed: Array
    tv: Array
    tv_projected: Array
    integrator_error: float
    triangle: tuple[tuple[float, float], ...]
    c_a: float
    a: tuple[float, float]
    a_signed: tuple[float, ...]
    b: tuple[float, float]
    b_posterior: tuple[float, ...]

    def at(self, values: Array, c: float) -> float:
        """Return the entry of an array over `self.c` at the factor nearest to `c`.

        Args:
            values: One of the arrays over c, [C].
            c: The factor, above 0. The distance is that of logarithms.
        """
        return float(values[int(np.abs(np.log(self.c / c)).argmin())])


def random_distribution(seed: int) -> tuple[float, ...]:
    """Draw a data distribution on three tokens: 0.05 + 0.85 times a flat Dirichlet draw, so that none is rarer than 0.05.

    Args:
        seed: Seed of the draw, not negative.

    Returns:
        Three probabilities.

    Raises:
        UserError: The seed is negative.
    """
    if seed < 0:
        raise UserError(f"the seed is {seed}, but it must not be negative")
    dirichlet = np.random.default_rng(seed).dirichlet((1.0, 1.0, 1.0))
    return tuple(float(p) for p in 0.05 + 0.85 * dirichlet)


def toy_data(
    distribution: tuple[float, ...] = DATA_DISTRIBUTION, time: float = TIME, points: int = 121, step: float = STEP
) -> ToyData:
    """Compute the numbers of Figure 1 under Uniform(3, Linear()).

    The current token is the rarest one and y1 the second rarest, so that the exact score is inside the polytope.

    Args:
        distribution: Three probabilities of at least 0.01 that sum to one.
        time: The time of panels (a) and (c), in [0.01, 0.99].
        points: Number of factors c on a geometric grid; the special ones are added to it.
        step: Largest step of the integrator in sigma (`terminal_distribution`).

    Returns:
        All numbers of the figure.

    Raises:
        UserError: The distribution or the time is invalid.
    """
    _validate(distribution, time)
    process = m2s.Uniform(3, m2s.Linear())
    p = torch.tensor(distribution, dtype=torch.float64)
    k, y1, y2 = (int(i) for i in p.argsort(stable=True))
    x_t, t = torch.tensor([k]), torch.tensor([time], dtype=torch.float64)
    exact = m2s.score_from_leave_one_out(p[None], x_t, t, process)
    posterior = m2s.posterior_from_leave_one_out(p[None], x_t, t, process)[0]
    low, high = m2s.box(x_t, t, process)
    box = (float(low[0, y1] / exact[0, y1]), float(high[0, y1] / exact[0, y1]))
    band = _band(exact, y1, x_t, t, process)
    # Point A is on the wider side, 60 % of the way from the band to the box: in the box, but without a posterior.
    outer, inner = max(zip(box, band, strict=True), key=lambda ends: abs(ends[0] - ends[1]))
    c_a = inner + 0.6 * (outer - inner)
    c = np.unique(np.concatenate([np.geomspace(box[0] / 2, box[1] * 2, points), [1.0, *box, *band, c_a]]))
    path = _scaled(exact, y1, torch.from_numpy(c))
    excess, gradient = _excess(path, posterior, k, y1, time, process)
    tv, integrator_error = _total_variation(p, c, y1, process, step)
    return ToyData(
        distribution=tuple(distribution),
        time=time,
        rho=float(process.rho(t)),
        current=k,
        first=y1,
        second=y2,
        posterior=tuple(posterior.tolist()),
        score=(float(exact[0, y1]), float(exact[0, y2])),
        box=box,
        band=band,
        c=c,
        excess=excess,
        gradient=gradient,
        signed=m2s.affine_inverse(path, x_t.expand(len(c)), t.expand(len(c)), process).numpy(),
        tv=tv[0],
        tv_projected=tv[1],
        integrator_error=integrator_error,
        c_a=c_a,
        **_points(exact, (k, y1, y2), c_a, x_t, t, process),
    )


def _validate(distribution: tuple[float, ...], time: float) -> None:
    """Raise UserError unless there are three probabilities, and the time is inside (0, 1) by a margin."""
    if len(distribution) != 3 or min(distribution) < 0.01 or abs(sum(distribution) - 1) > 1e-9:
        raise UserError(
            f"the data distribution is {distribution}, but it must be three probabilities of at least 0.01 that sum to one"
        )
    if not 0.01 <= time <= 0.99:
        raise UserError(f"the time is {time}, but it must be in [0.01, 0.99]")


def _points(
    exact: Float[Tensor, "1 3"], tokens: tuple[int, int, int], c_a: float, x_t: Tensor, t: Tensor, process: m2s.Uniform
) -> dict[str, Any]:
    """Return what panel (c) shows besides the path: the corners of the polytope, and the points A and B."""
    k, y1, y2 = tokens

    def plane(score: Tensor) -> tuple[float, float]:
        return float(score[y1]), float(score[y2])

    a = _scaled(exact, y1, torch.tensor([c_a], dtype=torch.float64))
    b_posterior = m2s.project(a, x_t, t, process)
    b = m2s.score_from_posterior(b_posterior, x_t, t, process)
    certain = torch.eye(3, dtype=torch.float64)[[k, y1, y2]]
    corners = m2s.score_from_posterior(certain, x_t.expand(3), t.expand(3), process)
    return {
        "triangle": tuple(plane(corner) for corner in corners),
        "a": plane(a[0]),
        "a_signed": tuple(m2s.affine_inverse(a, x_t, t, process)[0].tolist()),
        "b": plane(b[0]),
        "b_posterior": tuple(b_posterior[0].tolist()),
    }


def _total_variation(
    p: Float[Tensor, "3"], c: Float[np.ndarray, "C"], y1: int, process: m2s.Uniform, step: float
) -> tuple[Float[np.ndarray, "2 C"], float]:
    """Return TV(generated, data) at half the step, without and with projection, and its largest change by the halving."""
    coarse, fine = (
        0.5 * (terminal_distribution(p, c, y1, process, size) - p).abs().sum(-1).numpy() for size in (step, step / 2)
    )
    return fine, float(np.abs(coarse - fine).max())


def _scaled(score: Float[Tensor, "1 3"], y: int, c: Float[Tensor, "C"]) -> Float[Tensor, "C 3"]:
    """Return the score with its entry y multiplied by each c."""
    scaled = score.repeat(len(c), 1)
    scaled[:, y] *= c
    return scaled


def _band(exact: Float[Tensor, "1 3"], y1: int, x_t: Tensor, t: Tensor, process: m2s.Uniform) -> tuple[float, float]:
    """Return the c at which s^(c) enters and leaves the bridge polytope: zeros of the signed posterior, affine in c."""
    ends = torch.cat([_scaled(exact, y1, torch.tensor([value], dtype=torch.float64)) for value in (0.0, 1.0)])
    at_zero, at_one = m2s.affine_inverse(ends, x_t.expand(2), t.expand(2), process)
    zeros, slope = -at_zero / (at_one - at_zero), at_one - at_zero
    return float(zeros[slope > 0].max()), float(zeros[slope < 0].min())


def _excess(
    path: Float[Tensor, "C 3"], posterior: Float[Tensor, "3"], k: int, y1: int, time: float, process: m2s.Uniform
) -> tuple[Array, Array]:
    """Return h(c s*, s*) and its gradient in the log-score of y1.

    h = (E[score entropy | x_t = k] along the path - its value at s*) / n_t(k) (Proposition 4.3). Both numbers come from
    `m2s.score_entropy` of an unconstrained score and autograd, not from the closed form, so that the figure tests the library.
    """
    head = m2s.LogScore(process)
    x_t = torch.full((3,), k)
    t = torch.full((3,), time, dtype=torch.float64)
    rate = process.rates_into(x_t[:1], t[:1])[0, y1]

    def risk(log_score: Float[Tensor, "C 3"]) -> Float[Tensor, "C"]:
        count = len(log_score)
        output = log_score.unsqueeze(-2).expand(count, 3, 3)
        times = t[:1].expand(count)
        loss = m2s.score_entropy(head, output, torch.arange(3).expand(count, 3), x_t.expand(count, 3), times)
        return loss @ posterior / rate

    log_path = path.log().requires_grad_()
    values = risk(log_path)
    (gradient,) = torch.autograd.grad(values.sum(), log_path)
    exact = m2s.score_from_posterior(posterior[None], x_t[:1], t[:1], process)
    return (values.detach() - risk(exact.log())).numpy(), gradient[:, y1].numpy()
