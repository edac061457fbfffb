"""The masked cross entropy of MD4 and MDLM: score entropy through the bridge under an absorbing mask (Theorem 4.6, Eq. 15)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.errors import UnsupportedError
from m2s.heads import Head, Posterior
from m2s.losses.score_entropy import check_pair
from m2s.ops.last_layer import Output
from m2s.process import Absorbing


def masked_cross_entropy(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """Compute (-alpha' / (1 - alpha)) (-log mu_{x_0}) at masked sites, 0 elsewhere.

    Args:
        head: A head with a posterior, over `m2s.Absorbing`.
        output: Output of the network at (x_t, t), [*site, >= states] or `m2s.Unprojected`.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], where *b is the start of *site.

    Returns:
        Nats per position [*site].

    Raises:
        TypeError: The head has no posterior, or the process is not `m2s.Absorbing`.

    Example:
        >>> head = m2s.Posterior(m2s.Absorbing(256, m2s.Linear()))
        >>> x_t = head.process.corrupt(x_0, t)
        >>> loss = m2s.masked_cross_entropy(head, model(x_t, t), x_0, x_t, t).sum(-1).mean()
    """
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
    """Return the process of a head for which the masked cross entropy is defined.

    Args:
        head: A head with a posterior, over `m2s.Absorbing`.

    Returns:
        The process.

    Raises:
        TypeError: The head has no posterior, or its process is not `m2s.Absorbing`.
    """
    validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
    if not (head.has_posterior and isinstance(head.process, Absorbing)):
        raise UnsupportedError("the masked objective", head, Posterior, Absorbing)
    return head.process
