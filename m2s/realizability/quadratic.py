"""The same projection for a tabulated process: min |B mu - s|^2 over the simplex, a batched QP in float64.

Columns of B are scaled to unit length (their lengths can differ by hundreds of orders of magnitude, since B divides by kernel
entries), and the problem min 1/2 v'Hv - f'v, a'v = 1, v >= 0 is solved by Mehrotra's predictor-corrector interior point; the
support it ends on is then solved exactly by least squares where that keeps every entry non-negative.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.conversions.inverse import weighted_system
from m2s.conversions.least_squares import plane_least_squares
from m2s.process import Process

LIMIT = 256
ITERATIONS = 60


def project_tabulated(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """The nearest posterior by score, over the tokens from which x_t can be reached."""
    if process.vocab > LIMIT:
        raise ValueError(
            f"projection for a tabulated process is a QP for up to {LIMIT} tokens, but this one has {process.vocab}"
        )
    if not x_t.numel():
        return torch.zeros_like(score)
    bridge, target, reachable = weighted_system(score.double(), x_t, t.double(), process)
    rows, vocab = bridge.shape[-2:]
    mu = simplex_least_squares(bridge.reshape(-1, rows, vocab), target.reshape(-1, rows), reachable.reshape(-1, vocab))
    mu = mu.reshape(reachable.shape)
    return torch.nn.functional.pad(mu, (0, process.states - process.vocab)).to(score.dtype)


def simplex_least_squares(
    matrix: Float[Tensor, "N R K"], target: Float[Tensor, "N R"], allowed: Tensor | None = None
) -> Float[Tensor, "N K"]:
    """argmin |matrix mu - target|^2 over mu >= 0, sum(mu) = 1, and mu = 0 where not `allowed`."""
    length = torch.linalg.vector_norm(matrix, dim=-2)
    usable = length.isfinite() if allowed is None else allowed & length.isfinite()
    length = torch.where(usable, length.clamp(min=1.0), 1.0)
    columns = torch.where(usable.unsqueeze(-2), matrix / length.unsqueeze(-2), 0.0)
    size = torch.linalg.vector_norm(target, dim=-1, keepdim=True).clamp(min=1.0)
    v = _interior_point(columns, target / size, (1 / length) * size, usable) * size
    mu = torch.where(usable, v / length, 0.0).clamp(min=0)
    mu = mu / mu.sum(-1, keepdim=True)
    return _polish(matrix.where(usable.unsqueeze(-2), 0.0), target, mu, usable)


def _interior_point(columns: Tensor, target: Tensor, a: Tensor, usable: Tensor) -> Tensor:
    """min 1/2 |columns v - target|^2, a'v = 1, v >= 0."""
    gram = columns.transpose(-1, -2) @ columns
    pull = (columns.transpose(-1, -2) @ target.unsqueeze(-1)).squeeze(-1)
    a = torch.where(usable, a, 0.0)
    n = usable.sum(-1, keepdim=True).to(gram.dtype)
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

    def longest(value: Tensor, direction: Tensor) -> Tensor:
        limit = torch.where(usable & (direction < 0), -value / direction.where(direction < 0, -1.0), torch.inf)
        return limit.amin(-1, keepdim=True).clamp(max=1.0)

    for _ in range(ITERATIONS):
        rd = torch.where(usable, (gram @ v.unsqueeze(-1)).squeeze(-1) - pull - a * multiplier - dual, 0.0)
        rp = (a * v).where(usable, 0.0).sum(-1, keepdim=True) - 1
        gap = (v * dual).where(usable, 0.0).sum(-1, keepdim=True) / n
        if float(torch.maximum(torch.maximum(rd.abs().amax(), rp.abs().amax()), gap.amax())) < 1e-15:
            break
        diagonal = torch.where(usable, dual / v, 1.0)
        factor, failed = torch.linalg.cholesky_ex(gram + torch.diag_embed(diagonal + 1e-15))
        stuck = (failed > 0).unsqueeze(-1)  # a row at the end of its digits stays where it is
        if stuck.all():
            break
        factor = torch.where(stuck.unsqueeze(-1), torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device), factor)
        inverse_a = torch.cholesky_solve(a.unsqueeze(-1), factor).squeeze(-1)
        dv, _, dz = solve(factor, inverse_a, rd, rp, torch.where(usable, v * dual, 0.0))
        ahead = ((v + longest(v, dv) * dv) * (dual + longest(dual, dz) * dz)).where(usable, 0.0).sum(-1, keepdim=True) / n
        centre = (ahead / gap.clamp(min=1e-300)) ** 3
        rc = torch.where(usable, v * dual + dv * dz - centre * gap, 0.0)
        dv, dl, dz = solve(factor, inverse_a, rd, rp, rc)
        step = torch.where(stuck, 0, 0.9995 * torch.minimum(longest(v, dv), longest(dual, dz)))
        v = torch.where(usable, (v + step * dv).clamp(min=1e-300), v)
        dual = torch.where(usable, (dual + step * dz).clamp(min=1e-300), dual)
        multiplier = multiplier + step * dl
    return v


def _polish(matrix: Tensor, target: Tensor, mu: Tensor, usable: Tensor) -> Tensor:
    """Least squares on the support the interior point found, kept where it is feasible and no worse."""
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
