"""Embedding lookup, with a gradient of the table that writes each of its rows once.

The gradient of row v is the sum of the upstream gradients over the positions whose token is v. The order of the sum depends
only on the tokens, so equal inputs give equal bits. A row without positions is written as zeros by the same kernel.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.embedding import naive

__all__ = ["embed"]


def embed(tokens: Int[Tensor, "*sites"], weight: Float[Tensor, "V D"], fused: bool) -> Float[Tensor, "*sites D"]:
    """Look up the rows of a table.

    Args:
        tokens: Token ids.
        weight: The table. The kernel of its gradient is for float32.
        fused: Whether the Triton kernel computes the gradient.

    Returns:
        weight[tokens].
    """
    if not fused or weight.dtype != torch.float32:
        return naive.embed(tokens, weight)
    return _embed(tokens, weight)


@torch.library.custom_op("m2s::embedding", mutates_args=())
def _embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """The values of `naive.embed`, with the kernel for the gradient."""
    return naive.embed(tokens, weight)


@_embed.register_fake
def _(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*tokens.shape, weight.shape[1])


@torch.library.custom_op("m2s::embedding_backward", mutates_args=())
def _backward(upstream: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """The gradient of the table, [rows, D] in float32."""
    from m2s.ops.embedding import triton

    return triton.backward(upstream, tokens, rows)


@_backward.register_fake
def _(upstream: Tensor, tokens: Tensor, rows: int | torch.SymInt) -> Tensor:
    return upstream.new_empty(rows, upstream.shape[-1], dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    tokens, weight = inputs
    ctx.save_for_backward(tokens)
    ctx.rows = weight.shape[0]


def _gradients(ctx: Any, upstream: Tensor) -> tuple[None, Tensor]:
    return None, _backward(upstream, *ctx.saved_tensors, ctx.rows)


_embed.register_autograd(_gradients, setup_context=_setup)
