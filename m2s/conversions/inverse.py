"""From a score back to a signed posterior: the affine inverse of the bridge, and the box every bridged score lies in."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import bridge_matrix, scatter_at, site_coefficients, validate_inputs
from m2s.dtypes import at_least_float32, promote_to
from m2s.process import Process, RankOne


def affine_inverse(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """The signed vector mu~ with sum one whose bridged score is `score` (appendix D.1), or nearest to it.

    Uniform: exact and unique; m = sum_{y != k} (s_y - rho) / ((1-rho) (K-1 + 1/rho)), mu~_k = 1 - m,
    mu~_y = (s_y - rho - (1-rho) m) / b. Where the bridged scores fill less than the whole space (a mask adds an equation) it is
    the least-squares solution; where several vectors have the same score, the least of them.
    """
    validate_inputs("score", score, x_t, t, process, open_ends=True)
    score = at_least_float32(score)
    t = promote_to(t, score)
    if isinstance(process, RankOne):
        return _rank_one_inverse(score, x_t, t, process)
    return _tabulated_inverse(score, x_t, t, process)


def _rank_one_inverse(score: Tensor, x_t: Tensor, t: Tensor, process: RankOne) -> Tensor:
    """Least squares over u = mu~ off k, mu~_k = 1 - sum(u). With b = alpha/m(k), delta = m(y)/(alpha + m(k)) for clean y
    and for the mask, w = (s - delta)/b and W = sum_{y != k} w_y, the normal equations (I + curvature 1 1^T) u = w + shift
    have

        shift = delta W + delta_mask w_mask,    curvature = 2 delta + n delta^2 + delta_mask^2,    n = K - 1.

    At k = mask, u is all of mu~: w = (m(k) s - m(y)) / alpha moved onto the plane sum(u) = 1. Where m(k) = 0, mu~ = e_k.
    """
    site = site_coefficients(process, x_t, t, score.dtype)
    known = site.own == 0
    own = torch.where(known, 1, site.own)
    clean_k = torch.ones_like(known) if process.mask is None else x_t.long() != process.mask
    delta = site.clean / torch.where(clean_k, site.stay, own)
    w = (score[..., : process.vocab] - delta.unsqueeze(-1)) * (own / site.alpha).unsqueeze(-1)
    w = torch.nn.functional.pad(w, (0, process.states - process.vocab))
    w = scatter_at(w, x_t, 0.0)
    total, n = w.sum(-1), process.vocab - 1
    shift, curvature = delta * total, 2 * delta + n * delta**2
    if process.mask is not None:
        delta_mask = site.mask / site.stay
        shift = shift + delta_mask * (score[..., -1] - delta_mask) * own / site.alpha
        curvature = curvature + delta_mask**2
    onto = shift - curvature * (total + n * shift) / (1 + n * curvature)
    u = w + torch.where(clean_k, onto, (1 - total) / process.vocab).unsqueeze(-1)
    if process.mask is not None:
        u = torch.nn.functional.pad(u[..., : process.vocab], (0, 1))
    u = scatter_at(u, x_t, 0.0)
    index = x_t.long().unsqueeze(-1)
    mu = u.scatter(-1, index, torch.where(clean_k, 1 - u.sum(-1), 0).unsqueeze(-1))
    return torch.where(known.unsqueeze(-1), torch.zeros_like(mu).scatter(-1, index, 1.0), mu)


def _tabulated_inverse(score: Tensor, x_t: Tensor, t: Tensor, process: Process) -> Tensor:
    """Least squares over {sum mu = 1} on the tokens from which k can be reached, and over the candidates that have a rate
    into k."""
    bridge, target, reachable = weighted_system(score, x_t, t, process)
    mu = plane_least_squares(bridge, target, reachable)
    return torch.nn.functional.pad(mu, (0, process.states - process.vocab))


def plane_least_squares(
    matrix: Float[Tensor, "*n R K"], target: Float[Tensor, "*n R"], allowed: Bool[Tensor, "*n K"]
) -> Float[Tensor, "*n K"]:
    """argmin |matrix mu - target|^2 over sum(mu) = 1 and mu = 0 where not `allowed`; signs are free, and of several the
    least."""
    anchor, pivot, directions, length = _directions(matrix, allowed)
    right = target.unsqueeze(-1) - pivot
    if right.device.type == "cpu":  # keeps digits that the pseudo-inverse loses, which is all there is elsewhere
        solution = torch.linalg.lstsq(directions, right, driver="gelsd").solution
    else:
        solution = torch.linalg.pinv(directions) @ right
    mu = solution.squeeze(-1) / length
    mu = torch.where(allowed, mu, 0).scatter(-1, anchor, 0.0)
    return mu.scatter(-1, anchor, 1 - mu.sum(-1, keepdim=True))


def is_determined(
    matrix: Float[Tensor, "*n R K"], target: Float[Tensor, "*n R"], allowed: Bool[Tensor, "*n K"]
) -> Bool[Tensor, "*n"]:
    """The rank condition (Eq. 10) with room for rounding: the score fixes the posterior over the `allowed` tokens to 1e-7
    in float64."""
    _, _, directions, length = _directions(matrix, allowed)
    values = torch.linalg.svdvals(directions)
    unknowns = allowed.sum(-1, keepdim=True) - 1
    least = values.gather(-1, (unknowns - 1).clamp(0, values.shape[-1] - 1)).squeeze(-1)
    least = torch.where(unknowns.squeeze(-1) > values.shape[-1], 0, least)
    shortest = length.where(allowed, torch.inf).amin(-1)
    enough = least * shortest > 1e-9 * torch.linalg.vector_norm(target, dim=-1)
    return enough | (unknowns.squeeze(-1) == 0)


def _directions(matrix: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The plane sum(mu) = 1 as mu = e_a + sum_z mu_z (e_z - e_a): a, the score of e_a, and those of the directions, at unit
    length.

    The columns of a bridge divide by kernel entries and can differ by hundreds of orders of magnitude: hence the length is
    taken out.
    """
    anchor = allowed.to(torch.uint8).argmax(-1, keepdim=True)
    pivot = matrix.gather(-1, anchor.unsqueeze(-2).expand(*matrix.shape[:-1], 1))
    directions = torch.where(allowed.unsqueeze(-2), matrix - pivot, 0)
    length = torch.linalg.vector_norm(directions, dim=-2)
    length = torch.where(length > 0, length, 1)
    return anchor, pivot, directions / length.unsqueeze(-2), length


