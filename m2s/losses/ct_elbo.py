"""The continuous-time ELBO of Campbell et al. (2022), in their terms: rates of the reverse process, by a law of x_0."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.conversions.bridge import apply_transition, gather_at, mixing_vector
from m2s.dtypes import to_float64
from m2s.heads import Head
from m2s.heads.output import logits
from m2s.losses.score_entropy import check_pair
from m2s.ops.last_layer import Output
from m2s.process import Chain, Process, RankOne


def ct_elbo(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """sum_{y != k} R_y - R*_y log R_y + (R*_y log R*_y - R*_y), k = x_t, nats per site.

    R_y = Q_t(y -> k) sum_z mu_z P_t(y|z) / P_t(k|z) is the rate at which the model goes back from k to y, R*_y = Q_t(y -> k)
    P_t(y|x_0) / P_t(k|x_0) that of the process which ends in x_0.

    Their bound (Proposition 2) is E[sum_y R(x -> y) - sum_y Q_t(x -> y) log R(y -> x)], x ~ P_t(.|x_0), up to a constant: the
    second sum is over forward jumps from x, and asks the network at every y. As a sum over pairs, of P_t(x|x_0) Q_t(x -> y)
    log R(y -> x), it can be taken from the pair's other end: it is E[sum_y R*_y log R(x -> y)], which asks the network at x
    alone. The constant that is added, in brackets, makes 0 of the least value; R = Q s and R* = Q r then give score entropy.
    """
    process = head.process
    if isinstance(process, Chain) or not head.has_posterior:
        raise TypeError(f"the ELBO by reverse rates is for m2s.Posterior over a process with rates, not for {head}")
    check_pair(process, x_0, x_t, t)
    values, time = logits(output, x_t, process.states), to_float64(t)
    posterior = head.posterior(values.to(time.dtype), x_t, time)
    into = process.rates_into(x_t, time)
    row = process.rows(x_0, time)
    rate = into * _seen_from(posterior, x_t, time, process)
    wanted = into * row / gather_at(row, x_t)
    counted = wanted > 0
    ratio = torch.log(rate.where(counted, 1)) - torch.log(wanted.where(counted, 1))
    return (rate - wanted - wanted * ratio).sum(-1).to(values.dtype)


def _seen_from(posterior: Tensor, x_t: Tensor, t: Tensor, process: Process) -> Float[Tensor, "*site S"]:
    """sum_z mu_z P_t(y|z) / P_t(k|z) for every y."""
    likelihood = process.columns(x_t, t)
    weight = posterior / likelihood.where(likelihood > 0, torch.inf)
    if not isinstance(process, RankOne):
        return apply_transition(weight, process.kernel(t))
    site = process.at(x_t, t)
    return site.alpha.unsqueeze(-1) * weight + mixing_vector(process, site) * weight.sum(-1, keepdim=True)
