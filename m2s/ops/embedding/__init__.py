"""The rows of a table that tokens stand for, and the gradient of the table in one pass that writes each of its rows once.

The gradient of row v is the sum of the gradients above over the sites whose token is v, added up in an order that depends on
nothing but the tokens: the same inputs give the same bits. A row without sites is written as zeros by the same kernel.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.embedding import naive

__all__ = ["embed"]


def embed(tokens: Int[Tensor, "*sites"], weight: Float[Tensor, "V D"], fused: bool) -> Float[Tensor, "*sites D"]:
    """`reference.embed`; the fused form is for a table in float32."""
    if not fused or weight.dtype != torch.float32:
        return naive.embed(tokens, weight)
    return _embed(tokens, weight)


@torch.library.custom_op("m2s::embedding", mutates_args=())
def _embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """The reference's values, with a gradient of our own."""
    return naive.embed(tokens, weight)


@_embed.register_fake
def _(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*tokens.shape, weight.shape[1])


@torch.library.custom_op("m2s::embedding_backward", mutates_args=())
def _backward(above: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """The gradient of the table, [rows, D] in float32."""
    from m2s.ops.embedding import triton

    return triton.backward(above, tokens, rows)


@_backward.register_fake
def _(above: Tensor, tokens: Tensor, rows: int | torch.SymInt) -> Tensor:
    return above.new_empty(rows, above.shape[-1], dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    tokens, weight = inputs
    ctx.save_for_backward(tokens)
    ctx.rows = weight.shape[0]


def _gradients(ctx: Any, above: Tensor) -> tuple[None, Tensor]:
    return None, _backward(above, *ctx.saved_tensors, ctx.rows)


_embed.register_autograd(_gradients, setup_context=_setup)