def weighted_system(
    score: Tensor, x_t: Tensor, t: Tensor, process: Process
) -> tuple[Float[Tensor, "*site S K"], Float[Tensor, "*site S"], Tensor]:
    """(B, s, reachable): B_{t,k} and s in the score's dtype with rows of candidates that have no rate into k, and k's own,
    set to zero."""
    bridge = bridge_matrix(x_t, t, process).to(score.dtype)
    counted = process.rates_into(x_t, t) > 0
    bridge = torch.where(counted.unsqueeze(-1), bridge, 0)
    # a token from which k is reached with less than 1e-150 counts as one from which it is not: the bridge's squares would
    # overflow
    reachable = process.columns(x_t, t)[..., : process.vocab] > 1e-150
    return torch.where(reachable.unsqueeze(-2), bridge, 0), torch.where(counted, score, 0), reachable


def box(
    x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> tuple[Float[Tensor, "*site S"], Float[Tensor, "*site S"]]:
    """The least and greatest score each candidate can have under any posterior: [min_z, max_z] of P_t(y|z)/P_t(k|z).

    Uniform: [rho, 1/rho] (Eq. 12). Rank-one, clean k: [m(y)/(alpha+m(k)), (alpha+m(y))/m(k)], for the mask m(y)/m(k) above.
    Candidates that carry no rate into k are not bounded; the entry at k is 1.
    """
    validation.instance("process", process, Process, "a process such as m2s.Uniform(256, m2s.Linear())")
    validation.tokens("x_t", x_t, process.states)
    validation.times("t", t, open_ends=True)
    if isinstance(process, RankOne):
        site = process.at(x_t, t)
        reached = site.own > 0
        divisor = torch.where(reached, site.own, 1)
        masked = torch.zeros_like(reached) if process.mask is None else x_t.long() == process.mask
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
    return scatter_at(low, x_t, 1.0), scatter_at(high, x_t, 1.0)
