"""RADD's any-order form of the masked cross entropy (Ou et al. 2025): weighted by the number of masks instead of by t."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.heads import Head
from m2s.losses.masked_cross_entropy import masking_schedule
from m2s.losses.nll import nll_of_tokens
from m2s.losses.score_entropy import check_pair
from m2s.ops.last_layer import Output


def any_order(
    head: Head, output: Output, x_0: Int[Tensor, "B L"], x_t: Int[Tensor, "B L"], t: Float[Tensor, "B"]
) -> Float[Tensor, "B L"]:
    """Compute -alpha' (L + 1)/n (-log mu_{x_0}) at the n masked positions of each example, 0 elsewhere.

    If the share of masks lambda = 1 - alpha is uniform, then n is uniform on 0..L and E[1/lambda | n] = (L + 1)/n. For a
    network without time input the mean over t then equals that of `masked_cross_entropy`. With n and the masked positions
    drawn separately, it is RADD's k-DCE,

        sum_{n=1}^L 1/n E[sum_{i masked} -log mu_{x_0^i}] = E_order[sum_j -log Pr(x_0^{order_j} | x_0^{order_<j})],

    the NLL of an autoregressive network that fills the positions in random order. Restricted to a part of [0, 1] it is not
    the integral of the NELBO.

    Args:
        head: A head with a posterior, over a process that only masks, with a network that does not see the time.
        output: Output of the network at (x_t, t), [*site, >= states] or `m2s.Unprojected`.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], where *b is the start of *site.

    Returns:
        Nats per position [B, L].

    Raises:
        TypeError: The head has no posterior, or the process has other noise than masks.
    """
    schedule = masking_schedule(head)
    check_pair(head.process, x_0, x_t, t)
    masked = head.process.is_mask(x_t)
    nll = nll_of_tokens(head.posterior_logits(output, x_t, t), x_0)
    count = masked.sum(-1, keepdim=True).clamp(min=1)
    weight = validation.align("t", -schedule.alpha_prime(to_float64(t)), x_t) * (x_t.shape[-1] + 1) / count
    return torch.where(masked, weight.to(nll.dtype) * nll, 0)
