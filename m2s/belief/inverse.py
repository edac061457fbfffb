"""From a score back to a signed posterior: the affine inverse of the bridge, and the box every bridged score lies in."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from m2s.belief.maps import _door, _wider, bridge_matrix, scalars, set_own
from m2s.process import Process, RankOne


class Reduced(NamedTuple):
    """The least-squares problem over one site's posterior, in units where its Hessian is I + curvature 1 1^T.

    At a clean k the unknowns are u = mu off k, mu_k = 1 - sum(u), and |B mu - s|^2 / b^2 = |u|^2 + curvature (sum u)^2 - 2
    pull.u + const, b = alpha/m(k). At the mask, and wherever the token itself carries no mass, u is all of mu and sums to
    one: curvature is 0.
    """

    pull: Tensor  # [*sites, vocab], 0 at k
    curvature: Tensor  # [*sites]
    free: Tensor  # [*sites] bool: k is a clean token and takes what u leaves
    known: Tensor  # [*sites] bool: mu = e_k whatever the score (an unmasked site under absorbing)


def reduce(score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: RankOne) -> Reduced:
    """Rank-one B mu - s, with w = (s - m(y)/(alpha + m(k))) / b and delta = m(y) / (alpha + m(k)) for clean y and for the mask:

    pull = w + delta sum(w) + delta_mask w_mask,   curvature = 2 delta + n delta^2 + delta_mask^2. Uniform: delta = rho, and
    with c = b^2 these are g/c and h/c of the paper's appendix D.4. At k = mask: pull = (m(k) s - m(y)) / alpha.
    """
    site = scalars(process, x_t, t, score.dtype)
    known = site.own == 0
    per_slope = torch.where(known, 1, site.own / site.alpha)  # 1/b
    free = torch.ones_like(known) if process.mask is None else x_t != process.mask
    base = torch.where(free, site.clean / site.stay, site.clean / site.own.where(~known, 1))
    w = (score[..., : process.vocab] - base.unsqueeze(-1)) * per_slope.unsqueeze(-1)
    index = x_t.long().clamp(max=process.vocab - 1).unsqueeze(-1)
    w = w.scatter(-1, index, torch.where(free.unsqueeze(-1), 0, w.gather(-1, index)))
    delta = torch.where(free, site.clean / site.stay, 0)
    shift, curvature = delta * w.sum(-1), 2 * delta + (process.vocab - 1) * delta**2
    if process.mask is not None:
        delta_mask = torch.where(free, site.mask / site.stay, 0)
        w_mask = (score[..., -1] - delta_mask) * per_slope
        shift, curvature = shift + delta_mask * w_mask, curvature + delta_mask**2
    pull = w + shift.unsqueeze(-1)
    pull = pull.scatter(-1, index, torch.where(free.unsqueeze(-1), 0, pull.gather(-1, index)))
    return Reduced(pull, curvature, free, known)


def assemble(u: Tensor, reduced: Reduced, x_t: Tensor, process: RankOne) -> Float[Tensor, "*site S"]:
    """mu from u: what u leaves goes to the current token; nothing to the mask; e_k at a known site."""
    mu = u if process.mask is None else torch.nn.functional.pad(u, (0, 1))
    index = x_t.long().unsqueeze(-1)
    remainder = torch.where(reduced.free, 1 - u.sum(-1), 0).unsqueeze(-1)
    mu = mu.scatter_add(-1, index, remainder)
    return torch.where(reduced.known.unsqueeze(-1), torch.zeros_like(mu).scatter(-1, index, 1.0), mu)


def affine_inverse(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """The signed vector mu~ with sum one whose bridged score is `score` (appendix D.1), or nearest to it.

    Uniform: exact and unique, m = sum_{y != k}(s_y - rho) / ((1-rho)(K-1+1/rho)), mu~_k = 1 - m, mu~_y = (s_y - rho -
    (1-rho) m)/b. Where the bridged scores fill less than the whole space (a mask adds an equation) it is the least-squares
    solution.
    """
    _door("score", score, x_t, t, process)
    t = _wider(t, score)
    if isinstance(process, RankOne):
        reduced = reduce(score, x_t, t, process)
        count = torch.where(reduced.free, process.vocab - 1, process.vocab).to(score.dtype)
        total = reduced.pull.sum(-1)
        # (I + curvature 1 1^T) u = pull, or u = pull + shift with sum(u) = 1
        shift = torch.where(reduced.free, -reduced.curvature * total / (1 + count * reduced.curvature), (1 - total) / count)
        u = reduced.pull + shift.unsqueeze(-1)
        index = x_t.long().clamp(max=process.vocab - 1).unsqueeze(-1)
        u = u.scatter(-1, index, torch.where(reduced.free.unsqueeze(-1), 0, u.gather(-1, index)))
        return assemble(u, reduced, x_t, process)
    return _tabulated_inverse(score, x_t, t, process)


def _tabulated_inverse(score: Tensor, x_t: Tensor, t: Tensor, process: Process) -> Tensor:
    """Least squares over {sum mu = 1} on the tokens from which k can be reached, and over the candidates that have a rate
    into k."""
    bridge, target, reachable = weighted_system(score, x_t, t, process)
    mu = plane_least_squares(bridge, target, reachable)
    return torch.nn.functional.pad(mu, (0, process.states - process.vocab))


def plane_least_squares(
    matrix: Float[Tensor, "*n R K"], target: Float[Tensor, "*n R"], allowed: Bool[Tensor, "*n K"]
) -> Float[Tensor, "*n K"]:
    """argmin |matrix mu - target|^2 over sum(mu) = 1 and mu = 0 where not `allowed`; signs are free.

    One allowed token takes what the others leave: mu = e_a + sum_z mu_z (e_z - e_a). Directions are scaled to unit length, since the
    columns of a bridge divide by kernel entries and can differ by hundreds of orders of magnitude.
    """
    anchor = allowed.to(torch.uint8).argmax(-1, keepdim=True)
    pivot = matrix.gather(-1, anchor.unsqueeze(-2).expand(*matrix.shape[:-1], 1))
    directions = torch.where(allowed.unsqueeze(-2), matrix - pivot, 0)
    length = torch.linalg.vector_norm(directions, dim=-2)
    length = torch.where(length > 0, length, 1)
    inverse = torch.linalg.pinv(directions / length.unsqueeze(-2))
    mu = (inverse @ (target.unsqueeze(-1) - pivot)).squeeze(-1) / length
    mu = torch.where(allowed, mu, 0).scatter(-1, anchor, 0.0)
    return mu.scatter(-1, anchor, 1 - mu.sum(-1, keepdim=True))


def weighted_system(
    score: Tensor, x_t: Tensor, t: Tensor, process: Process
) -> tuple[Float[Tensor, "*site S K"], Float[Tensor, "*site S"], Tensor]:
    """(B, s, reachable): B_{t,k} and s in the score's dtype with rows of candidates that have no rate into k, and k's own,
    set to zero."""
    bridge = bridge_matrix(x_t, t, process).to(score.dtype)
    counted = process.rates_into(x_t, t) > 0
    bridge = torch.where(counted.unsqueeze(-1), bridge, 0)
    reachable = process.columns(x_t, t)[..., : process.vocab] > 0
    return bridge, torch.where(counted, score, 0), reachable


def box(
    x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> tuple[Float[Tensor, "*site S"], Float[Tensor, "*site S"]]:
    """The least and greatest score each candidate can have under any posterior: [min_z, max_z] of P_t(y|z)/P_t(k|z).

    Uniform: [rho, 1/rho] (Eq. 12). Rank-one, clean k: [m(y)/(alpha+m(k)), (alpha+m(y))/m(k)], for the mask m(y)/m(k) above.
    Candidates that carry no rate into k are not bounded; the entry at k is 1.
    """
    if isinstance(process, RankOne):
        site = process.at(x_t, t)
        reached = site.own > 0
        divisor = torch.where(reached, site.own, 1)
        masked = torch.zeros_like(reached) if process.mask is None else x_t == process.mask
        clean = torch.stack([site.clean / torch.where(masked, site.own, site.stay), (site.alpha + site.clean) / divisor], -1)
        bounds = clean.unsqueeze(-2).expand(*x_t.shape, process.vocab, 2)
        if process.mask is not None:
            last = torch.stack([site.mask / site.stay, site.mask / divisor], -1)
            bounds = torch.cat([bounds, last.unsqueeze(-2)], -2)
        low, high = bounds[..., 0], bounds[..., 1]
    else:
        matrix = bridge_matrix(x_t, t, process)
        reachable = (process.columns(x_t, t)[..., : process.vocab] > 0).unsqueeze(-2)
        low = matrix.where(reachable, torch.inf).amin(-1)
        high = matrix.where(reachable, -torch.inf).amax(-1)
    counted = process.rates_into(x_t, t) > 0
    low, high = low.where(counted, 0), high.where(counted, torch.inf)
    return set_own(low, x_t, 1.0), set_own(high, x_t, 1.0)
