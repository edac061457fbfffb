"""Sites are sorted by their tokens, so that those of a row of the table lie side by side; some rows to a program.

Rows of a few sites are added up together, one site of each at a time. One of more sites is added up by itself, several sites
at a time; what it has of whole chunks of the sorted sites is added up before, by a program for each chunk, so that a token that
stands at half of all sites keeps no program for long.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


@no_type_check
@triton.jit
def _some(above, order, at, end, stride, column, inside):
    """The gradients above at these of the sorted sites; zero from `end` on."""
    site = tl.load(order + at, mask=at < end, other=0)
    there = (at < end)[:, None] & inside
    return tl.load(above + site[:, None] * stride + column[None, :], mask=there, other=0.0).to(tl.float32)


@no_type_check
@triton.jit
def _chunks(
    above,
    order,
    keys,
    sums,
    stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    LINES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of every chunk of sorted sites that is of one token; of the others nothing is written."""
    programs = tl.cdiv(WIDTH, BLOCK)  # side by side
    chunk = tl.program_id(0) // programs
    first = chunk * CHUNK
    if tl.load(keys + first) == tl.load(keys + first + CHUNK - 1):
        column = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)
        inside = column[None, :] < WIDTH
        total = tl.zeros([LINES, BLOCK], tl.float32)
        for at in tl.range(first, first + CHUNK, LINES, num_stages=STAGES):
            total += _some(above, order, at + tl.arange(0, LINES), first + CHUNK, stride, column, inside)
        tl.store(sums + chunk.to(tl.int64) * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)


@no_type_check
@triton.jit
def _long(
    above,
    order,
    keys,
    starts,
    sums,
    gradient,
    stride,
    shift,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    LINES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of more than SHORT sites: each holds a multiple of SHORT among the sorted sites; the first is its program's."""
    programs = tl.cdiv(WIDTH, BLOCK)
    mine = tl.program_id(0) // programs * SHORT
    row = tl.load(keys + mine).to(tl.int64) + shift
    low, high = tl.load(starts + row), tl.load(starts + row + 1)
    if (high - low > SHORT) & (mine - low < SHORT):
        column = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)
        inside = column[None, :] < WIDTH
        line = tl.arange(0, LINES)
        lowest, highest = tl.cdiv(low, CHUNK), high // CHUNK  # chunks that are all this row's
        head = tl.minimum(lowest * CHUNK, high)
        tail = tl.maximum(highest * CHUNK, head)
        total = tl.zeros([LINES, BLOCK], tl.float32)
        for at in tl.range(low, head, LINES, num_stages=STAGES):
            total += _some(above, order, at + line, head, stride, column, inside)
        for at in tl.range(lowest, highest, LINES, num_stages=STAGES):
            there = (at + line < highest)[:, None] & inside
            place = (at + line).to(tl.int64)[:, None] * WIDTH + column[None, :]
            total += tl.load(sums + place, mask=there, other=0.0)
        for at in tl.range(tail, high, LINES, num_stages=STAGES):
            total += _some(above, order, at + line, high, stride, column, inside)
        tl.store(gradient + row * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)


@no_type_check
@triton.jit
def _short(
    above,
    order,
    starts,
    gradient,
    stride,
    rows,
    WIDTH: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All other rows, those of no site too."""
    programs = tl.cdiv(WIDTH, BLOCK)
    row = tl.program_id(0) // programs * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)
    inside = column[None, :] < WIDTH
    begin = tl.load(starts + row, mask=row < rows, other=0)
    length = tl.load(starts + row + 1, mask=row < rows, other=SHORT + 1) - begin
    end = tl.where(length <= SHORT, begin + length, begin)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in range(0, tl.max(end - begin, 0)):
        total += _some(above, order, begin + turn, end, stride, column, inside)
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(gradient + place, total, mask=(length <= SHORT)[:, None] & inside)


def _sorted(tokens: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Sorted keys, one for each token; the sites in that order; where those of every row begin, and the last ones end; and how
    much less than its token a key is. A key has 16 bits if that is enough: a radix sort makes one pass for every 8."""
    shift, dtype = (2**15, torch.int16) if rows < 2**16 else (0, torch.int32)
    keys = torch.sub(tokens.flatten(), shift, out=torch.empty(tokens.numel(), dtype=dtype, device=tokens.device))
    keys, order = keys.sort(stable=True)
    bounds = torch.arange(-shift, rows + 1 - shift, dtype=dtype, device=tokens.device)
    return keys, order, torch.searchsorted(keys, bounds, out_int32=True), shift


def backward(
    above: Tensor,
    tokens: Tensor,
    rows: int,
    chunk: int = 64,
    short: int = 8,
    together: int = 8,
    lines: int = 16,
    stages: int = 3,
    block: int = 256,
    warps: int = 4,
    long_warps: int = 8,
) -> Tensor:
    """The gradient of the table, [rows, D] in float32, for gradients above [*sites, D]; `together` rows of up to `short` sites
    to a program, with `warps`, and one of more, with `long_warps`, by `lines` sites at a time."""
    width = above.shape[-1]
    above = above.reshape(-1, width)
    if above.stride(1) != 1:
        above = above.contiguous()
    keys, order, starts, shift = _sorted(tokens, rows)
    block = min(block, triton.next_power_of_2(width))
    programs, chunks, stride = triton.cdiv(width, block), len(keys) // chunk, above.stride(0)
    sums = torch.empty((chunks, width), dtype=torch.float32, device=above.device)
    gradient = torch.empty((rows, width), dtype=torch.float32, device=above.device)
    sizes = {"WIDTH": width, "BLOCK": block}
    some = {"CHUNK": chunk, "LINES": lines, "STAGES": stages, "num_warps": long_warps, **sizes}
    if chunks:
        _chunks[(chunks * programs,)](above, order, keys, sums, stride, **some)
    if len(keys) > short:
        _long[(triton.cdiv(len(keys), short) * programs,)](
            above, order, keys, starts, sums, gradient, stride, shift, SHORT=short, **some
        )
    _short[(triton.cdiv(rows, together) * programs,)](
        above, order, starts, gradient, stride, rows, SHORT=short, ROWS=together, num_warps=warps, **sizes
    )
    return gradient
