"""The exact maps between what one can believe about a site: posterior, leave-one-out law, score, reverse rate.

Beliefs and scores are [*sites, states]; `x_t` is [*sites], `t` is [B]. The mask is never a clean token: its entry is zero.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import promote_to, to_float64
from m2s.process import Process, RankOne, SiteCoefficients
from m2s.process.base import select_rows


def site_coefficients(
    process: RankOne, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], dtype: torch.dtype
) -> SiteCoefficients:
    """`process.at`, worked out in the wider of the dtypes of t and of the belief and returned in the belief's."""
    site = process.at(x_t, t.to(torch.promote_types(t.dtype, dtype)))
    return SiteCoefficients(*(value.to(dtype) for value in site))


def gather_at(prediction: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"]) -> Float[Tensor, "*site 1"]:
    """The entry at the current token."""
    return prediction.gather(-1, x_t.long().unsqueeze(-1))


def scatter_at(prediction: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], value: float) -> Float[Tensor, "*site S"]:
    return prediction.scatter(-1, x_t.long().unsqueeze(-1), value)


def apply_transition(distribution: Float[Tensor, "*site S"], kernel: Float[Tensor, "*b S S"]) -> Float[Tensor, "*site S"]:
    """law @ P_t at every site."""
    batch = kernel.shape[:-2]
    sites = math.prod(distribution.shape[len(batch) : -1])
    return (distribution.reshape(*batch, sites, distribution.shape[-1]) @ kernel).reshape(distribution.shape)


def validate_inputs(name: str, prediction: Tensor, x_t: Tensor, t: Tensor, process: Process, open_ends: bool = False) -> None:
    """What every map takes; `open_ends` where t = 0 and t = 1 have no answer."""
    validation.instance("process", process, Process, "a process such as m2s.Uniform(256, m2s.Linear())")
    validation.tokens("x_t", x_t, process.states)
    validation.times("t", t, open_ends=open_ends)
    validation.align("t", t, x_t)
    validation.probabilities(name, prediction, x_t, process.states)


