"""GELU after a linear layer, with a backward pass that accumulates the gradient of the layer's bias.

In a training step it is the first half of every MLP. The gradient of the bias is the sum over rows of gelu'(h) times the
upstream gradient. The backward kernel adds up these terms while it writes them, so they are not read a second time.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.ops.dense import dense
from m2s.ops.derivatives import first_derivative_only
from m2s.ops.gelu import naive

__all__ = ["linear_gelu"]

ROWS = 64  # rows per program of the backward pass


def linear_gelu(
    x: Float[Tensor, "*rows D"],
    weight: Float[Tensor, "W D"],
    bias: Float[Tensor, "W"],
    fused: bool,
) -> Float[Tensor, "*rows W"]:
    """Compute gelu(x weight^T + bias).

    Args:
        x: Inputs.
        weight: Weight.
        bias: Bias.
        fused: Whether the Triton kernels run.

    Returns:
        The activations.
    """
    if not fused:
        return naive.linear_gelu(x, weight, bias)
    # the bias is detached in the product: its gradient comes from `_gelu`
    return _gelu(dense(x, weight, bias.detach(), fused), bias)


@torch.library.custom_op("m2s::gelu", mutates_args=())
def _gelu(h: Tensor, bias: Tensor) -> Tensor:
    """gelu(h). The bias is part of h already; it is an argument so that it gets its gradient here."""
    from m2s.ops.gelu import triton

    return triton.forward(h)


@_gelu.register_fake
def _(h: Tensor, bias: Tensor) -> Tensor:
    return h.new_empty(h.shape)


@torch.library.custom_op("m2s::gelu_backward", mutates_args=())
def _backward(upstream: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of h, and its sums over the rows of every program, [programs, W]."""
    from m2s.ops.gelu import triton

    return triton.backward(upstream, h)


@_backward.register_fake
def _(upstream: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    width = h.shape[-1]
    return h.new_empty(h.shape), h.new_empty(-(-(h.numel() // width) // ROWS), width, dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    h, bias = inputs
    ctx.save_for_backward(h)
    ctx.dtype = bias.dtype


def _gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
    first_derivative_only("the kernel of GELU")
    gradient, sums = _backward(upstream, *ctx.saved_tensors)
    return gradient, sums.sum(0).to(ctx.dtype)


_gelu.register_autograd(_gradients, setup_context=_setup)
