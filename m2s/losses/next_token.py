"""The NLL of the next token, which is exact for an autoregressive network."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.errors import UnsupportedError
from m2s.heads import Head, NextToken
from m2s.losses.nll import nll_of_tokens
from m2s.ops.last_layer import Output
from m2s.ops.linear_loss import RowLossSpec


def next_token_nll(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """Compute -log Pr(x_0^i | x_0^{<i}); its sum over sites is -log p(x_0).

    Args:
        head: `m2s.heads.NextToken`.
        output: Output of the network at (x_t, t), [*site, >= states] or `m2s.Unprojected`.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], where *b is the start of *site.

    Returns:
        Nats per position [*site].
    """
    logits = _head(head).posterior_logits(output, x_t, t)
    validation.tokens("x_0", x_0, head.process.vocab)
    validation.same_shape("x_0", x_0, "x_t", x_t)
    return nll_of_tokens(logits, x_0)


def next_token_rows(head: Head, x_0: Tensor, x_t: Tensor, t: Tensor) -> RowLossSpec:
    """Describe the fused form of `next_token_nll`: the output at a position is the logits of the clean token there.

    Args:
        head: `m2s.heads.NextToken`.
        x_0: Clean tokens [*site].
        x_t: The shifted sequence [*site]. Not read.
        t: Times [*b]. Not read.

    Returns:
        The operation, and a weight of 1 for every row.

    Raises:
        TypeError: The head is not a next-token head.
    """
    weight = torch.ones(1, x_0.numel(), dtype=torch.float64, device=x_0.device)
    return RowLossSpec("cross_entropy", weight, _head(head).process)


def zero_integral(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """Return 0, the integrand of `m2s.elbo` for a next-token head: there the reconstruction term is the exact NLL.

    Args:
        head: `m2s.heads.NextToken`.
        output: Output of the network at (x_t, t), [*site, >= states] or `m2s.Unprojected`.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], where *b is the start of *site.

    Returns:
        Zeros [*site], float64.
    """
    _head(head)
    return torch.zeros(x_0.shape, dtype=torch.float64, device=x_0.device)


def _head(head: Head) -> NextToken:
    """Return the head, or raise TypeError where it is not a next-token head."""
    if not isinstance(head, NextToken):
        raise UnsupportedError("the exact likelihood", head, NextToken, hint="use m2s.elbo, an upper bound")
    return head
