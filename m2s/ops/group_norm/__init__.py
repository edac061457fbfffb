"""Shift, group norm and SiLU between two convolutions of a U-Net, in one pass over features in the layout channels-last.

With h = (x + shift - mean) r the normalized features of a group, z = h weight + bias, s = sigmoid(z), y = z s,
dz = dy s (1 + z (1 - s)), g = dz weight and means over the positions and channels of the group, the gradients are

    dx = r (g - mean(g) - h mean(g h)),    dshift = sum dx,    dweight = sum dz h,    dbias = sum dz.

A program holds all positions of some groups of one image in registers: x is read once and y written once, and in the backward
pass x and dy are read once and dx is written once. Sums over positions leave the program; torch adds those of all images.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.ops import backend
from m2s.ops.derivatives import first_derivative_only
from m2s.ops.group_norm import naive
from m2s.ops.group_norm.tiles import fits

__all__ = ["group_norm_silu", "is_fused"]


def is_fused(x: Tensor, groups: int) -> bool:
    """Return whether the Triton kernels run on these features.

    Args:
        x: Features [B, C, H, W].
        groups: Groups of channels.

    Returns:
        True where kernels run, for features in float32 or bf16 of which a program can hold a group.
    """
    return x.dtype in (torch.float32, torch.bfloat16) and fits(x, groups) and backend.uses_triton(x)


def group_norm_silu(
    x: Float[Tensor, "B C H W"],
    shift: Float[Tensor, "B C"] | None,
    weight: Float[Tensor, "C"],
    bias: Float[Tensor, "C"],
    groups: int,
    eps: float,
    fused: bool,
) -> Float[Tensor, "B C H W"]:
    """Compute silu(norm(x + shift)).

    Args:
        x: Features. Kernels convert another layout to channels-last.
        shift: A number for each channel of each image, added to all its positions; None: no shift.
        weight: Weight of the norm.
        bias: Bias of the norm.
        groups: The number of groups of channels, which are normalized separately.
        eps: Number added to the variance.
        fused: Whether the Triton kernels run.

    Returns:
        The result. With kernels it is channels-last, in the dtype of autocast; without autocast in the dtype of the weight.
    """
    if not fused:
        return naive.group_norm_silu(x, shift, weight, bias, groups, eps)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    y, _, _ = _group_norm_silu(x, shift, weight, bias, groups, eps, dtype)
    return y


@torch.library.custom_op("m2s::group_norm_silu", mutates_args=())
def _group_norm_silu(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and mean and r of every group, [B, groups]."""
    from m2s.ops.group_norm import triton

    return triton.forward(x, shift, weight, bias, groups, eps, dtype)


@_group_norm_silu.register_fake
def _(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(len(x), groups, dtype=torch.float32)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.channels_last), mean, torch.empty_like(mean)


@torch.library.custom_op("m2s::group_norm_silu_backward", mutates_args=())
def _backward(
    dy: Tensor, x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, r: Tensor
) -> tuple[Tensor, Tensor]:
    """dx, and [sums, B, C]: the sums over positions of dz h, of dz, and with a shift of dx."""
    from m2s.ops.group_norm import triton

    return triton.backward(dy, x, shift, weight, bias, mean, r)


@_backward.register_fake
def _(
    dy: Tensor, x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, r: Tensor
) -> tuple[Tensor, Tensor]:
    sums = x.new_empty(2 if shift is None else 3, *x.shape[:2], dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.channels_last), sums


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, shift, weight, bias, _, _, _ = inputs
    ctx.save_for_backward(x, shift, weight, bias, *output[1:])


def _gradients(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    first_derivative_only("the kernel of group norm and SiLU")
    x, shift, weight, bias, mean, r = ctx.saved_tensors
    dx, sums = _backward(dy, x, shift, weight, bias, mean, r)
    dweight, dbias = sums[:2].sum(1).to(weight.dtype)
    return dx, None if shift is None else sums[2].to(shift.dtype), dweight, dbias, None, None, None


_group_norm_silu.register_autograd(_gradients, setup_context=_setup)
