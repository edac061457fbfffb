"""Some rows of one block of columns to a program, whole vectors at a time: torch copies what is not contiguous one by one."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, BLOCK, WARPS = 8, 256, 4


@no_type_check
@triton.jit
def _beside(
    rows,
    bias,
    result,
    count,
    WIDTH: tl.constexpr,
    EXTRA: tl.constexpr,
    MORE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < count) & (column < WIDTH)
    value = tl.load(rows + row * WIDTH + column, mask=inside)
    tl.store(result + row * (WIDTH + EXTRA) + column, value.to(result.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        which = tl.arange(0, MORE)[None, :]
        if bias is None:
            more = tl.where(which < 2, 1.0, 0.0) + tl.zeros([ROWS, MORE], tl.float32)
        else:
            whole = tl.load(bias + row, mask=row < count, other=0.0).to(tl.float32)
            rounded = whole.to(result.dtype.element_ty).to(tl.float32)
            more = tl.where(which == 0, rounded, tl.where(which == 1, whole - rounded, 0.0))
        at = result + row * (WIDTH + EXTRA) + WIDTH + which
        tl.store(at, more.to(result.dtype.element_ty), mask=(row < count) & (which < EXTRA))


@no_type_check
@triton.jit
def _alone(columns, factor, result, count, WIDTH: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < count) & (column < WIDTH)
    value = tl.load(columns + row * APART + column, mask=inside) * tl.load(factor).to(columns.dtype.element_ty)
    tl.store(result + row * WIDTH + column, value, mask=inside)


def append_bias_columns(rows: Tensor, bias: Tensor | None, extra: int, dtype: torch.dtype) -> Tensor:
    """`reference.beside`."""
    count, width = rows.shape
    result = rows.new_empty(count, width + extra, dtype=dtype)
    sizes = {"WIDTH": width, "EXTRA": extra, "MORE": triton.next_power_of_2(extra), "ROWS": ROWS, "BLOCK": BLOCK}
    if count:
        _beside[_grid(count, width)](
            rows.contiguous(), bias if bias is None else bias.contiguous(), result, count, **sizes, num_warps=WARPS
        )
    return result


def drop_bias_columns(columns: Tensor, factor: Tensor) -> Tensor:
    """`reference.alone`."""
    columns = columns if columns.stride(1) == 1 else columns.contiguous()
    count, width = columns.shape
    result = columns.new_empty(count, width)
    if count:
        sizes = {"WIDTH": width, "APART": columns.stride(0), "ROWS": ROWS, "BLOCK": BLOCK}  # known: vectors must be aligned
        _alone[_grid(count, width)](columns, factor, result, count, **sizes, num_warps=WARPS)
    return result


def _grid(count: int, width: int) -> tuple[int, int]:
    return triton.cdiv(count, ROWS), triton.cdiv(width, BLOCK)
