"""Losses of processes with transition matrices as sums of positive terms, so that float32 is enough.

The KL divergence of a chain and the score entropy of a tabulated process compare a model m with the truth a at every state y,
each divided by a normalizer. With the leave-one-out distribution nu of the clean token and a transition matrix P,

    m_y = sum_z nu_z P(y|z) = nu_{x_0} a_y + o_y,    a_y = P(y|x_0),    o_y = sum_{z != x_0} nu_z P(y|z).

The normalizers are A of a, O of o and nu_{x_0} A + O of m. The quotient of the two is 1 + e_y,

    e_y = w (o_y/O / (a_y/A) - 1),    w = O / (nu_{x_0} A + O) = 1 - mu_{x_0},

and a term of the loss is v_y (a_y/A) g(e_y), g(e) = e - log(1 + e), or v_y w o_y/O where a_y = 0. No term is negative. Where
the model is nearly right, e is small, and g is about e^2/2: a rounding error of e adds little. The logarithms of a direct
formula would cancel there.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from m2s.conversions.bridge import apply_transition, gather_at, safe_log, scatter_at
from m2s.heads import Head
from m2s.ops.posterior_entropy.cpu_passes import excess

LARGEST_LOG = {torch.float32: 80.0, torch.float64: 600.0}  # exponent of a weight: 256 times its exponential is finite
SMALLEST_TOTAL = 0.5  # O by which terms are divided; it is at least 1 where no weight was cut off
NEAR = 0.5  # up to this |e| a term is g(e), otherwise a difference, which then does not cancel
TINY, LARGEST_QUOTIENT = 1e-30, 1e10  # below a_y/A, and above (o_y/O) / (a_y/A): no quotient is formed, which might overflow


def log_leave_one_out(
    head: Head, values: Float[Tensor, "*site S"], likelihood: Float[Tensor, "*site K"], x_t: Int[Tensor, "*site"], t: Tensor
) -> Float[Tensor, "*site K"]:
    """Return log nu, the leave-one-out distribution of a head with a posterior.

    Where the softmax of the output is not nu, it is proportional to mu_z / P_t(x_t|z). These quotients can exceed the range of
    float32: give float64.

    Args:
        head: The head.
        values: The network's output, [*site, S].
        likelihood: P_t(x_t|z) of every clean token, [*site, K].
        x_t: Current tokens, [*site].
        t: Times, [*b].

    Returns:
        log nu, [*site, K]. Tokens from which x_t cannot be reached have any value or -inf.
    """
    if head.softmax_is_leave_one_out:
        return head.log_network_distribution(values, x_t, t)
    log_likelihood = safe_log(likelihood)
    log_mu = head.posterior_logits(values, x_t, t)
    return torch.log_softmax(log_mu - log_likelihood.where(likelihood > 0, 0), -1)


def other_tokens(
    log_nu: Float[Tensor, "*site K"],
    likelihood: Float[Tensor, "*site K"],
    x_0: Int[Tensor, "*site"],
    transition: Float[Tensor, "*b S S"],
) -> tuple[Float[Tensor, "*site S"], Float[Tensor, "*site 1"]]:
    """Return o_y = sum_{z != x_0} nu_z P(y|z) and log nu_{x_0}, both divided by the same number.

    The number is the largest nu_z P_t(x_t|z), z != x_0, so that O is at least about one. In float32 a token whose nu is more
    than e^80 times that number counts as e^80: its likelihood is at most e^-80.

    Args:
        log_nu: Log of the leave-one-out distribution, [*site, K]. It need not be normalized.
        likelihood: P_t(x_t|z) of every clean token, [*site, K]. It only chooses the number.
        x_0: Clean tokens, [*site].
        transition: P, one matrix for each example, [*b, S, S].

    Returns:
        o, [*site, S], and log nu_{x_0}, [*site, 1].
    """
    evidence = scatter_at(log_nu.detach() + safe_log(likelihood), x_0, -torch.inf).amax(-1, keepdim=True)
    shift = evidence.where(evidence > -torch.inf, 0)
    weights = scatter_at(torch.exp((log_nu - shift).clamp(max=LARGEST_LOG[log_nu.dtype])), x_0, 0.0)
    weights = pad(weights, (0, transition.shape[-1] - log_nu.shape[-1]))
    with torch.autocast(weights.device.type, enabled=False):  # it would round the product to bf16
        others = apply_transition(weights, transition)
    return others, gather_at(log_nu, x_0) - shift


def sum_of_terms(
    others: Float[Tensor, "*site S"],
    others_total: Float[Tensor, "*site 1"],
    clean: Float[Tensor, "*site S"],
    clean_total: Float[Tensor, "*site 1"],
    log_nu_clean: Float[Tensor, "*site 1"],
    weight: Float[Tensor, "*site S"],
) -> Float[Tensor, "*site"]:
    """Return sum_y v_y (a_y/A) g(e_y), with v_y w o_y/O where a_y = 0.

    Args:
        others: o, [*site, S], from `other_tokens`.
        others_total: O, [*site, 1].
        clean: a = P(.|x_0), [*site, S].
        clean_total: A, [*site, 1], positive.
        log_nu_clean: log nu_{x_0}, [*site, 1], from `other_tokens`.
        weight: v, [*site, S], not negative.

    Returns:
        The sum over y, [*site].
    """
    # A is 0 where x_0 cannot lead to x_t. Such a position has no loss; its gradient must be 0 and not NaN.
    clean_total = clean_total.where(clean_total > 0, 1)
    possible, divides = others_total > 0, others_total > SMALLEST_TOTAL
    # O is 0 where x_0 is the only token that can lead here: the loss is 0. It is small where P_t(x_t|z) is below e^-80 for the
    # token z with most of the posterior. The network must then be wrong by 80 nats. The loss is -log mu_{x_0} - w, without o.
    log_total = torch.log(others_total.where(possible, 1))
    # the log-odds of mu_{x_0}
    log_odds = torch.where(possible, log_nu_clean + torch.log(clean_total) - log_total, LARGEST_LOG[others.dtype])
    share, truth = torch.sigmoid(-log_odds), clean / clean_total
    model = torch.where(divides, others / others_total.where(divides, 1), 0)
    compared = (truth > TINY) & (weight > 0)
    direct = compared & (model < LARGEST_QUOTIENT * truth)
    e = share * (model.where(direct, 1) / truth.where(direct, 1) - 1)
    near = direct & (e.abs() < NEAR)
    small = e.where(near, 0)
    # log(mu_{x_0} + w model / truth), also where mu_{x_0} underflows
    log_clean, mixed = logsigmoid(log_odds), compared & (model > 0)
    log_quotient = torch.log(model.where(mixed, 1)) - torch.log(truth.where(mixed, 1)) + logsigmoid(-log_odds)
    log_quotient = torch.where(mixed, torch.logaddexp(log_clean, log_quotient), log_clean)
    far = share * (model - truth) - torch.where(compared, truth * log_quotient, 0)
    return (weight * torch.where(near, truth * excess(small, 1 + small), far)).sum(-1)
