"""Gradient of an embedding table as Triton kernels, without atomic additions.

Positions are sorted by their tokens, so that those of one row of the table are adjacent. Rows of the table with few positions
(`short`) are added up together, one position of each row at a time. A row with more positions is added up by itself, several
positions at a time. Chunks of the sorted positions that belong to a single token are summed beforehand, one program per
chunk, so that a token at half of all positions does not keep one program busy for long.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


@no_type_check
@triton.jit
def _load_upstream(upstream, order, at, end, stride, column, inside):
    """Upstream gradients at the entries `at` of the sorted positions; zero from `end` on."""
    position = tl.load(order + at, mask=at < end, other=0)
    there = (at < end)[:, None] & inside
    return tl.load(upstream + position[:, None] * stride + column[None, :], mask=there, other=0.0).to(tl.float32)


@no_type_check
@triton.jit
def _chunks(
    upstream,
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
    """The sum of a chunk of sorted positions, if all of it belongs to one token; otherwise nothing is written."""
    programs = tl.cdiv(WIDTH, BLOCK)  # programs for the columns of one chunk
    chunk = tl.program_id(0) // programs
    first = chunk * CHUNK
    if tl.load(keys + first) == tl.load(keys + first + CHUNK - 1):
        column = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)
        inside = column[None, :] < WIDTH
        total = tl.zeros([LINES, BLOCK], tl.float32)
        for at in tl.range(first, first + CHUNK, LINES, num_stages=STAGES):
            total += _load_upstream(upstream, order, at + tl.arange(0, LINES), first + CHUNK, stride, column, inside)
        tl.store(sums + chunk.to(tl.int64) * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)


@no_type_check
@triton.jit
def _long(
    upstream,
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
    """Rows of the table with more than SHORT positions.

    Program i looks at the sorted position i SHORT. Every such row contains one of these; the first one inside it does the work.
    """
    programs = tl.cdiv(WIDTH, BLOCK)
    entry = tl.program_id(0) // programs * SHORT
    row = tl.load(keys + entry).to(tl.int64) + shift
    low, high = tl.load(starts + row), tl.load(starts + row + 1)
    if (high - low > SHORT) & (entry - low < SHORT):
        column = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)
        inside = column[None, :] < WIDTH
        line = tl.arange(0, LINES)
        lowest, highest = tl.cdiv(low, CHUNK), high // CHUNK  # chunks that belong to this row entirely
        head = tl.minimum(lowest * CHUNK, high)
        tail = tl.maximum(highest * CHUNK, head)
        total = tl.zeros([LINES, BLOCK], tl.float32)
        for at in tl.range(low, head, LINES, num_stages=STAGES):
            total += _load_upstream(upstream, order, at + line, head, stride, column, inside)
        for at in tl.range(lowest, highest, LINES, num_stages=STAGES):
            there = (at + line < highest)[:, None] & inside
            place = (at + line).to(tl.int64)[:, None] * WIDTH + column[None, :]
            total += tl.load(sums + place, mask=there, other=0.0)
        for at in tl.range(tail, high, LINES, num_stages=STAGES):
            total += _load_upstream(upstream, order, at + line, high, stride, column, inside)
        tl.store(gradient + row * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)


@no_type_check
@triton.jit
def _short(
    upstream,
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
    """All other rows of the table, also those without positions."""
    programs = tl.cdiv(WIDTH, BLOCK)
    row = tl.program_id(0) // programs * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)
    inside = column[None, :] < WIDTH
    begin = tl.load(starts + row, mask=row < rows, other=0)
    length = tl.load(starts + row + 1, mask=row < rows, other=SHORT + 1) - begin
    end = tl.where(length <= SHORT, begin + length, begin)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in range(0, tl.max(end - begin, 0)):
        total += _load_upstream(upstream, order, begin + i, end, stride, column, inside)
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(gradient + place, total, mask=(length <= SHORT)[:, None] & inside)


def _sorted(tokens: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Sorted keys, the positions in that order, where those of every row begin (and the last ones end), and `shift`.

    A key is the token minus `shift`, in 16 bits where these suffice: a radix sort makes one pass per 8 bits.
    """
    shift, dtype = (2**15, torch.int16) if rows < 2**16 else (0, torch.int32)
    keys = torch.sub(tokens.flatten(), shift, out=torch.empty(tokens.numel(), dtype=dtype, device=tokens.device))
    keys, order = keys.sort(stable=True)
    bounds = torch.arange(-shift, rows + 1 - shift, dtype=dtype, device=tokens.device)
    return keys, order, torch.searchsorted(keys, bounds, out_int32=True), shift


def backward(
    upstream: Tensor,
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
    """Compute the gradient of the table.

    Args:
        upstream: Upstream gradients `[*sites, D]`.
        tokens: Tokens `[*sites]`.
        rows: Rows of the table.
        chunk: Positions per chunk.
        short: Most positions of a row that is added up together with others.
        together: Rows that are added up together.
        lines: Positions of a long row per iteration.
        stages: Stages of the software pipeline.
        block: Columns per program.
        warps: Warps per program of short rows.
        long_warps: Warps per program of long rows and chunks.

    Returns:
        The gradient `[rows, D]` in float32.
    """
    width = upstream.shape[-1]
    upstream = upstream.reshape(-1, width)
    if upstream.stride(1) != 1:
        upstream = upstream.contiguous()
    keys, order, starts, shift = _sorted(tokens, rows)
    block = min(block, triton.next_power_of_2(width))
    programs, chunks, stride = triton.cdiv(width, block), len(keys) // chunk, upstream.stride(0)
    sums = torch.empty((chunks, width), dtype=torch.float32, device=upstream.device)
    gradient = torch.empty((rows, width), dtype=torch.float32, device=upstream.device)
    sizes = {"WIDTH": width, "BLOCK": block}
    long_options = {"CHUNK": chunk, "LINES": lines, "STAGES": stages, "num_warps": long_warps, **sizes}
    if chunks:
        _chunks[(chunks * programs,)](upstream, order, keys, sums, stride, **long_options)
    if len(keys) > short:
        _long[(triton.cdiv(len(keys), short) * programs,)](
            upstream, order, keys, starts, sums, gradient, stride, shift, SHORT=short, **long_options
        )
    _short[(triton.cdiv(rows, together) * programs,)](
        upstream, order, starts, gradient, stride, rows, SHORT=short, ROWS=together, num_warps=warps, **sizes
    )
    return gradient
