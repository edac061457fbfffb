"""The projection (Eq. 11) for a tabulated process: min |B mu - s|^2 over the simplex, a batched quadratic program in float64.

Columns of B are scaled to unit length, since B divides by transition probabilities and the lengths can differ by hundreds of
orders of magnitude. The scaled problem min 1/2 v'Hv - f'v, a'v = 1, v >= 0 is solved by Mehrotra's predictor-corrector interior
point method. Then least squares on the support of the solution removes the last error, if its entries are not negative.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.conversions.inverse import weighted_system
from m2s.conversions.least_squares import plane_least_squares
from m2s.process import Process
from m2s.transforms import is_transformed

LIMIT = 256  # tokens: the program factorizes a K x K matrix for each site and iteration
ITERATIONS = 60


def project_tabulated(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """Return the nearest posterior to a score, over the tokens from which x_t can be reached.

    Args:
        score: Scores, [*site, S].
        x_t: Current tokens, [*site].
        t: Times in (0, 1), [*b].
        process: A forward process with rates and at most `LIMIT` tokens.

    Returns:
        The posterior, [*site, S].

    Raises:
        ValueError: The process has more tokens.
        RuntimeError: Inside `torch.func.vmap`.
    """
    if process.vocab > LIMIT:
        raise ValueError(
            f"projection for a tabulated process is a QP for up to {LIMIT} tokens, but this one has {process.vocab}"
        )
    if not x_t.numel():
        return torch.zeros_like(score)
    bridge, target, reachable = weighted_system(score.double(), x_t, t.double(), process)
    rows, vocab = bridge.shape[-2:]
    try:
        mu = simplex_least_squares(bridge.reshape(-1, rows, vocab), target.reshape(-1, rows), reachable.reshape(-1, vocab))
    except RuntimeError as error:
        if is_transformed() and "vmap" in str(error):  # the number of iterations depends on values
            raise RuntimeError(
                "the projection under a tabulated process does not run inside torch.func.vmap: it takes scores of any batch "
                "shape, so call it without vmap"
            ) from error
        raise
    mu = mu.reshape(reachable.shape)
    return torch.nn.functional.pad(mu, (0, process.states - process.vocab)).to(score.dtype)


def simplex_least_squares(
    matrix: Float[Tensor, "N R K"], target: Float[Tensor, "N R"], allowed: Tensor
) -> Float[Tensor, "N K"]:
    """Return argmin |matrix mu - target|^2 over mu >= 0, sum(mu) = 1, with mu = 0 outside `allowed`.

    Args:
        matrix: The matrices, [N, R, K].
        target: The right-hand sides, [N, R].
        allowed: The unknowns that may be positive, [N, K].

    Returns:
        mu, [N, K].
    """
    length = torch.linalg.vector_norm(matrix, dim=-2)
    usable = allowed & length.isfinite()
    length = torch.where(usable, length.clamp(min=1.0), 1.0)
    columns = torch.where(usable.unsqueeze(-2), matrix / length.unsqueeze(-2), 0.0)
    size = torch.linalg.vector_norm(target, dim=-1, keepdim=True).clamp(min=1.0)
    v = _interior_point(columns, target / size, (1 / length) * size, usable) * size
    mu = torch.where(usable, v / length, 0.0).clamp(min=0)
    mu = mu / mu.sum(-1, keepdim=True)
    return _polish(matrix.where(usable.unsqueeze(-2), 0.0), target, mu, usable)


def _interior_point(columns: Tensor, target: Tensor, a: Tensor, usable: Tensor) -> Tensor:
    """Return argmin 1/2 |columns v - target|^2 over a'v = 1, v >= 0, by Mehrotra's method.

    The variables are v, the dual z of v >= 0 and the multiplier l of a'v = 1. Residuals: rd (dual), rp (primal), rc
    (complementarity v z).
    """
    gram = columns.transpose(-1, -2) @ columns
    linear = (columns.transpose(-1, -2) @ target.unsqueeze(-1)).squeeze(-1)
    a = torch.where(usable, a, 0.0)
    n = usable.sum(-1, keepdim=True).to(gram.dtype)
    # Start inside the simplex; unused unknowns stay at 1 and are masked everywhere.
    v = torch.where(usable, 1 / (n * a.where(usable, 1.0)), 1.0)
    v = v.clamp(max=1.0)
    dual = torch.ones_like(v)
    multiplier = torch.zeros_like(n)

    def solve(factor: Tensor, inverse_a: Tensor, rd: Tensor, rp: Tensor, rc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # H dv - a dl - dz = -rd,  a'dv = -rp,  z dv + v dz = -rc
        right = -rd - rc / v
        base = torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)
        dl = (-rp - (a * base).sum(-1, keepdim=True)) / (a * inverse_a).sum(-1, keepdim=True).clamp(min=1e-300)
        dv = torch.where(usable, base + dl * inverse_a, 0.0)
        dz = torch.where(usable, (-rc - dual * dv) / v, 0.0)
        return dv, dl, dz

    def longest_step(value: Tensor, direction: Tensor) -> Tensor:
        limit = torch.where(usable & (direction < 0), -value / direction.where(direction < 0, -1.0), torch.inf)
        return limit.amin(-1, keepdim=True).clamp(max=1.0)

    for _ in range(ITERATIONS):
        rd = torch.where(usable, (gram @ v.unsqueeze(-1)).squeeze(-1) - linear - a * multiplier - dual, 0.0)
        rp = (a * v).where(usable, 0.0).sum(-1, keepdim=True) - 1
        gap = (v * dual).where(usable, 0.0).sum(-1, keepdim=True) / n
        if float(torch.maximum(torch.maximum(rd.abs().amax(), rp.abs().amax()), gap.amax()).detach()) < 1e-15:
            break
        diagonal = torch.where(usable, dual / v, 1.0)
        factor, failed = torch.linalg.cholesky_ex(gram + torch.diag_embed(diagonal + 1e-15))
        stuck = (failed > 0).unsqueeze(-1)  # at the limit of float64: this row keeps its last iterate
        if stuck.all():
            break
        factor = torch.where(stuck.unsqueeze(-1), torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device), factor)
        inverse_a = torch.cholesky_solve(a.unsqueeze(-1), factor).squeeze(-1)
        # Predictor: the gap after the longest affine step tells how much to center the corrector.
        dv, _, dz = solve(factor, inverse_a, rd, rp, torch.where(usable, v * dual, 0.0))
        predicted = (v + longest_step(v, dv) * dv) * (dual + longest_step(dual, dz) * dz)
        ahead = predicted.where(usable, 0.0).sum(-1, keepdim=True) / n
        center = (ahead / gap.clamp(min=1e-300)) ** 3
        rc = torch.where(usable, v * dual + dv * dz - center * gap, 0.0)
        dv, dl, dz = solve(factor, inverse_a, rd, rp, rc)
        step = torch.where(stuck, 0, 0.9995 * torch.minimum(longest_step(v, dv), longest_step(dual, dz)))
        v = torch.where(usable, (v + step * dv).clamp(min=1e-300), v)
        dual = torch.where(usable, (dual + step * dz).clamp(min=1e-300), dual)
        multiplier = multiplier + step * dl
    return v


def _polish(matrix: Tensor, target: Tensor, mu: Tensor, usable: Tensor) -> Tensor:
    """Return least squares on the support of mu where that is feasible and not farther from the target, else mu."""
    support = usable & (mu > 1e-9)
    exact = plane_least_squares(matrix, target, support)

    def distance(candidate: Tensor) -> Tensor:
        return torch.linalg.vector_norm((matrix @ candidate.unsqueeze(-1)).squeeze(-1) - target, dim=-1, keepdim=True)

    better = (
        (exact.amin(-1, keepdim=True) >= 0)
        & (distance(exact) <= distance(mu) * (1 + 1e-12))
        & exact.isfinite().all(-1, keepdim=True)
    )
    return torch.where(better, exact, mu)
