"""gelu after a linear layer, with a backward pass that adds up the gradient of the layer's bias as it goes.

That gradient is the sum of gelu'(h) times the gradient above over all rows: found with its terms, they are not read once more.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.ops.dense import dense
from m2s.ops.gelu import naive

__all__ = ["linear_gelu"]

ROWS = 64  # for one program of the backward pass


def linear_gelu(
    x: Float[Tensor, "*rows D"],
    weight: Float[Tensor, "W D"],
    bias: Float[Tensor, "W"],
    fused: bool,
    narrow: Float[Tensor, "W D"] | None = None,
) -> Float[Tensor, "*rows W"]:
    """`reference.linear_gelu`."""
    if not fused:
        return naive.linear_gelu(x, weight, bias)
    return _gelu(dense(x, weight, bias.detach(), fused, narrow), bias)


@torch.library.custom_op("m2s::gelu", mutates_args=())
def _gelu(h: Tensor, bias: Tensor) -> Tensor:
    """gelu(h). The bias is in h already: it is here for its gradient."""
    from m2s.ops.gelu import triton

    return triton.forward(h)


@_gelu.register_fake
def _(h: Tensor, bias: Tensor) -> Tensor:
    return h.new_empty(h.shape)


@torch.library.custom_op("m2s::gelu_backward", mutates_args=())
def _backward(above: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of h, and its sums over the rows of every program."""
    from m2s.ops.gelu import triton

    return triton.backward(above, h)


@_backward.register_fake
def _(above: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    width = h.shape[-1]
    return h.new_empty(h.shape), h.new_empty(-(-(h.numel() // width) // ROWS), width, dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    h, bias = inputs
    ctx.save_for_backward(h)
    ctx.dtype = bias.dtype


def _gradients(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor]:
    gradient, sums = _backward(above, *ctx.saved_tensors)
    return gradient, sums.sum(0).to(ctx.dtype)


_gelu.register_autograd(_gradients, setup_context=_setup)
