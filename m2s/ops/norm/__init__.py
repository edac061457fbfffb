"""Residual, LayerNorm and modulation in one pass over the rows, and their gradients in one pass back.

With h = (x - mean) r the normed row, g = dy (1 + scale) weight and means over the row, the gradient of the sum is

    dx = dx_sum + r (g - mean(g) - h mean(g h)),   dbranch = gate dx,   dgate = sum dx branch,   dshift = sum dy,

and one sum over the sites of a sample, U = sum dy h, gives both dscale = weight U and dweight = sum_b (1 + scale_b) U_b. A
kernel adds up some rows of a sample at a time; the rest is added here, where a compiler sees it.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.ops import backend
from m2s.ops.norm import naive

__all__ = ["add_norm", "is_fused"]

ROWS = 16  # of a sample, for one program: more of them leave fewer sums to add up, and fewer programs to share the work


def sums_of(gate: Tensor | None, scale: Tensor | None) -> int:
    """How many sums over the rows the backward pass takes."""
    return 1 + (scale is not None) + (gate is not None)


def is_fused(x: Tensor) -> bool:
    """Whether a network with this residual stream takes the kernels: they are for training. Without gradients a compiler makes
    kernels as good out of the reference, and joins them with what comes before and after."""
    return x.dtype == torch.float32 and torch.is_grad_enabled() and backend.uses_triton(x)


def add_norm(
    x: Float[Tensor, "B L D"],
    branch: Float[Tensor, "B L D"] | None,
    gate: Float[Tensor, "B 1 D"] | None,
    weight: Float[Tensor, "D"],
    eps: float,
    shift: Float[Tensor, "B 1 D"] | None,
    scale: Float[Tensor, "B 1 D"] | None,
    fused: bool,
    bias: Float[Tensor, "D"] | None = None,
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
    """`reference.add_norm`; a fused one gives the second result in the dtype that autocast wants for a product.

    The kernels know no bias of the norm: (h weight + bias) (1 + scale) + shift has it in the shift, bias (1 + scale) + shift,
    of which there is one row a sample. Its gradient, and what it adds to that of the scale, are left to autograd.
    """
    if not fused:
        return naive.add_norm(x, branch, gate, weight, eps, shift, scale, bias)
    if bias is not None:
        shift, scale = _with_bias(len(x), bias, shift, scale)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    total, y, _, _ = _add_norm(x, branch, gate, weight, shift, scale, eps, dtype)
    return x if branch is None else total, y


def _with_bias(samples: int, bias: Tensor, shift: Tensor | None, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The shift that holds the bias too, and its scale, both [samples, 1, D] in the dtype of the bias."""
    if shift is None or scale is None:
        rows = bias.expand(samples, 1, -1)
        return rows, torch.zeros_like(bias).expand_as(rows)
    scale = scale.to(bias.dtype)
    return bias * (1 + scale) + shift, scale


@torch.library.custom_op("m2s::add_norm", mutates_args=())
def _add_norm(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    shift: Tensor | None,
    scale: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum (empty without a branch), the modulated norm, and mean and r of every row."""
    from m2s.ops.norm import triton

    return triton.forward(x, branch, gate, weight, shift, scale, eps, dtype)


@_add_norm.register_fake
def _(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    shift: Tensor | None,
    scale: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x.new_empty(0 if branch is None else x.shape)
    mean = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return total, x.new_empty(x.shape, dtype=dtype), mean, torch.empty_like(mean)


@torch.library.custom_op("m2s::add_norm_backward", mutates_args=())
def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    mean: Tensor,
    r: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dbranch (empty without a branch), and [sums, B, programs of a sample, D]: U, dshift if modulated, dgate if gated."""
    from m2s.ops.norm import triton

    return triton.backward(dy, dtotal, total, branch, gate, weight, scale, mean, r)


@_backward.register_fake
def _(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    mean: Tensor,
    r: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, width = total.shape
    dbranch = total.new_empty(0) if branch is None else branch.new_empty(branch.shape)
    sums = total.new_empty(sums_of(gate, scale), batch, -(-length // ROWS), width, dtype=torch.float32)
    return total.new_empty(total.shape), dbranch, sums


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, branch, gate, weight, _, scale, _, _ = inputs
    total, _, mean, r = output
    ctx.save_for_backward(x if branch is None else total, branch, gate, weight, scale, mean, r)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dtotal: Tensor | None, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    total, branch, gate, weight, scale, mean, r = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(total)
    dx, dbranch, sums = _backward(dy, None if branch is None else dtotal, total, branch, gate, weight, scale, mean, r)
    sums = sums.sum(2)
    u, dshift, dscale, dgate = sums[0], None, None, None
    dweight = u
    if scale is not None:
        dweight = u * (1 + scale.squeeze(1).float())
        dscale = (u * weight).unsqueeze(1).to(scale.dtype)
        dshift = sums[1].unsqueeze(1).to(scale.dtype)
    if gate is not None:
        dgate = sums[-1].unsqueeze(1).to(gate.dtype)
    return dx, None if branch is None else dbranch, dgate, dweight.sum(0).to(weight.dtype), dshift, dscale, None, None


_add_norm.register_autograd(_gradients, setup_context=_setup)
