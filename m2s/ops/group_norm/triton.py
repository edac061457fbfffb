"""Shift, group norm and SiLU as Triton kernels: each program works on all positions of some groups of one image.

A tile has positions as rows and channels as columns, the layout of channels-last in memory. The columns of a group are rounded
up to a power of two.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.group_norm.tiles import BACKWARD, FORWARD, tile_of, warps_of


@no_type_check
@triton.jit
def _columns(groups, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Image, group and channel of each column of this program, and whether the column exists.

    Args:
        groups: Groups of an image.
        CHANNELS: Channels of a group.
        GROUPS: Groups of a program.
        WIDTH: Columns of a group.
    """
    programs = tl.cdiv(groups, GROUPS)  # per image
    column = tl.arange(0, GROUPS * WIDTH)
    group = tl.program_id(0) % programs * GROUPS + column // WIDTH
    here = (group < groups) & (column % WIDTH < CHANNELS)
    return (tl.program_id(0) // programs).to(tl.int64), group, group * CHANNELS + column % WIDTH, here


@no_type_check
@triton.jit
def _sum_by_group(tile, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """The sum over all rows and over the columns of a group, for each column."""
    sums = tl.sum(tl.reshape(tl.sum(tile, 0), [GROUPS, WIDTH]), 1)
    return tl.reshape(tl.broadcast_to(sums[:, None], [GROUPS, WIDTH]), [GROUPS * WIDTH])


@no_type_check
@triton.jit
def _forward(
    x,
    shift,
    weight,
    bias,
    y,
    means,
    rs,
    rows,
    groups,
    shift_stride,
    eps,
    SHIFT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Forward pass over some groups of one image."""
    image, group, channel, here = _columns(groups, CHANNELS, GROUPS, WIDTH)
    row = tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & here[None, :]
    first = image * rows * (groups * CHANNELS)  # in 64 bits; inside an image 32 bits take half of the registers
    at = row[:, None] * (groups * CHANNELS) + channel[None, :]
    value = tl.load(x + first + at, mask=inside, other=0.0).to(tl.float32)
    if SHIFT:
        value += tl.load(shift + image * shift_stride + channel, mask=here, other=0.0).to(tl.float32)[None, :]
        value = tl.where(inside, value, 0.0)
    count = rows * CHANNELS
    mean = _sum_by_group(value, GROUPS, WIDTH) / count
    # the mean is subtracted before squaring: E[x^2] - E[x]^2 would cancel
    centered = tl.where(inside, value - mean[None, :], 0.0)
    r = tl.rsqrt(_sum_by_group(centered * centered, GROUPS, WIDTH) / count + eps)
    factor = tl.load(weight + channel, mask=here, other=0.0).to(tl.float32)
    z = centered * r[None, :] * factor[None, :] + tl.load(bias + channel, mask=here, other=0.0).to(tl.float32)[None, :]
    tl.store(y + first + at, (z * tl.sigmoid(z)).to(y.dtype.element_ty), mask=inside)
    leads = here & (tl.arange(0, GROUPS * WIDTH) % WIDTH == 0)
    tl.store(means + image * groups + group, mean, mask=leads)
    tl.store(rs + image * groups + group, r, mask=leads)


@no_type_check
@triton.jit
def _backward(
    dy,
    x,
    shift,
    weight,
    bias,
    means,
    rs,
    dx,
    dweight,
    dbias,
    dshift,
    rows,
    groups,
    shift_stride,
    SHIFT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Backward pass over some groups of one image; the formulas are in the package `m2s.ops.group_norm`."""
    image, group, channel, here = _columns(groups, CHANNELS, GROUPS, WIDTH)
    row = tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & here[None, :]
    first = image * rows * (groups * CHANNELS)  # in 64 bits; inside an image 32 bits take half of the registers
    at = row[:, None] * (groups * CHANNELS) + channel[None, :]
    value = tl.load(x + first + at, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(dy + first + at, mask=inside, other=0.0).to(tl.float32)
    center = tl.load(means + image * groups + group, mask=here, other=0.0)
    r = tl.load(rs + image * groups + group, mask=here, other=0.0)
    factor = tl.load(weight + channel, mask=here, other=0.0).to(tl.float32)
    added = tl.load(bias + channel, mask=here, other=0.0).to(tl.float32)
    if SHIFT:
        # first, as in the forward pass: where a group is constant, h must be 0 and not a rounding error times r
        value += tl.load(shift + image * shift_stride + channel, mask=here, other=0.0).to(tl.float32)[None, :]
    h = tl.where(inside, (value - center[None, :]) * r[None, :], 0.0)
    z = h * factor[None, :] + added[None, :]
    s = tl.sigmoid(z)
    dz = upstream * s * (1 + z * (1 - s))
    g = dz * factor[None, :]
    count = rows * CHANNELS
    mean_g = _sum_by_group(g, GROUPS, WIDTH) / count
    mean_gh = _sum_by_group(g * h, GROUPS, WIDTH) / count
    result = tl.where(inside, (g - mean_g[None, :] - h * mean_gh[None, :]) * r[None, :], 0.0)
    tl.store(dx + first + at, result.to(dx.dtype.element_ty), mask=inside)
    # One row of sums per image in place of atomic additions: the result does not depend on the order of the programs.
    at_sums = image * groups * CHANNELS + channel
    tl.store(dweight + at_sums, tl.sum(dz * h, 0), mask=here)
    tl.store(dbias + at_sums, tl.sum(dz, 0), mask=here)
    if SHIFT:
        tl.store(dshift + at_sums, tl.sum(result, 0), mask=here)


def _rows_of_shift(shift: Tensor | None, placeholder: Tensor) -> tuple[Tensor, int]:
    """A shift [B, C] and its stride between images; a placeholder where it is None."""
    if shift is None:
        return placeholder, 0
    shift = shift if shift.stride(-1) == 1 else shift.contiguous()
    return shift, shift.stride(0)


def forward(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernel.

    Args:
        x: Features `[B, C, H, W]`.
        shift: Shift of the channels `[B, C]`, or None.
        weight: Weight of the norm `[C]`.
        bias: Bias of the norm `[C]`.
        groups: The number of groups.
        eps: Number added to the variance.
        dtype: Dtype of the result.

    Returns:
        The result, channels-last, and mean and reciprocal standard deviation r of every group `[B, groups]`.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    images, channels, height, width = x.shape
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.channels_last)
    mean = x.new_empty((images, groups), dtype=torch.float32)
    r = torch.empty_like(mean)
    tile = tile_of(x, groups, FORWARD)
    shifts, stride = _rows_of_shift(shift, x)
    _forward[(images * triton.cdiv(groups, tile.groups),)](
        x,
        shifts,
        weight.contiguous(),
        bias.contiguous(),
        y,
        mean,
        r,
        height * width,
        groups,
        stride,
        eps,
        SHIFT=shift is not None,
        CHANNELS=channels // groups,
        GROUPS=tile.groups,
        WIDTH=tile.width,
        ROWS=tile.rows,
        num_warps=warps_of(tile.groups * tile.width * tile.rows),
    )
    return y, mean, r


def backward(
    dy: Tensor, x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, r: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the backward kernel.

    Args:
        dy: Gradient of the result `[B, C, H, W]`.
        x: Features `[B, C, H, W]`.
        shift: Shift of the channels `[B, C]`, or None.
        weight: Weight of the norm `[C]`.
        bias: Bias of the norm `[C]`.
        mean: Mean of every group `[B, groups]`.
        r: Reciprocal standard deviation of every group `[B, groups]`.

    Returns:
        dx, channels-last, and the sums over positions of dz h, of dz, and with a shift of dx: `[2 or 3, B, C]`.
    """
    x, dy = (value.contiguous(memory_format=torch.channels_last) for value in (x, dy))
    (images, channels, height, width), groups = x.shape, mean.shape[1]
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    sums = x.new_empty((2 if shift is None else 3, images, channels), dtype=torch.float32)
    tile = tile_of(x, groups, BACKWARD)
    shifts, stride = _rows_of_shift(shift, x)
    _backward[(images * triton.cdiv(groups, tile.groups),)](
        dy,
        x,
        shifts,
        weight.contiguous(),
        bias.contiguous(),
        mean,
        r,
        dx,
        sums[0],
        sums[1],
        sums[-1],
        height * width,
        groups,
        stride,
        SHIFT=shift is not None,
        CHANNELS=channels // groups,
        GROUPS=tile.groups,
        WIDTH=tile.width,
        ROWS=tile.rows,
        num_warps=warps_of(tile.groups * tile.width * tile.rows),
        enable_fp_fusion=False,  # g - mean(g) must be 0 in a group of one element: a fused multiply-add would not round g
    )
    return dx, sums
