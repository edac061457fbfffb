"""Rows of the residual stream, some of one sample to a program; threads share out the columns.

So a thread meets the same columns in every row: what belongs to a column is loaded once, and sums over rows stay in registers.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.norm import ROWS, sums_of


@no_type_check
@triton.jit
def _forward(
    x,
    branch,
    gate,
    weight,
    shift,
    scale,
    total,
    y,
    means,
    rs,
    length,
    gate_stride,
    shift_stride,
    scale_stride,
    eps,
    WIDTH: tl.constexpr,
    BRANCH: tl.constexpr,
    GATE: tl.constexpr,
    MODULATED: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    programs = tl.cdiv(length, ROWS)  # of a sample
    sample = (tl.program_id(0) // programs).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        by = tl.load(gate + sample * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    if MODULATED:
        factor *= 1 + tl.load(scale + sample * scale_stride + column, mask=inside, other=0.0).to(tl.float32)
        plus = tl.load(shift + sample * shift_stride + column, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(0) % programs * ROWS
    for site in tl.range(first, tl.minimum(first + ROWS, length), num_stages=STAGES):
        row = sample * length + site
        at = row * WIDTH + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if BRANCH:
            added = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
            if GATE:
                added *= by
            value += added
            tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)
        mean = tl.sum(value, 0) / WIDTH
        centred = tl.where(inside, value - mean, 0.0)
        r = tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
        result = centred * r * factor
        if MODULATED:
            result += plus
        tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)
        tl.store(means + row, mean)
        tl.store(rs + row, r)


@no_type_check
@triton.jit
def _backward(
    dy,
    dtotal,
    total,
    branch,
    gate,
    weight,
    scale,
    means,
    rs,
    dx,
    dbranch,
    sums,
    length,
    gate_stride,
    scale_stride,
    WIDTH: tl.constexpr,
    LATER: tl.constexpr,
    BRANCH: tl.constexpr,
    GATE: tl.constexpr,
    MODULATED: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    programs = tl.cdiv(length, ROWS)  # of a sample
    sample = (tl.program_id(0) // programs).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if MODULATED:
        factor *= 1 + tl.load(scale + sample * scale_stride + column, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        by = tl.load(gate + sample * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    along_h = tl.zeros([BLOCK], tl.float32)
    along_one = tl.zeros([BLOCK], tl.float32)
    along_branch = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0) % programs * ROWS
    for site in tl.range(first, tl.minimum(first + ROWS, length), num_stages=STAGES):
        row = sample * length + site
        at = row * WIDTH + column
        above = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        if LATER:
            later = tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            added = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        mean, r = tl.load(means + row), tl.load(rs + row)
        h = tl.where(inside, (value - mean) * r, 0.0)
        g = above * factor
        level = tl.sum(g, 0) / WIDTH
        slope = tl.sum(g * h, 0) / WIDTH
        result = (g - level - h * slope) * r
        if LATER:
            result += later
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)
        along_h += above * h
        if MODULATED:
            along_one += above
        if GATE:
            along_branch += result * added
            result *= by
        if BRANCH:
            tl.store(dbranch + at, result.to(dbranch.dtype.element_ty), mask=inside)
    sums += tl.program_id(0).to(tl.int64) * WIDTH + column
    step = tl.num_programs(0).to(tl.int64) * WIDTH
    tl.store(sums, along_h, mask=inside)
    if MODULATED:
        sums += step
        tl.store(sums, along_one, mask=inside)
    if GATE:
        sums += step
        tl.store(sums, along_branch, mask=inside)


def _columns(width: int) -> tuple[int, int]:
    """The block of columns, and its warps: sixteen bytes of float32 to a thread."""
    block = triton.next_power_of_2(width)
    return block, min(8, max(1, block // 128))


def _of_sample(value: Tensor | None, stand_in: Tensor) -> tuple[Tensor, int]:
    """A tensor [B, 1, D], and the way from one sample to the next."""
    if value is None:
        return stand_in, 0
    value = value if value.stride(-1) == 1 else value.contiguous()
    return value, value.stride(0)


def forward(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    shift: Tensor | None,
    scale: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    rows: int = ROWS,
    stages: int = 3,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum (empty without a branch), the modulated norm in `dtype`, and mean and r of every row."""
    x = x.contiguous()
    batch, length, width = x.shape
    total = x.new_empty(0 if branch is None else x.shape)
    y = x.new_empty(x.shape, dtype=dtype)
    mean = x.new_empty((batch, length), dtype=torch.float32)
    r = torch.empty_like(mean)
    block, warps = _columns(width)
    gates, gate_stride = _of_sample(gate, x)
    shifts, shift_stride = _of_sample(shift, x)
    scales, scale_stride = _of_sample(scale, x)
    _forward[(batch * triton.cdiv(length, rows),)](
        x,
        x if branch is None else branch.contiguous(),
        gates,
        weight.contiguous(),
        shifts,
        scales,
        total,
        y,
        mean,
        r,
        length,
        gate_stride,
        shift_stride,
        scale_stride,
        eps,
        WIDTH=width,
        BRANCH=branch is not None,
        GATE=gate is not None,
        MODULATED=scale is not None,
        ROWS=rows,
        STAGES=stages,
        BLOCK=block,
        num_warps=warps,
    )
    return total, y, mean, r


def backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    mean: Tensor,
    r: Tensor,
    rows: int = ROWS,
    stages: int = 3,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dbranch (empty without a branch), and the sums over the rows of every program."""
    total = total.contiguous()
    batch, length, width = total.shape
    dx = torch.empty_like(total)
    dbranch = total.new_empty(0) if branch is None else branch.new_empty(branch.shape)
    count = triton.cdiv(length, rows)
    sums = total.new_empty((sums_of(gate, scale), batch, count, width), dtype=torch.float32)
    block, warps = _columns(width)
    gates, gate_stride = _of_sample(gate, total)
    scales, scale_stride = _of_sample(scale, total)
    _backward[(batch * count,)](
        dy.contiguous(),
        total if dtotal is None else dtotal.contiguous(),
        total,
        total if branch is None else branch.contiguous(),
        gates,
        weight.contiguous(),
        scales,
        mean,
        r,
        dx,
        dbranch,
        sums,
        length,
        gate_stride,
        scale_stride,
        WIDTH=width,
        LATER=dtotal is not None,
        BRANCH=branch is not None,
        GATE=gate is not None,
        MODULATED=scale is not None,
        ROWS=rows,
        STAGES=stages,
        BLOCK=block,
        num_warps=warps,
    )
    return dx, dbranch, sums
