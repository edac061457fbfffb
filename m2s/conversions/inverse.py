"""The affine inverse of the bridge, from a score to a signed posterior, and the box that contains every realizable score."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import bridge_matrix, scatter_at, site_coefficients, validate_inputs, validate_process
from m2s.conversions.least_squares import plane_least_squares
from m2s.dtypes import at_least_float32, promote_to
from m2s.process import Process, RankOne


def affine_inverse(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """Return the signed posterior mu~ of a score: the vector with sum one whose bridge is `score` (appendix D.1).

    A score is realizable if and only if mu~ has no negative entry (and, under a mask, its bridge is the score). For uniform
    noise mu~ exists and is unique:

        m = sum_{y != k} (s_y - rho) / ((1-rho) (K-1 + 1/rho))
        mu~_k = 1 - m,    mu~_y = (s_y - rho - (1-rho) m) / (1/rho - 1)

    A mask adds an equation, so that not every score has a signed posterior; then mu~ is the least-squares solution. If several
    vectors have the same bridge (the rank condition, Eq. 10, fails), it is the smallest of them.

    Args:
        score: Scores, [*site, S]. The entry at x_t is ignored.
        x_t: Current tokens k, [*site].
        t: Times in (0, 1), [*b].
        process: A forward process with rates.

    Returns:
        mu~, [*site, S], in float32 or wider.

    Raises:
        ValueError: The score has negative entries, as log-scores have.

    Example:
        >>> score = head.log_score(model(x_t, t), x_t, t).exp()
        >>> signed = m2s.affine_inverse(score, x_t, t, head.process)
        >>> realizable = (signed >= 0).all(-1)
    """
    validate_inputs("score", score, x_t, t, process, open_ends=True)
    validation.score("score", score, x_t)
    return signed_posterior(score, x_t, t, process)


def signed_posterior(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """Return the affine inverse of a score whose arguments are already validated.

    Args:
        score: Scores, [*site, S].
        x_t: Current tokens k, [*site].
        t: Times in (0, 1), [*b].
        process: A forward process with rates.

    Returns:
        The signed posterior, [*site, S], in float32 or wider.
    """
    score = at_least_float32(score)
    t = promote_to(t, score)
    if process.rank_one is not None:
        return _rank_one_inverse(score, x_t, t, process.rank_one)
    return _matrix_inverse(score, x_t, t, process)


def _rank_one_inverse(score: Tensor, x_t: Tensor, t: Tensor, process: RankOne) -> Tensor:
    """Return the affine inverse of a rank-one process in O(S).

    Least squares over u = mu~ off k, with mu~_k = 1 - sum(u). With b = alpha/m(k), delta = m(y)/(alpha + m(k)) for a clean y
    and delta_mask for the mask, w = (s - delta)/b and W = sum_{y != k} w_y, the normal equations are
    (I + curvature 1 1^T) u = w + shift with

        shift = delta W + delta_mask w_mask,    curvature = 2 delta + n delta^2 + delta_mask^2,    n = K - 1.

    At k = mask, u is all of mu~: w = (m(k) s - m(y)) / alpha moved onto the plane sum(u) = 1. Where m(k) = 0, mu~ = e_k.
    """
    site = site_coefficients(process, x_t, t, score.dtype)
    known = site.m_k == 0
    divisor = torch.where(known, 1, site.m_k)
    clean_k = ~process.is_mask(x_t)
    delta = site.clean / torch.where(clean_k, site.stay, divisor)
    w = (score[..., : process.vocab] - delta.unsqueeze(-1)) * (divisor / site.alpha).unsqueeze(-1)
    w = torch.nn.functional.pad(w, (0, process.states - process.vocab))
    w = scatter_at(w, x_t, 0.0)
    total, n = w.sum(-1), process.vocab - 1
    shift, curvature = delta * total, 2 * delta + n * delta**2
    if process.mask is not None:
        delta_mask = site.mask / site.stay
        shift = shift + delta_mask * (score[..., -1] - delta_mask) * divisor / site.alpha
        curvature = curvature + delta_mask**2
    # Sherman-Morrison: (I + c 1 1^T)^{-1} v = v - c sum(v) / (1 + n c)
    onto = shift - curvature * (total + n * shift) / (1 + n * curvature)
    u = w + torch.where(clean_k, onto, (1 - total) / process.vocab).unsqueeze(-1)
    if process.mask is not None:
        u = torch.nn.functional.pad(u[..., : process.vocab], (0, 1))
    u = scatter_at(u, x_t, 0.0)
    index = x_t.long().unsqueeze(-1)
    mu = u.scatter(-1, index, torch.where(clean_k, 1 - u.sum(-1), 0).unsqueeze(-1))
    return torch.where(known.unsqueeze(-1), torch.zeros_like(mu).scatter(-1, index, 1.0), mu)


def _matrix_inverse(score: Tensor, x_t: Tensor, t: Tensor, process: Process) -> Tensor:
    """Return the affine inverse by least squares with the matrix of the bridge."""
    bridge, target, reachable = weighted_system(score, x_t, t, process)
    mu = plane_least_squares(bridge, target, reachable)
    return torch.nn.functional.pad(mu, (0, process.states - process.vocab))


def weighted_system(
    score: Tensor, x_t: Tensor, t: Tensor, process: Process
) -> tuple[Float[Tensor, "*site S K"], Float[Tensor, "*site S"], Tensor]:
    """Return the linear system B mu = s of a score, restricted to the candidates that have a rate into k.

    Args:
        score: Scores s, [*site, S].
        x_t: Current tokens k, [*site].
        t: Times, [*b].
        process: A forward process with rates.

    Returns:
        B_{t,k} of `bridge_matrix`, [*site, S, K], and s, [*site, S], in the dtype of the score. The rows of k itself and of
        candidates without a rate into k are zero. Then the tokens from which k can be reached, [*site, K].
    """
    bridge = bridge_matrix(x_t, t, process).to(score.dtype)
    counted = process.rates_into(x_t, t) > 0
    bridge = torch.where(counted.unsqueeze(-1), bridge, 0)
    # A token from which k is reached with a probability below 1e-150 counts as unreachable: the squares of its column would
    # overflow. In float32 its column may be infinite already, which would make LAPACK fail. Its entry of mu is about 0.
    reachable = (process.columns(x_t, t)[..., : process.vocab] > 1e-150) & bridge.isfinite().all(-2)
    return torch.where(reachable.unsqueeze(-2), bridge, 0), torch.where(counted, score, 0), reachable


def box(
    x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> tuple[Float[Tensor, "*site S"], Float[Tensor, "*site S"]]:
    """Return the least and the greatest score that each candidate has under any posterior (Eq. 12).

        min_z P_t(y|z) / P_t(k|z)  <=  s_y  <=  max_z P_t(y|z) / P_t(k|z)

    For uniform noise the interval is [rho, 1/rho].

    Args:
        x_t: Current tokens k, [*site].
        t: Times in (0, 1), [*b].
        process: A forward process with rates.

    Returns:
        The lower and the upper ends, each [*site, S]; 1 at k. A candidate without a rate into k is not bounded: 0 and infinity.

    Example:
        >>> low, high = m2s.box(x_t, t, process)
        >>> outside = ((score < low) | (score > high)).any(-1)
    """
    validate_process(process)
    validation.tokens("x_t", x_t, process.states)
    validation.times("t", t, open_ends=True)
    low, high = _matrix_box(x_t, t, process) if process.rank_one is None else _rank_one_box(x_t, t, process.rank_one)
    counted = process.rates_into(x_t, t) > 0
    low, high = low.where(counted, 0), high.where(counted, torch.inf)
    return scatter_at(low, x_t, 1.0), scatter_at(high, x_t, 1.0)


def _rank_one_box(x_t: Tensor, t: Tensor, process: RankOne) -> tuple[Tensor, Tensor]:
    """Return the box of a rank-one process: [m(y)/(alpha + m(k)), (alpha + m(y))/m(k)] at a clean k.

    A candidate that is the mask has the upper end m(mask)/m(k), since no clean token is the mask. At k = mask the lower end is
    m(y)/m(k).
    """
    site = process.at(x_t, t)
    reached = site.m_k > 0
    divisor = torch.where(reached, site.m_k, 1)
    low = site.clean / torch.where(process.is_mask(x_t), site.m_k, site.stay)
    clean = torch.stack([low, (site.alpha + site.clean) / divisor], -1)
    bounds = clean.unsqueeze(-2).expand(*x_t.shape, process.vocab, 2)
    if process.mask is not None:
        last = torch.stack([site.mask / site.stay, site.mask / divisor], -1)
        bounds = torch.cat([bounds, last.unsqueeze(-2)], -2)
    return bounds[..., 0], bounds[..., 1]


def _matrix_box(x_t: Tensor, t: Tensor, process: Process) -> tuple[Tensor, Tensor]:
    """Return the least and greatest entry of each row of the bridge, over the tokens from which k can be reached."""
    matrix = bridge_matrix(x_t, t, process)
    reachable = (process.columns(x_t, t)[..., : process.vocab] > 0).unsqueeze(-2)
    return matrix.where(reachable, torch.inf).amin(-1), matrix.where(reachable, -torch.inf).amax(-1)
