"""Cross-entropy and its gradient, one program for a row: a pass for the normalising sum, a pass for the gradient."""

import functools
from typing import no_type_check

import triton
import triton.language as tl

from m2s.ops.launch import launch, prepare
from m2s.ops.softmax_tiles import LN2, LOG2E, LOWEST, TILE, sum_of_weights, tile, weights


@no_type_check
@triton.jit
def _masked(
    logits,
    gradient,
    loss,
    current,
    clean_token,
    weight,
    scalars,
    told,
    stride,
    gradient_stride,
    columns,
    vocab,
    MASK: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    x = tl.load(clean_token + row)
    rate = tl.load(scalars + row * told)
    value_x = tl.load(logits + x)
    tl.debug_barrier()
    tl.store(logits + x, LOWEST)  # taken out of the row for the time of the passes
    tl.debug_barrier()
    lanes = tl.arange(0, BLOCK)
    whole = vocab // (TILE * BLOCK) * (TILE * BLOCK)
    top_rest, sum_rest = sum_of_weights(logits, vocab, whole, BLOCK)
    top = tl.maximum(top_rest, value_x * LOG2E)
    log_x = value_x.to(tl.float64) * LOG2E - top.to(tl.float64)
    others = sum_rest * tl.exp2(top_rest.to(tl.float64) - top.to(tl.float64))
    total = others + tl.exp2(log_x)
    # log(1 + others / w_x), without a difference where the token is all but certain
    ratio = others / total
    small = ratio < 0.01
    near = ratio * (1 + ratio * (1 / 2 + ratio * (1 / 3 + ratio * (1 / 4 + ratio * (1 / 5 + ratio * (1 / 6 + ratio / 7))))))
    far = tl.log(total) - log_x * LN2
    tl.store(loss + row, rate * tl.where(small, near, far))
    if GRADIENT:
        scale = rate * tl.load(weight + row)
        at_x = (-scale * ratio).to(tl.float32)
        share = (scale / total).to(tl.float32)
        gradient += row * gradient_stride
        for start in range(0, whole, TILE * BLOCK):
            column = start + tile(BLOCK, TILE)
            w = weights(logits, column, vocab, top, TAIL=False, HINT="evict_first")
            tl.debug_barrier()  # the gradient lies where logits were that all threads have read by now
            entry = share * w
            tl.store(gradient + column, entry.to(gradient.dtype.element_ty), eviction_policy="evict_first")
        for start in range(whole, columns, BLOCK):
            column = start + lanes
            w = weights(logits, column, vocab, top, TAIL=True, HINT="evict_first")
            tl.debug_barrier()
            entry = tl.where(column < vocab, share * w, 0.0)
            tl.store(gradient + column, entry.to(gradient.dtype.element_ty), mask=column < columns)
        tl.debug_barrier()
        tl.store(gradient + x, at_x.to(gradient.dtype.element_ty))
    else:
        tl.debug_barrier()
        tl.store(logits + x, value_x)


__all__ = ["prepare", "rows"]
rows = functools.partial(launch, _masked, 1024, 8)
