"""The cross entropy of the leave-one-out distribution on noised positions: a training loss for uniform noise."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.errors import UnsupportedError
from m2s.heads import Head, Posterior
from m2s.heads.output import padded_logits
from m2s.losses.nll import nll_of_tokens
from m2s.losses.score_entropy import check_pair
from m2s.ops.last_layer import Output
from m2s.ops.linear_loss import RowLossSpec
from m2s.process import RankOne


def noised_cross_entropy(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """Compute w (-log nu_{x_0}) with w = (-alpha' / (1 - alpha)) Pr(the process replaced the token | x_0, x_t).

    The probability is 1 where x_t != x_0, and m_t(k) / (alpha_t + m_t(k)) where x_t = x_0 = k: a replacement can draw the same
    token. A token that was replaced says nothing about the clean one. So this cross entropy has its minimum at the
    leave-one-out distribution nu, as the score entropy of a head with the exact offset. Without the probability, w is that
    of `masked_cross_entropy`. The loss is not an upper bound on the NLL.

    Args:
        head: A posterior head with the exact offset, over a process without a mask.
        output: Output of the network at (x_t, t), [*site, >= states] or `m2s.Unprojected`.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], where *b is the start of *site.

    Returns:
        Nats per position [*site].

    Raises:
        TypeError: The head is not such a head.
    """
    process = _process(head)
    check_pair(process, x_0, x_t, t)
    values = padded_logits(output, x_t, process.states)[..., : process.vocab]
    nll = nll_of_tokens(values, x_0)
    return nll * _weight(process, x_0, x_t, t).to(nll.dtype)


def noised_rows(head: Head, x_0: Tensor, x_t: Tensor, t: Tensor) -> RowLossSpec:
    """Describe the fused form of `noised_cross_entropy`.

    Args:
        head: The head.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b].

    Returns:
        The operation and the scalars of every row.

    Raises:
        TypeError: The loss is not defined for the head.
    """
    process = _process(head)
    return RowLossSpec("cross_entropy", _weight(process, x_0, x_t, t).reshape(1, -1), process)


def _process(head: Head) -> RankOne:
    """The process of a head for which the loss is defined."""
    validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
    process = head.process.rank_one
    if not (isinstance(head, Posterior) and head.offset == "exact" and process is not None and process.mask is None):
        raise UnsupportedError("the cross entropy of noised positions", head, Posterior)
    return process


def _weight(process: RankOne, x_0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """-alpha' / (1 - alpha) = rate alpha / m_t(k) times the probability of a replacement, in float64."""
    site = process.at(x_t, to_float64(t))
    replaced = torch.where(x_t.long() == x_0.long(), site.m_k / site.stay, 1)
    return site.rate * site.alpha / site.m_k * replaced
