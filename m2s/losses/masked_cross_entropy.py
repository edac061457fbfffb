"""The masked cross entropy of MD4 and MDLM: score entropy through the bridge under an absorbing mask (Theorem 4.6, Eq. 15)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.errors import UnsupportedError
from m2s.heads import Head, Posterior
from m2s.losses.nll import nll_of_tokens
from m2s.losses.score_entropy import check_pair
from m2s.ops.last_layer import Output
from m2s.process import Absorbing, Schedule


def masked_cross_entropy(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """Compute (-alpha' / (1 - alpha)) (-log mu_{x_0}) at masked sites, 0 elsewhere.

    Args:
        head: A head with a posterior, over a process that only masks: `m2s.Absorbing`, or `m2s.Hybrid` with `p_uniform=0`.
        output: Output of the network at (x_t, t), [*site, >= states] or `m2s.Unprojected`.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], where *b is the start of *site.

    Returns:
        Nats per position [*site].

    Raises:
        TypeError: The head has no posterior, or the process has other noise than masks.

    Example:
        >>> head = m2s.Posterior(m2s.Absorbing(256, m2s.Linear()))
        >>> x_t = head.process.corrupt(x_0, t)
        >>> loss = m2s.masked_cross_entropy(head, model(x_t, t), x_0, x_t, t).sum(-1).mean()
    """
    schedule = masking_schedule(head)
    check_pair(head.process, x_0, x_t, t)
    nll = nll_of_tokens(head.posterior_logits(output, x_t, t), x_0)
    weight = validation.align("t", (-schedule.alpha_prime(to_float64(t)) / schedule.beta(to_float64(t))).to(nll.dtype), x_t)
    return torch.where(head.process.is_mask(x_t), weight * nll, 0)


def masking_schedule(head: Head) -> Schedule:
    """Return the schedule of a head for which the masked cross entropy is defined.

    Args:
        head: A head with a posterior, over a process that only masks.

    Returns:
        The schedule of its process.

    Raises:
        TypeError: The head has no posterior, or the process has other noise than masks.
    """
    validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
    rank_one = head.process.rank_one
    schedule = None if rank_one is None else rank_one.masking_schedule
    if schedule is None or not head.has_posterior:
        raise UnsupportedError("the masked objective", head, Posterior, Absorbing)
    return schedule
