"""The continuous-time ELBO of Campbell et al. (2022), written with the rates of the reverse process."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.conversions.bridge import apply_transition, gather_at, mixing_vector
from m2s.dtypes import to_float64
from m2s.errors import UnsupportedError
from m2s.heads import Head, Posterior
from m2s.heads.output import logits
from m2s.losses.score_entropy import check_pair, matrix_score_entropy
from m2s.ops.last_layer import Output
from m2s.process import Process


def ct_elbo(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """Compute sum_{y != k} R_y - R*_y log R_y + (R*_y log R*_y - R*_y), with k = x_t.

    R_y = Q_t(y -> k) sum_z mu_z P_t(y|z) / P_t(k|z) is the reverse rate of the model from k to y. R*_y = Q_t(y -> k)
    P_t(y|x_0) / P_t(k|x_0) is the reverse rate given x_0.

    Their ELBO (Proposition 2) is E[sum_y R(x -> y) - sum_y Q_t(x -> y) log R(y -> x)], x ~ P_t(.|x_0), up to a constant. The
    second sum runs over forward jumps from x and needs the network at every y. The same sum over pairs, indexed by the other
    end of the jump, is E[sum_y R*_y log R(x -> y)], which needs the network at x only. The constant in parentheses makes the
    minimum 0.
    With R = Q s and R* = Q r the result is score entropy.

    Args:
        head: A head with a posterior, over a process with rates.
        output: Output of the network at (x_t, t), [*site, >= states] or `m2s.Unprojected`.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], where *b is the start of *site.

    Returns:
        Nats per position [*site].

    Raises:
        TypeError: The head has no posterior, or the process is a finite chain.
    """
    process = head.process
    if not (process.has_rates and head.has_posterior):
        raise UnsupportedError("the ELBO by reverse rates", head, Posterior, "a process with rates")
    check_pair(process, x_0, x_t, t)
    values, time = logits(output, x_t, process.states), to_float64(t)
    if process.rank_one is None and head.softmax_is_leave_one_out:
        return matrix_score_entropy(head, values, x_0, x_t, time)  # the same sum, without cancellation in float32
    posterior = head.posterior(values.to(time.dtype), x_t, time)
    into = process.rates_into(x_t, time)
    row = process.rows(x_0, time)
    rate = into * _mean_likelihood_ratio(posterior, x_t, time, process)
    wanted = into * row / gather_at(row, x_t)
    counted = wanted > 0
    ratio = torch.log(rate.where(counted, 1)) - torch.log(wanted.where(counted, 1))
    return (rate - wanted - wanted * ratio).sum(-1).to(values.dtype)


def _mean_likelihood_ratio(posterior: Tensor, x_t: Tensor, t: Tensor, process: Process) -> Float[Tensor, "*site S"]:
    """sum_z mu_z P_t(y|z) / P_t(k|z) for every y."""
    likelihood = process.columns(x_t, t)
    weight = posterior / likelihood.where(likelihood > 0, torch.inf)
    rank_one = process.rank_one
    if rank_one is None:
        return apply_transition(weight, process.transition_matrix(t))
    site = rank_one.at(x_t, t)
    return site.alpha.unsqueeze(-1) * weight + mixing_vector(rank_one, site) * weight.sum(-1, keepdim=True)
