"""Bias columns as Triton kernels: each program copies a few rows of one block of columns, 16 bytes per thread.

torch copies a non-contiguous matrix element by element; these kernels use full vectors.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, BLOCK, WARPS = 8, 256, 4


@no_type_check
@triton.jit
def _append(
    rows,
    bias,
    result,
    count,
    WIDTH: tl.constexpr,
    EXTRA: tl.constexpr,
    PADDED_EXTRA: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a tile of `rows`; the programs of the first block of columns also write the columns of the bias."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < count) & (column < WIDTH)
    value = tl.load(rows + row * WIDTH + column, mask=inside)
    tl.store(result + row * (WIDTH + EXTRA) + column, value.to(result.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        which = tl.arange(0, PADDED_EXTRA)[None, :]
        if bias is None:
            more = tl.where(which < 2, 1.0, 0.0) + tl.zeros([ROWS, PADDED_EXTRA], tl.float32)
        else:
            exact = tl.load(bias + row, mask=row < count, other=0.0).to(tl.float32)
            rounded = exact.to(result.dtype.element_ty).to(tl.float32)
            more = tl.where(which == 0, rounded, tl.where(which == 1, exact - rounded, 0.0))
        at = result + row * (WIDTH + EXTRA) + WIDTH + which
        tl.store(at, more.to(result.dtype.element_ty), mask=(row < count) & (which < EXTRA))


@no_type_check
@triton.jit
def _drop(columns, factor, result, count, WIDTH: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a tile of `columns`, times the factor."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < count) & (column < WIDTH)
    value = tl.load(columns + row * STRIDE + column, mask=inside) * tl.load(factor).to(columns.dtype.element_ty)
    tl.store(result + row * WIDTH + column, value, mask=inside)


def append_bias_columns(rows: Tensor, bias: Tensor | None, extra: int, dtype: torch.dtype) -> Tensor:
    """Run `naive.append_bias_columns` as a kernel.

    Args:
        rows: The operand `[N, D]`.
        bias: Bias of each row `[N]`, or None for columns of ones.
        extra: Number of new columns, at least 2.
        dtype: Dtype of the result.

    Returns:
        `[N, D + extra]` in `dtype`.
    """
    count, width = rows.shape
    result = rows.new_empty(count, width + extra, dtype=dtype)
    sizes = {"WIDTH": width, "EXTRA": extra, "PADDED_EXTRA": triton.next_power_of_2(extra), "ROWS": ROWS, "BLOCK": BLOCK}
    if count:
        _append[_grid(count, width)](
            rows.contiguous(), bias if bias is None else bias.contiguous(), result, count, **sizes, num_warps=WARPS
        )
    return result


def drop_bias_columns(columns: Tensor, factor: Tensor) -> Tensor:
    """Run `naive.drop_bias_columns` as a kernel.

    Args:
        columns: Some columns of a wider matrix, `[N, D]`.
        factor: A number, the upstream gradient.

    Returns:
        columns times factor, contiguous.
    """
    columns = columns if columns.stride(1) == 1 else columns.contiguous()
    count, width = columns.shape
    result = columns.new_empty(count, width)
    if count:
        # the stride is a constant of the kernel: then the compiler knows that vectors are aligned
        sizes = {"WIDTH": width, "STRIDE": columns.stride(0), "ROWS": ROWS, "BLOCK": BLOCK}
        _drop[_grid(count, width)](columns, factor, result, count, **sizes, num_warps=WARPS)
    return result


def _grid(count: int, width: int) -> tuple[int, int]:
    """Programs over rows and over blocks of columns."""
    return triton.cdiv(count, ROWS), triton.cdiv(width, BLOCK)
