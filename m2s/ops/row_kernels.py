"""Shared parts of the Triton kernels of the row losses: the launch, and the softmax weights of a row.

`linear_loss` calls a row loss on a chunk of logits; `launch` starts its kernel with one program per row. Each kernel begins
with `sum_of_weights`, the normalizing sum of the softmax in one pass. Weights are w = 2^(l log2(e) - top): with powers of two
a weight takes one multiply-add and one instruction. A row is read in tiles of several blocks of columns, and all loads of a
tile are issued before the first one is waited for, which hides the latency of the memory.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

# The logit of an excluded column: a finite number, so that differences are never NaN, and a power of two, because a fused
# multiply-add does not round the product: LOWEST * LOG2E - LOWEST * LOG2E must be exactly zero.
LOWEST = tl.constexpr(-(2.0**126))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TILE = tl.constexpr(8)  # blocks per tile


def prepare(x_t: Tensor, x_0: Tensor, row_scalars: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert the tokens and scalars of all rows to the layout of the kernels.

    Args:
        x_t: Current tokens `[N]`.
        x_0: Clean tokens `[N]`.
        row_scalars: `[C, N]`.

    Returns:
        Tokens in int32, and the scalars `[C, N]` with the C scalars of a row contiguous in memory: a program reads one cache
        line. A slice `[..., rows]` of all three belongs to a chunk.
    """
    return x_t.int(), x_0.int(), row_scalars.t().contiguous().t()


def launch(
    kernel: Any,
    block: int,
    warps: int,
    logits: Tensor,
    x_t: Tensor,
    x_0: Tensor,
    row_scalars: Tensor,
    has_mask: bool,
    vocab: int,
    weight: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Run the kernel of a row loss, one program per row.

    Args:
        kernel: The Triton kernel.
        block: Columns per block.
        warps: Warps per program.
        logits: Logits `[N, V]` in float32. Overwritten by the gradient if there is a weight.
        x_t: Current tokens `[N]`, as `prepare` returned them.
        x_0: Clean tokens `[N]`, of the same layout.
        row_scalars: `[C, N]`, of the same layout.
        has_mask: Whether the process has a mask, the state `vocab`.
        vocab: Number of clean tokens.
        weight: Weight of each row `[N]`, or None for the loss alone.
        dtype: Dtype of the gradient.

    Returns:
        The loss `[N]` in float64, and with a weight the gradient of weight times loss `[N, V]` in `dtype`. The gradient lies in
        the memory of the logits, in the first half of each row if it is bf16.
    """
    count, columns = logits.shape
    # The weight of a single example is often one number, expanded to all positions: the kernel reads one number per row.
    weight = None if weight is None else weight.double().contiguous()
    loss = torch.empty(count, dtype=torch.float64, device=logits.device)
    gradient = None if weight is None else logits.view(dtype)[:, :columns]
    kernel[(count,)](
        logits,
        loss if gradient is None else gradient,  # an unused pointer must still be a tensor
        loss,
        x_t.contiguous(),
        x_0.contiguous(),
        loss if weight is None else weight,
        row_scalars,
        row_scalars.stride(1),
        logits.stride(0),
        0 if gradient is None else gradient.stride(0),
        columns,
        vocab,
        MASK=has_mask,
        GRADIENT=gradient is not None,
        BLOCK=min(block, max(32, triton.next_power_of_2(columns) // 16)),
        num_warps=warps,
    )
    return loss, gradient


@no_type_check
@triton.jit
def tile(BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """Column indices of the first tile, [COUNT, BLOCK].

    Args:
        BLOCK: Columns per block.
        COUNT: Blocks per tile.
    """
    return tl.arange(0, COUNT)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@no_type_check
@triton.jit
def weights(logits, column, vocab, top, TAIL: tl.constexpr, HINT: tl.constexpr):
    """Load logits and return their softmax weights w = 2^(l log2(e) - top).

    Args:
        logits: Pointer to the row.
        column: Column indices to load.
        vocab: Columns of the row that count.
        top: The greatest logit times log2(e).
        TAIL: Whether columns may lie past the end of the row and need a mask.
        HINT: Eviction policy of the load: "evict_first" for the last read of a value, which leaves the L2 cache to rows that
            will be read again.
    """
    if TAIL:
        value = tl.load(logits + column, mask=column < vocab, other=LOWEST, eviction_policy=HINT)
    else:
        value = tl.load(logits + column, eviction_policy=HINT)
    return tl.exp2(value * LOG2E - top)


@no_type_check
@triton.jit
def _load_four(at, BLOCK: tl.constexpr):
    return tl.load(at), tl.load(at + BLOCK), tl.load(at + 2 * BLOCK), tl.load(at + 3 * BLOCK)


@no_type_check
@triton.jit
def _max_four(a, b, c, d):
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@no_type_check
@triton.jit
def _sum_of_powers(a, b, c, d, top):
    one, two = tl.exp2(a * LOG2E - top) + tl.exp2(b * LOG2E - top), tl.exp2(c * LOG2E - top) + tl.exp2(d * LOG2E - top)
    return one + two


@no_type_check
@triton.jit
def _rescaling(before, after):
    """2^(before - after), and exactly 1 where both are equal.

    Both are products that were rounded. A fused multiply-add would take one of them without its rounding error. The factor
    of an unchanged maximum would then differ from 1 by up to 1e-6, in every iteration.
    """
    return tl.where(before == after, 1.0, tl.exp2(before - after))


@no_type_check
@triton.jit
def sum_of_weights(logits, vocab, full, BLOCK: tl.constexpr):
    """Return the greatest logit times log2(e), and the sum of the weights relative to it in float64.

    One pass with a running maximum per lane (online softmax): when the maximum rises, the sum so far is rescaled.

    Args:
        logits: Pointer to the row.
        vocab: Columns of the row.
        full: Columns in full tiles, which are read without a mask.
        BLOCK: Columns per block.
    """
    lanes = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], LOWEST, tl.float32)
    scaled = tops * LOG2E  # rounded once here; all weights are relative to this value, so the rounding cancels
    sums = tl.zeros([BLOCK], tl.float32)
    # eight loads written out: a maximum over a two-dimensional tile would go through shared memory
    for start in range(0, full, TILE * BLOCK):
        a, b, c, d = _load_four(logits + start + lanes, BLOCK)
        e, f, g, h = _load_four(logits + start + 4 * BLOCK + lanes, BLOCK)
        tops = tl.maximum(tops, tl.maximum(_max_four(a, b, c, d), _max_four(e, f, g, h)))
        before, scaled = scaled, tops * LOG2E
        sums = sums * _rescaling(before, scaled) + (_sum_of_powers(a, b, c, d, scaled) + _sum_of_powers(e, f, g, h, scaled))
    for start in range(full, vocab, BLOCK):
        column = start + lanes
        value = tl.load(logits + column, mask=column < vocab, other=LOWEST)
        tops = tl.maximum(tops, value)
        before, scaled = scaled, tops * LOG2E
        sums = sums * _rescaling(before, scaled) + tl.exp2(value * LOG2E - scaled)
    top = tl.max(scaled, 0)
    return top, tl.sum((sums * _rescaling(scaled, top)).to(tl.float64), 0)
