"""Cross-entropy of rows of logits and its gradient as a Triton kernel, one program per row.

The first pass computes the normalizing sum, the second one the gradient, which overwrites the logits. The entry at the clean
token x is taken out of the row for the duration of the passes, so that the sum of the other weights is exact where x is almost
certain: the loss is log(1 + others / w_x), and no difference of nearly equal numbers occurs.
"""

import functools
from typing import no_type_check

import triton
import triton.language as tl

from m2s.ops.row_kernels import LN2, LOG2E, LOWEST, TILE, launch, prepare, sum_of_weights, tile, weights


@no_type_check
@triton.jit
def _cross_entropy(
    logits,
    gradient,
    loss,
    current,
    clean_token,
    weight,
    row_scalars,
    row_scalars_stride,
    stride,
    gradient_stride,
    columns,
    vocab,
    MASK: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss and gradient of one row. Its only scalar is the rate; `current` is not read."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    x = tl.load(clean_token + row)
    rate = tl.load(row_scalars + row * row_scalars_stride)
    value_x = tl.load(logits + x)
    tl.debug_barrier()
    tl.store(logits + x, LOWEST)  # taken out of the row for the duration of the passes
    tl.debug_barrier()
    lanes = tl.arange(0, BLOCK)
    full = vocab // (TILE * BLOCK) * (TILE * BLOCK)
    top_rest, sum_rest = sum_of_weights(logits, vocab, full, BLOCK)
    top = tl.maximum(top_rest, value_x * LOG2E)
    log_x = value_x.to(tl.float64) * LOG2E - top.to(tl.float64)
    others = sum_rest * tl.exp2(top_rest.to(tl.float64) - top.to(tl.float64))
    total = others + tl.exp2(log_x)
    # log(1 + others / w_x) = -log(1 - ratio): by its series where x is almost certain and the difference would cancel
    ratio = others / total
    small = ratio < 0.01
    near = ratio * (1 + ratio * (1 / 2 + ratio * (1 / 3 + ratio * (1 / 4 + ratio * (1 / 5 + ratio * (1 / 6 + ratio / 7))))))
    far = tl.log(total) - log_x * LN2
    tl.store(loss + row, rate * tl.where(small, near, far))
    if GRADIENT:
        scale = rate * tl.load(weight + row)
        at_x = (-scale * ratio).to(tl.float32)
        per_weight = (scale / total).to(tl.float32)
        gradient += row * gradient_stride
        for start in range(0, full, TILE * BLOCK):
            column = start + tile(BLOCK, TILE)
            w = weights(logits, column, vocab, top, TAIL=False, HINT="evict_first")
            tl.debug_barrier()  # the gradient overwrites logits: all threads must have read them
            entry = per_weight * w
            tl.store(gradient + column, entry.to(gradient.dtype.element_ty), eviction_policy="evict_first")
        for start in range(full, columns, BLOCK):
            column = start + lanes
            w = weights(logits, column, vocab, top, TAIL=True, HINT="evict_first")
            tl.debug_barrier()
            entry = tl.where(column < vocab, per_weight * w, 0.0)
            tl.store(gradient + column, entry.to(gradient.dtype.element_ty), mask=column < columns)
        tl.debug_barrier()
        tl.store(gradient + x, at_x.to(gradient.dtype.element_ty))
    else:
        tl.debug_barrier()
        tl.store(logits + x, value_x)


__all__ = ["prepare", "row_losses"]
row_losses = functools.partial(launch, _cross_entropy, 1024, 8)
