"""The exact conversions between posterior, leave-one-out distribution, score and reverse rate of a site.

    posterior       mu_z = Pr(X_0^i = z | X_t)              all of x_t is seen
    leave-one-out   nu_z = Pr(X_0^i = z | X_t^{-i})         the site's token is not seen
    score           s_y  = p_t(x^{i->y}) / p_t(x)
    reverse rate    k -> y: Q_t(y -> k) s_y

Throughout, k = x_t^i is the current token of the site. Posteriors and scores are [*site, S], `x_t` is [*site] and `t` is [*b],
the start of *site: usually [B, L, S], [B, L] and [B]. The mask is never a clean token: its entry in mu and nu is zero.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import promote_to, to_float64
from m2s.errors import UserTypeError
from m2s.process import Process, RankOne, SiteCoefficients
from m2s.process.base import select_rows
from m2s.process.rank_one import mixing_vector as mixing_vector


def site_coefficients(
    process: RankOne, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], dtype: torch.dtype
) -> SiteCoefficients:
    """Return the scalars of every site (`RankOne.at`) in a given dtype.

    They are computed in the wider of the dtypes of `t` and of the result, so that a time in float64 keeps its digits.

    Args:
        process: A rank-one process.
        x_t: Current tokens, [*site].
        t: Times, [*b].
        dtype: Dtype of the result.
    """
    site = process.at(x_t, t.to(torch.promote_types(t.dtype, dtype)))
    return SiteCoefficients(*(value.to(dtype) for value in site))


def gather_at(prediction: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"]) -> Float[Tensor, "*site 1"]:
    """Return the entry at the current token.

    Args:
        prediction: Any values over the states, [*site, S].
        x_t: Current tokens, [*site].

    Returns:
        The entries, [*site, 1].
    """
    return prediction.gather(-1, x_t.long().unsqueeze(-1))


def scatter_at(prediction: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], value: float) -> Float[Tensor, "*site S"]:
    """Return a copy with the entry at the current token replaced.

    Args:
        prediction: Any values over the states, [*site, S].
        x_t: Current tokens, [*site].
        value: The new entry.

    Returns:
        The copy, [*site, S].
    """
    return prediction.scatter(-1, x_t.long().unsqueeze(-1), value)


def apply_transition(distribution: Float[Tensor, "*site S"], transition: Float[Tensor, "*b S S"]) -> Float[Tensor, "*site S"]:
    """Return the vector-matrix product with a transition matrix at every site: sum_z p(z) P(y|z).

    Args:
        distribution: p, [*site, S].
        transition: P, one matrix for each example, [*b, S, S].

    Returns:
        The distribution after the transition, [*site, S].
    """
    batch = transition.shape[:-2]
    sites = math.prod(distribution.shape[len(batch) : -1])
    return (distribution.reshape(*batch, sites, distribution.shape[-1]) @ transition).reshape(distribution.shape)


def validate_process(process: Process) -> None:
    """Check that a process corrupts tokens, so that there are posteriors, scores and rates to convert.

    Args:
        process: The forward process.

    Raises:
        UserTypeError: `process` is no process, or that of next-token prediction.
    """
    validation.instance("process", process, Process, "a process such as m2s.Uniform(256, m2s.Linear())")
    if not process.has_transitions:
        raise UserTypeError(
            option="process",
            value=process,
            reason="next-token prediction corrupts nothing, so that there are no scores, no rates and nothing to convert",
            hint="give a process such as m2s.Uniform(256, m2s.Linear())",
        )


def validate_inputs(name: str, prediction: Tensor, x_t: Tensor, t: Tensor, process: Process, open_ends: bool = False) -> None:
    """Check the arguments that every conversion takes.

    Args:
        name: Name of `prediction`, for error messages.
        prediction: Posterior, score or rates, [*site, S].
        x_t: Current tokens, [*site].
        t: Times, [*b].
        process: The forward process.
        open_ends: Whether t = 0 and t = 1 are excluded.

    Raises:
        TypeError: An argument has the wrong class or dtype.
        ValueError: Shapes do not fit, or tokens or times are out of range.
    """
    validate_process(process)
    validation.tokens("x_t", x_t, process.states)
    validation.times("t", t, open_ends=open_ends)
    validation.align("t", t, x_t)
    validation.probabilities(name, prediction, x_t, process.states)


def posterior_from_leave_one_out(
    leave_one_out: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """Return the posterior from the leave-one-out distribution: mu_z ∝ nu_z P_t(k|z).

    Args:
        leave_one_out: nu, [*site, S].
        x_t: Current tokens k, [*site].
        t: Times, [*b].
        process: The forward process.

    Returns:
        mu, [*site, S].

    Example:
        >>> process = m2s.Uniform(3, m2s.Linear())
        >>> nu = torch.tensor([[0.5, 0.3, 0.2]])
        >>> m2s.posterior_from_leave_one_out(nu, torch.tensor([2]), torch.tensor([0.5]), process)
        tensor([[0.3125, 0.1875, 0.5000]])
    """
    validate_inputs("leave_one_out", leave_one_out, x_t, t, process)
    # In float64: probabilities of a short time lie far below float32's rounding error.
    joint = leave_one_out * process.columns(x_t, to_float64(t))
    return (joint / joint.sum(-1, keepdim=True)).to(leave_one_out.dtype)


def leave_one_out_from_posterior(
    posterior: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """Return the leave-one-out distribution from the posterior: nu_z ∝ mu_z / P_t(k|z).

    Where P_t(k|z) = 0 the posterior does not determine nu_z, and the result is 0 there.

    Args:
        posterior: mu, [*site, S].
        x_t: Current tokens k, [*site].
        t: Times, [*b].
        process: The forward process.

    Returns:
        nu, [*site, S].

    Raises:
        ValueError: The support condition is violated (in checked mode), or an entry is negative.

    Example:
        >>> process = m2s.Uniform(3, m2s.Linear())
        >>> mu = torch.tensor([[0.3125, 0.1875, 0.5]])
        >>> m2s.leave_one_out_from_posterior(mu, torch.tensor([2]), torch.tensor([0.5]), process)
        tensor([[0.5000, 0.3000, 0.2000]])
    """
    validate_inputs("posterior", posterior, x_t, t, process)
    validation.not_negative("posterior", posterior)
    likelihood = process.columns(x_t, to_float64(t))
    check_support(posterior, likelihood, x_t, t)
    leave_one_out = torch.softmax(safe_log(posterior) - safe_log(likelihood).where(likelihood > 0, torch.inf), -1)
    return leave_one_out.to(posterior.dtype)


def check_support(posterior: Tensor, likelihood: Tensor, x_t: Tensor, t: Tensor) -> None:
    """Check the support condition (Assumption A.1) in checked mode: mu_z = 0 wherever P_t(x_t | z) = 0.

    Args:
        posterior: mu, [*site, S].
        likelihood: P_t(x_t | .), [*site, S].
        x_t: Current tokens, [*site].
        t: Times, [*b].

    Raises:
        ValueError: The posterior has mass on a token from which x_t cannot be reached.
    """
    bad = (posterior > 0) & (likelihood == 0)
    if validation.is_checked() and bad.any():
        at = validation.first_index(bad)
        token, time = int(x_t[at[:-1]]), float(validation.align("t", t, x_t).expand(x_t.shape)[at[:-1]])
        raise ValueError(
            f"posterior{list(at)} is {float(posterior[at]):g}, but P_t(x_t = {token} | {at[-1]}) = 0 at t = {time:g}: "
            "the support condition is violated, and the bridge would divide by zero"
        )


def safe_log(p: Tensor) -> Tensor:
    """Return log p, and -inf where p = 0 with a gradient of 0 in place of NaN.

    Args:
        p: Non-negative values.

    Returns:
        The logarithms, in the shape of `p`.
    """
    # The inner `where` keeps log away from 0: its infinite slope times a zero gradient would be NaN.
    return torch.where(p > 0, torch.log(p.where(p > 0, 1)), -torch.inf)


def score_from_leave_one_out(
    leave_one_out: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """Return the score from the leave-one-out distribution: s_y = (nu P_t)_y / (nu P_t)_k.

    For a rank-one process, s_y = (alpha nu_y + m(y)) / (alpha nu_k + m(k)).

    Args:
        leave_one_out: nu, [*site, S].
        x_t: Current tokens k, [*site].
        t: Times, [*b].
        process: The forward process.

    Returns:
        Scores, [*site, S]; 1 at x_t.

    Example:
        >>> process = m2s.Uniform(3, m2s.Linear())
        >>> nu = torch.tensor([[0.5, 0.3, 0.2]])
        >>> m2s.score_from_leave_one_out(nu, torch.tensor([2]), torch.tensor([0.5]), process)
        tensor([[1.5625, 1.1875, 1.0000]])
    """
    validate_inputs("leave_one_out", leave_one_out, x_t, t, process)
    t = promote_to(t, leave_one_out)
    rank_one = process.rank_one
    if rank_one is not None:
        site = site_coefficients(rank_one, x_t, t, leave_one_out.dtype)
        marginal = site.alpha.unsqueeze(-1) * leave_one_out + mixing_vector(rank_one, site)
    else:
        transition = process.transition_matrix(to_float64(t))
        marginal = apply_transition(leave_one_out.to(transition.dtype), transition)
    return scatter_at(marginal / gather_at(marginal, x_t), x_t, 1.0).to(leave_one_out.dtype)


def score_from_posterior(
    posterior: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """Return the score from the posterior, by the bridge (Theorem 4.1, Eq. 6).

        s_y = sum_z mu_z P_t(y|z) / P_t(k|z)

    It is linear in mu. For uniform noise (Eq. 7) it is s_y = off + rho mu_k + (1/rho - 1) mu_y, off = sum_{z != k} mu_z.

    Args:
        posterior: mu, [*site, S].
        x_t: Current tokens k, [*site].
        t: Times, [*b].
        process: The forward process.

    Returns:
        Scores, [*site, S]; 1 at x_t.

    Raises:
        ValueError: The support condition is violated (in checked mode).

    Example:
        >>> process = m2s.Uniform(256, m2s.Linear())
        >>> mu = torch.softmax(logits, -1)                          # [B, L, 256]
        >>> score = m2s.score_from_posterior(mu, x_t, t, process)   # [B, L, 256]
    """
    validate_inputs("posterior", posterior, x_t, t, process)
    t = promote_to(t, posterior)
    if process.rank_one is not None:
        return _rank_one_bridge(posterior, x_t, t, process.rank_one)
    return _matrix_bridge(posterior, x_t, t, process)


def _rank_one_bridge(posterior: Tensor, x_t: Tensor, t: Tensor, process: RankOne) -> Tensor:
    """Return the bridge of a rank-one process in O(S).

        s_y = m(y) [off / m(k) + mu_k / (alpha + m(k))] + alpha mu_y / m(k),    off = sum_{z != k} mu_z

    Where m(k) = 0 (an unmasked site under masking noise) the posterior is e_k, and the terms over m(k) are left out.
    """
    site = site_coefficients(process, x_t, t, posterior.dtype)
    if validation.is_checked():
        check_support(posterior, process.columns(x_t, t).to(posterior.dtype), x_t, t)
    reached = site.m_k > 0
    divisor = torch.where(reached, site.m_k, 1)
    # `off` is a sum and not 1 - mu_k, which would cancel: m(k) can lie below the rounding error of mu_k.
    off = torch.where(reached, scatter_at(posterior, x_t, 0.0).sum(-1) / divisor, 0)
    common = off + gather_at(posterior, x_t).squeeze(-1) / site.stay
    slope = torch.where(reached, site.alpha / divisor, 0)
    score = mixing_vector(process, site) * common.unsqueeze(-1) + slope.unsqueeze(-1) * posterior
    return scatter_at(score, x_t, 1.0)


def _matrix_bridge(posterior: Tensor, x_t: Tensor, t: Tensor, process: Process) -> Tensor:
    """Return the bridge by the transition matrix: the product of mu_z / P_t(k|z) with P_t, in O(S^2)."""
    transition = process.transition_matrix(to_float64(t))
    likelihood = select_rows(transition, x_t, -1)
    check_support(posterior, likelihood, x_t, t)
    # Division by infinity makes the weight of an unreachable token 0, without NaN in the gradient.
    weights = posterior / likelihood.where(likelihood > 0, torch.inf)
    return scatter_at(apply_transition(weights, transition), x_t, 1.0).to(posterior.dtype)


def bridge_matrix(x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process) -> Float[Tensor, "*site S K"]:
    """Return the matrix of the bridge, B_{t,k}[y, z] = P_t(y|z) / P_t(k|z) over clean z (Eq. 10).

    It takes O(states^2) memory for each site: it is for small vocabularies and for tabulated processes.

    Args:
        x_t: Current tokens k, [*site].
        t: Times, [*b].
        process: The forward process.

    Returns:
        The matrices, [*site, S, K]. The columns of tokens z from which k cannot be reached are 0.
    """
    validate_process(process)
    validation.tokens("x_t", x_t, process.states)
    transition = process.transition_matrix(t)[..., : process.vocab, :]
    batch = transition.shape[:-2]
    likelihood = process.columns(x_t, t)[..., : process.vocab]
    ratio = 1 / likelihood.where(likelihood > 0, torch.inf)
    per_site = transition.reshape(*batch, *(1 for _ in x_t.shape[len(batch) :]), *transition.shape[-2:])
    return (per_site * ratio.unsqueeze(-1)).transpose(-1, -2)


def rate_from_score(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """Return the reverse rates k -> y from the score: Q_t(y -> k) s_y (Eq. 4), and 0 at k.

    Args:
        score: Scores, [*site, S].
        x_t: Current tokens k, [*site].
        t: Times, [*b].
        process: A forward process with rates.

    Returns:
        Reverse rates, [*site, S].

    Example:
        >>> score = head.log_score(model(x_t, t), x_t, t).exp()
        >>> rate = m2s.rate_from_score(score, x_t, t, head.process)
        >>> exit_rate = rate.sum(-1)                            # of each position
    """
    validate_inputs("score", score, x_t, t, process)
    rates = process.rates_into(x_t, promote_to(t, score)).to(score.dtype)
    # An unconstrained score may be infinite where it has no rate, and 0 * inf is NaN.
    return torch.where(rates > 0, rates * score, 0)


def score_from_rate(
    rate: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """Return the score from the reverse rates: s_y = (reverse rate k -> y) / Q_t(y -> k).

    Args:
        rate: Reverse rates, [*site, S].
        x_t: Current tokens k, [*site].
        t: Times, [*b].
        process: A forward process with rates.

    Returns:
        Scores, [*site, S]; 0 where no rate leads from y to k, and 1 at k.

    Example:
        >>> rate = m2s.rate_from_score(score, x_t, t, process)
        >>> same = m2s.score_from_rate(rate, x_t, t, process)
    """
    validate_inputs("rate", rate, x_t, t, process)
    rates = process.rates_into(x_t, promote_to(t, rate)).to(rate.dtype)
    return scatter_at(rate / rates.where(rates > 0, torch.inf), x_t, 1.0)  # x / inf = 0


def exit_and_jump(
    rate: Float[Tensor, "*site S"],
) -> tuple[Float[Tensor, "*site"], Float[Tensor, "*site S"]]:
    """Split reverse rates into the total exit rate and the distribution of the jump.

    Args:
        rate: Reverse rates, [*site, S], 0 at the current token.

    Returns:
        The exit rate, [*site], and the probability of each destination, [*site, S]; 0 everywhere if the exit rate is 0.
    """
    total = rate.sum(-1)
    return total, rate / total.where(total > 0, 1).unsqueeze(-1)
