"""Residual, LayerNorm and modulation in one pass over the rows, and their gradients in one backward pass.

It connects two branches of a transformer block. With h = (x - mean) r the normalized row,
g = dy (1 + scale) weight and means over the row, the gradient of the sum is

    dx = dx_sum + r (g - mean(g) - h mean(g h)),   dbranch = gate dx,   dgate = sum dx branch,   dshift = sum dy,

and one sum over the positions of an example, U = sum dy h, gives both dscale = weight U and dweight = sum_b (1 + scale_b)
U_b. A kernel sums blocks of rows; torch adds the partial sums, which a compiler can fuse with other operations.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.ops import backend
from m2s.ops.derivatives import first_derivative_only
from m2s.ops.norm import naive
from m2s.ops.norm.sums import ROWS, number_of_sums

__all__ = ["add_norm", "is_fused"]


def is_fused(x: Tensor) -> bool:
    """Return whether a network with this residual stream uses the Triton kernels between its layers.

    They are for training only. Without gradients torch.compile generates kernels that are as good, and fuses them with their
    neighbors.

    Args:
        x: The residual stream.

    Returns:
        True for float32 with gradients enabled, where Triton kernels run.
    """
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
    """Compute x + gate branch, and norm(x + gate branch) (1 + scale) + shift.

    The kernels have no bias of the norm. In (h weight + bias) (1 + scale) + shift it belongs to the shift, which becomes
    bias (1 + scale) + shift, one row per example. Its gradient, and what it adds to that of the scale, are left to autograd.

    Args:
        x: Residual stream.
        branch: Output of the previous branch, or None.
        gate: Factor of the branch, or None for 1.
        weight: Weight of the norm.
        eps: Number added to the variance.
        shift: Shift of the modulation, or None.
        scale: Scale of the modulation, or None.
        fused: Whether the Triton kernels run.
        bias: Bias of the norm, or None.

    Returns:
        The new residual stream, and the modulated norm. With kernels the latter has the dtype of autocast.
    """
    if not fused:
        return naive.add_norm(x, branch, gate, weight, eps, shift, scale, bias)
    if bias is not None:
        shift, scale = _with_bias(len(x), bias, shift, scale)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    total, y, _, _ = _add_norm(x, branch, gate, weight, shift, scale, eps, dtype)
    return x if branch is None else total, y


def _with_bias(batch: int, bias: Tensor, shift: Tensor | None, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The shift that includes the bias, and its scale, both [B, 1, D] in the dtype of the bias."""
    if shift is None or scale is None:
        rows = bias.expand(batch, 1, -1)
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
    """dx, dbranch (empty without a branch), and [sums, B, programs per example, D]: U, dshift if modulated, dgate if gated."""
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
    sums = total.new_empty(number_of_sums(gate, scale), batch, -(-length // ROWS), width, dtype=torch.float32)
    return total.new_empty(total.shape), dbranch, sums


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, branch, gate, weight, _, scale, _, _ = inputs
    total, _, mean, r = output
    ctx.save_for_backward(x if branch is None else total, branch, gate, weight, scale, mean, r)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dtotal: Tensor | None, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    first_derivative_only("the kernel of residual and norm")
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
