"""GELU as Triton kernels: gelu(h) = h s with s = sigmoid(2 sqrt(2/pi) (h + 0.044715 h^3)).

This is the tanh form written with a single exponential.
"""

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
def _sigmoid(h, square):
    """The factor s of gelu(h) = h s, from h and h^2."""
    return 1 / (1 + tl.exp2(h * (square * (-CUBIC * LOG2E) - LINEAR * LOG2E)))


@no_type_check
@triton.jit
def _forward(h, result, count, BLOCK: tl.constexpr):
    """gelu of a block of elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(h + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(result + at, (value * _sigmoid(value, value * value)).to(result.dtype.element_ty), mask=at < count)


@no_type_check
@triton.jit
def _backward(
    upstream, h, gradient, sums, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradient of ROWS rows of a block of columns, and its sum over these rows."""
    programs = tl.cdiv(WIDTH, BLOCK)  # programs that share the same rows
    column = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    band = (tl.program_id(0) // programs).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(0, tl.minimum(ROWS, rows - band * ROWS).to(tl.int32), num_stages=STAGES):
        at = (band * ROWS + i) * WIDTH + column
        value = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(upstream + at, mask=inside, other=0.0).to(tl.float32)
        square = value * value
        s = _sigmoid(value, square)
        slope = s + s * (1 - s) * value * (square * (3 * CUBIC) + LINEAR)
        entry = dy * slope
        total += entry
        tl.store(gradient + at, entry.to(gradient.dtype.element_ty), mask=inside)
    # Sums of bands in place of atomic additions: the gradient of the bias does not depend on the order of the programs.
    tl.store(sums + band * WIDTH + column, total, mask=inside)


def forward(h: Tensor, block: int = 2048, warps: int = 8) -> Tensor:
    """Compute gelu(h).

    Args:
        h: Inputs.
        block: Elements per program.
        warps: Warps per program.

    Returns:
        The activations, in the dtype of h.
    """
    h = h.contiguous()
    result = torch.empty_like(h)
    _forward[(triton.cdiv(h.numel(), block),)](h, result, h.numel(), BLOCK=block, num_warps=warps)
    return result


def backward(
    upstream: Tensor, h: Tensor, rows: int = ROWS, stages: int = 3, block: int = 1024, warps: int = 4
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of h.

    Args:
        upstream: Gradient of the activations `[*rows, W]`.
        h: Inputs of the forward pass `[*rows, W]`.
        rows: Rows per program.
        stages: Stages of the software pipeline over rows.
        block: Columns per program.
        warps: Warps per program.

    Returns:
        The gradient of h, and its sums over the rows of every program, `[programs, W]` in float32.
    """
    h = h.contiguous()
    width = h.shape[-1]
    count = h.numel() // width
    bands, block = triton.cdiv(count, rows), min(block, triton.next_power_of_2(width))
    gradient = torch.empty_like(h)
    sums = h.new_empty((bands, width), dtype=torch.float32)
    _backward[(bands * triton.cdiv(width, block),)](
        upstream.contiguous(), h, gradient, sums, count, WIDTH=width, ROWS=rows, STAGES=stages, BLOCK=block, num_warps=warps
    )
    return gradient, sums
