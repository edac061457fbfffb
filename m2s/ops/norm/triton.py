"""Residual, norm and modulation as Triton kernels: each program works on some rows of one example.

Threads are assigned to columns, so a thread sees the same columns in every row. What belongs to a column (weight, scale, shift,
gate) is loaded once per program, and sums over rows stay in registers.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.norm.sums import ROWS, number_of_sums


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
    """Forward pass over ROWS rows of one example."""
    programs = tl.cdiv(length, ROWS)  # per example
    example = (tl.program_id(0) // programs).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        gates_here = tl.load(gate + example * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    if MODULATED:
        factor *= 1 + tl.load(scale + example * scale_stride + column, mask=inside, other=0.0).to(tl.float32)
        shift_here = tl.load(shift + example * shift_stride + column, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(0) % programs * ROWS
    for position in tl.range(first, tl.minimum(first + ROWS, length), num_stages=STAGES):
        row = example * length + position
        at = row * WIDTH + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if BRANCH:
            added = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
            if GATE:
                added *= gates_here
            value += added
            tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)
        # the mean is subtracted before squaring: E[x^2] - E[x]^2 would cancel
        mean = tl.sum(value, 0) / WIDTH
        centered = tl.where(inside, value - mean, 0.0)
        r = tl.rsqrt(tl.sum(centered * centered, 0) / WIDTH + eps)
        result = centered * r * factor
        if MODULATED:
            result += shift_here
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
    HAS_DTOTAL: tl.constexpr,
    BRANCH: tl.constexpr,
    GATE: tl.constexpr,
    MODULATED: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Backward pass over ROWS rows of one example; the formulas are in the module `m2s.ops.norm`."""
    programs = tl.cdiv(length, ROWS)  # per example
    example = (tl.program_id(0) // programs).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if MODULATED:
        factor *= 1 + tl.load(scale + example * scale_stride + column, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        gates_here = tl.load(gate + example * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    sum_dy_h = tl.zeros([BLOCK], tl.float32)
    sum_dy = tl.zeros([BLOCK], tl.float32)
    sum_dx_branch = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0) % programs * ROWS
    for position in tl.range(first, tl.minimum(first + ROWS, length), num_stages=STAGES):
        row = example * length + position
        at = row * WIDTH + column
        dy_row = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_DTOTAL:
            dtotal_row = tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            added = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        mean, r = tl.load(means + row), tl.load(rs + row)
        h = tl.where(inside, (value - mean) * r, 0.0)
        g = dy_row * factor
        mean_g = tl.sum(g, 0) / WIDTH
        mean_gh = tl.sum(g * h, 0) / WIDTH
        result = (g - mean_g - h * mean_gh) * r
        if HAS_DTOTAL:
            result += dtotal_row
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)
        sum_dy_h += dy_row * h
        if MODULATED:
            sum_dy += dy_row
        if GATE:
            sum_dx_branch += result * added
            result *= gates_here
        if BRANCH:
            tl.store(dbranch + at, result.to(dbranch.dtype.element_ty), mask=inside)
    # One row of sums per program in place of atomic additions: the result does not depend on the order of the programs.
    sums += tl.program_id(0).to(tl.int64) * WIDTH + column
    step = tl.num_programs(0).to(tl.int64) * WIDTH
    tl.store(sums, sum_dy_h, mask=inside)
    if MODULATED:
        sums += step
        tl.store(sums, sum_dy, mask=inside)
    if GATE:
        sums += step
        tl.store(sums, sum_dx_branch, mask=inside)


def _columns(width: int) -> tuple[int, int]:
    """Columns per block, and warps: 16 bytes of float32 per thread."""
    block = triton.next_power_of_2(width)
    return block, min(8, max(1, block // 128))


def _with_stride(value: Tensor | None, placeholder: Tensor) -> tuple[Tensor, int]:
    """A tensor [B, 1, D] and its stride between examples; a placeholder where it is None."""
    if value is None:
        return placeholder, 0
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
    """Run the forward kernel.

    Args:
        x: Residual stream `[B, L, D]`.
        branch: Output of the previous branch `[B, L, D]`, or None.
        gate: Factor of the branch `[B, 1, D]`, or None.
        weight: Weight of the norm `[D]`.
        shift: Shift of the modulation `[B, 1, D]`, or None.
        scale: Scale of the modulation `[B, 1, D]`, or None.
        eps: Number added to the variance.
        dtype: Dtype of the modulated norm.
        rows: Rows per program.
        stages: Stages of the software pipeline over rows.

    Returns:
        The sum (empty without a branch), the modulated norm, and mean and reciprocal standard deviation r of every row.
    """
    x = x.contiguous()
    batch, length, width = x.shape
    total = x.new_empty(0 if branch is None else x.shape)
    y = x.new_empty(x.shape, dtype=dtype)
    mean = x.new_empty((batch, length), dtype=torch.float32)
    r = torch.empty_like(mean)
    block, warps = _columns(width)
    gates, gate_stride = _with_stride(gate, x)
    shifts, shift_stride = _with_stride(shift, x)
    scales, scale_stride = _with_stride(scale, x)
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
    """Run the backward kernel.

    Args:
        dy: Gradient of the modulated norm `[B, L, D]`.
        dtotal: Gradient of the sum `[B, L, D]`, or None.
        total: The sum `[B, L, D]`.
        branch: Output of the previous branch, or None.
        gate: Factor of the branch, or None.
        weight: Weight of the norm.
        scale: Scale of the modulation, or None.
        mean: Mean of every row.
        r: Reciprocal standard deviation of every row.
        rows: Rows per program.
        stages: Stages of the software pipeline over rows.

    Returns:
        dx, dbranch (empty without a branch), and the sums over the rows of every program.
    """
    total = total.contiguous()
    batch, length, width = total.shape
    dx = torch.empty_like(total)
    dbranch = total.new_empty(0) if branch is None else branch.new_empty(branch.shape)
    count = triton.cdiv(length, rows)
    sums = total.new_empty((number_of_sums(gate, scale), batch, count, width), dtype=torch.float32)
    block, warps = _columns(width)
    gates, gate_stride = _with_stride(gate, total)
    scales, scale_stride = _with_stride(scale, total)
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
        HAS_DTOTAL=dtotal is not None,
        BRANCH=branch is not None,
        GATE=gate is not None,
        MODULATED=scale is not None,
        ROWS=rows,
        STAGES=stages,
        BLOCK=block,
        num_warps=warps,
        enable_fp_fusion=False,  # g - mean(g) must be 0 where g is constant: a fused multiply-add would not round dy * factor
    )
    return dx, dbranch, sums
