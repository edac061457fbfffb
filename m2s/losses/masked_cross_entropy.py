"""The masked form of the objective (MD4, MDLM): what score entropy through the bridge becomes under an absorbing mask
(Theorem 4.6, Eq. 15)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.heads import Head
from m2s.losses.score_entropy import check_pair
from m2s.ops.last_layer import Output
from m2s.process import Absorbing


def masked_cross_entropy(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """(-alpha' / (1 - alpha)) (-log mu_{x_0}) at masked sites and 0 elsewhere, nats per site."""
    process = absorbing(head)
    check_pair(process, x_0, x_t, t)
    values = head.posterior_logits(output, x_t, t)
    nll = torch.nn.functional.cross_entropy(
        values.reshape(-1, process.vocab), x_0.reshape(-1).long(), reduction="none"
    ).reshape(x_0.shape)
    schedule = process.schedule
    weight = validation.align("t", (-schedule.alpha_prime(to_float64(t)) / schedule.beta(to_float64(t))).to(nll.dtype), x_t)
    return torch.where(x_t.long().eq(process.vocab), weight * nll, 0)


def absorbing(head: Head) -> Absorbing:
    """The head's process, if this objective is for it."""
    if not (head.has_posterior and isinstance(head.process, Absorbing)):
        raise TypeError(f"the masked objective is for m2s.Posterior over m2s.Absorbing, not for {head}")
    return head.process