def posterior_from_leave_one_out(
    leave_one_out: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """mu_z ∝ nu_z P_t(k|z): the current token seen as well."""
    validate_inputs("leave_one_out", leave_one_out, x_t, t, process)
    joint = leave_one_out * process.columns(x_t, to_float64(t))
    return (joint / joint.sum(-1, keepdim=True)).to(leave_one_out.dtype)


def leave_one_out_from_posterior(
    posterior: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """nu_z ∝ mu_z / P_t(k|z): the current token forgotten. Where P_t(k|z) = 0, nothing is known of nu_z and it is 0."""
    validate_inputs("posterior", posterior, x_t, t, process)
    likelihood = process.columns(x_t, to_float64(t))
    check_support(posterior, likelihood, x_t, t)
    distribution = torch.softmax(safe_log(posterior) - safe_log(likelihood).where(likelihood > 0, torch.inf), -1)
    return distribution.to(posterior.dtype)


def check_support(posterior: Tensor, likelihood: Tensor, x_t: Tensor, t: Tensor) -> None:
    """The support condition (Assumption A.1): no mass on a token from which x_t cannot be reached. Checked mode only."""
    bad = (posterior > 0) & (likelihood == 0)
    if validation.is_checked() and bad.any():
        at = validation.first_index(bad)
        token, time = int(x_t[at[:-1]]), float(validation.align("t", t, x_t).expand(x_t.shape)[at[:-1]])
        raise ValueError(
            f"posterior{list(at)} is {float(posterior[at]):g}, but P_t(x_t = {token} | {at[-1]}) = 0 at t = {time:g}: "
            "the support condition is violated, and the bridge would divide by zero"
        )


def safe_log(p: Tensor) -> Tensor:
    return torch.where(p > 0, torch.log(p.where(p > 0, 1)), -torch.inf)


def score_from_leave_one_out(
    leave_one_out: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """s_y = (nu P_t)_y / (nu P_t)_k; rank-one: (alpha nu_y + m(y)) / (alpha nu_k + m(k))."""
    validate_inputs("leave_one_out", leave_one_out, x_t, t, process)
    t = promote_to(t, leave_one_out)
    if isinstance(process, RankOne):
        site = site_coefficients(process, x_t, t, leave_one_out.dtype)
        distribution = site.alpha.unsqueeze(-1) * leave_one_out + mixing_vector(process, site)
    else:
        kernel = process.kernel(to_float64(t))
        distribution = apply_transition(leave_one_out.to(kernel.dtype), kernel)
    return scatter_at(distribution / gather_at(distribution, x_t), x_t, 1.0).to(leave_one_out.dtype)


def mixing_vector(process: RankOne, site: SiteCoefficients) -> Float[Tensor, "*site S"]:
    """m_t as a vector at every site."""
    clean = site.clean.unsqueeze(-1).expand(*site.clean.shape, process.vocab)
    return clean if process.mask is None else torch.cat([clean, site.mask.unsqueeze(-1)], -1)


def score_from_posterior(
    posterior: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """The bridge (Theorem 4.1, Eq. 6): s_y = sum_z mu_z P_t(y|z) / P_t(k|z), linear in mu.

    Rank-one, in O(K): s_y = m(y) [off / m(k) + mu_k / (alpha + m(k))] + alpha mu_y / m(k), off = sum_{z != k} mu_z.
    Uniform (Eq. 7): s_y = off + rho mu_k + (1/rho - 1) mu_y.
    """
    validate_inputs("posterior", posterior, x_t, t, process)
    t = promote_to(t, posterior)
    if not isinstance(process, RankOne):
        kernel = process.kernel(to_float64(t))
        likelihood = select_rows(kernel, x_t, -1)
        check_support(posterior, likelihood, x_t, t)
        weights = posterior / likelihood.where(likelihood > 0, torch.inf)
        return scatter_at(apply_transition(weights, kernel), x_t, 1.0).to(posterior.dtype)
    site = site_coefficients(process, x_t, t, posterior.dtype)
    if validation.is_checked():
        check_support(posterior, process.columns(x_t, t).to(posterior.dtype), x_t, t)
    reached = site.own > 0
    divisor = torch.where(reached, site.own, 1)
    off = torch.where(reached, scatter_at(posterior, x_t, 0.0).sum(-1) / divisor, 0)
    common = off + gather_at(posterior, x_t).squeeze(-1) / site.stay
    slope = torch.where(reached, site.alpha / divisor, 0)
    score = mixing_vector(process, site) * common.unsqueeze(-1) + slope.unsqueeze(-1) * posterior
    return scatter_at(score, x_t, 1.0)


def bridge_matrix(x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process) -> Float[Tensor, "*site S K"]:
    """B_{t,k}[y, z] = P_t(y|z) / P_t(k|z) over clean z, with 0 in the columns of z from which k cannot be reached.

    O(states^2) for each site: for small vocabularies, and for audits of tabulated processes.
    """
    validation.tokens("x_t", x_t, process.states)
    kernel = process.kernel(t)[..., : process.vocab, :]
    batch = kernel.shape[:-2]
    likelihood = process.columns(x_t, t)[..., : process.vocab]
    ratio = 1 / likelihood.where(likelihood > 0, torch.inf)
    per_site = kernel.reshape(*batch, *(1 for _ in x_t.shape[len(batch) :]), *kernel.shape[-2:])
    return (per_site * ratio.unsqueeze(-1)).transpose(-1, -2)


def rate_from_score(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """The reverse rate k -> y: Q_t(y -> k) s_y (Eq. 4), and 0 at k."""
    validate_inputs("score", score, x_t, t, process)
    rates = process.rates_into(x_t, promote_to(t, score)).to(score.dtype)
    return torch.where(rates > 0, rates * score, 0)


def score_from_rate(
    rate: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """s_y = (reverse rate k -> y) / Q_t(y -> k); 0 where no rate leads from y to k, 1 at k."""
    validate_inputs("rate", rate, x_t, t, process)
    rates = process.rates_into(x_t, promote_to(t, rate)).to(rate.dtype)
    return scatter_at(rate / rates.where(rates > 0, torch.inf), x_t, 1.0)


def exit_and_jump(
    rate: Float[Tensor, "*site S"],
) -> tuple[Float[Tensor, "*site"], Float[Tensor, "*site S"]]:
    """Reverse rates as the total exit rate and the law of the jump (zero where nothing leaves)."""
    total = rate.sum(-1)
    return total, rate / total.where(total > 0, 1).unsqueeze(-1)
