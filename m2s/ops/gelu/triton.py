"""gelu(h) = h s with s = sigmoid(2 sqrt(2/pi) (h + 0.044715 h^3)), which is its tanh form written with one exponential."""

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.gelu import ROWS

LINEAR = tl.constexpr(2 * math.sqrt(2 / math.pi))
CUBIC = tl.constexpr(0.044715 * 2 * math.sqrt(2 / math.pi))
LOG2E = tl.constexpr(1 / math.log(2))


@no_type_check
@triton.jit
def _share(h, square):
    """s."""
    return 1 / (1 + tl.exp2(h * (square * (-CUBIC * LOG2E) - LINEAR * LOG2E)))


@no_type_check
@triton.jit
def _forward(h, result, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(h + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(result + at, (value * _share(value, value * value)).to(result.dtype.element_ty), mask=at < count)


@no_type_check
@triton.jit
def _backward(
    above, h, gradient, sums, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr
):
    programs = tl.cdiv(WIDTH, BLOCK)  # side by side
    column = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    band = (tl.program_id(0) // programs).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for turn in tl.range(0, tl.minimum(ROWS, rows - band * ROWS).to(tl.int32), num_stages=STAGES):
        at = (band * ROWS + turn) * WIDTH + column
        value = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(above + at, mask=inside, other=0.0).to(tl.float32)
        square = value * value
        share = _share(value, square)
        slope = share + share * (1 - share) * value * (square * (3 * CUBIC) + LINEAR)
        entry = upstream * slope
        total += entry
        tl.store(gradient + at, entry.to(gradient.dtype.element_ty), mask=inside)
    tl.store(sums + band * WIDTH + column, total, mask=inside)


def forward(h: Tensor, block: int = 2048, warps: int = 8) -> Tensor:
    h = h.contiguous()
    result = torch.empty_like(h)
    _forward[(triton.cdiv(h.numel(), block),)](h, result, h.numel(), BLOCK=block, num_warps=warps)
    return result


def backward(
    above: Tensor, h: Tensor, rows: int = ROWS, stages: int = 3, block: int = 1024, warps: int = 4
) -> tuple[Tensor, Tensor]:
    """The gradient of h, and its sums over the rows of every program, [programs, W]."""
    h = h.contiguous()
    width = h.shape[-1]
    count = h.numel() // width
    bands, block = triton.cdiv(count, rows), min(block, triton.next_power_of_2(width))
    gradient = torch.empty_like(h)
    sums = h.new_empty((bands, width), dtype=torch.float32)
    _backward[(bands * triton.cdiv(width, block),)](
        above.contiguous(), h, gradient, sums, count, WIDTH=width, ROWS=rows, STAGES=stages, BLOCK=block, num_warps=warps
    )
    return gradient, sums
