"""RADD's any-order form of the masked objective (Ou et al. 2025): the weight of a sample is the number of its masks, not t."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.heads import Head
from m2s.losses.masked_cross_entropy import absorbing
from m2s.losses.score_entropy import check_pair
from m2s.ops.last_layer import Output


def any_order(
    head: Head, output: Output, x_0: Int[Tensor, "B L"], x_t: Int[Tensor, "B L"], t: Float[Tensor, "B"]
) -> Float[Tensor, "B L"]:
    """-alpha' (L + 1)/n (-log mu_{x_0}) at the n masked sites of each sample and 0 elsewhere, nats per site.

    Where the share of masks lambda = 1 - alpha is uniform, n is uniform on 0..L and E[1/lambda | n] = (L + 1)/n: for a network
    that is not told t the mean over all times is that of the masked objective, and with n and the sites drawn apart it is

        sum_{n=1}^L 1/n E[sum_{i masked} -log mu_{x_0^i}] = E_order[sum_j -log Pr(x_0^{order_j} | x_0^{order_<j})],

    RADD's k-DCE: the likelihood of an autoregressive network that fills the sites in a random order. Over a part of all times
    it is not the bound's integral.
    """
    process = absorbing(head)
    check_pair(process, x_0, x_t, t)
    masked = x_t.long().eq(process.vocab)
    values = head.posterior_logits(output, x_t, t)
    nll = torch.nn.functional.cross_entropy(values.flatten(0, -2), x_0.long().flatten(), reduction="none").reshape(x_0.shape)
    count = masked.sum(-1, keepdim=True).clamp(min=1)
    weight = validation.align("t", -process.schedule.alpha_prime(to_float64(t)), x_t) * (x_t.shape[-1] + 1) / count
    return torch.where(masked, weight.to(nll.dtype) * nll, 0)
