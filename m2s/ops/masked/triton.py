"""Cross-entropy and its gradient, one program for a row: a pass for the normalising sum, a pass for the gradient."""

import functools
from typing import no_type_check

import triton
import triton.language as tl

from m2s.ops.launch import launch

LOWEST = tl.constexpr(-3.0e38)  # what is left out of a maximum


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
    rows,
    stride,
    columns,
    vocab,
    MASK: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    x = tl.load(clean_token + row)
    rate = tl.load(scalars + row)
    lanes = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], LOWEST, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        column = start + lanes
        inside = (column < vocab) & (column != x)
        value = tl.where(inside, tl.load(logits + column, mask=column < columns, other=0.0), LOWEST)
        higher = tl.maximum(tops, value)
        sums = sums * tl.exp(tops - higher) + tl.exp(value - higher)
        tops = higher
    value_x = tl.load(logits + x)
    top_rest = tl.max(tops, 0)
    top = tl.maximum(top_rest, value_x)
    w_x = tl.exp((value_x - top).to(tl.float64))
    others = tl.sum((sums * tl.exp(tops - top_rest)).to(tl.float64), 0) * tl.exp((top_rest - top).to(tl.float64))
    total = others + w_x
    # log(1 + others / w_x), without a difference where the token is all but certain
    ratio = others / total
    small = ratio < 0.01
    near = ratio * (1 + ratio * (1 / 2 + ratio * (1 / 3 + ratio * (1 / 4 + ratio * (1 / 5 + ratio * (1 / 6 + ratio / 7))))))
    far = tl.log(total) - (value_x.to(tl.float64) - top.to(tl.float64))
    tl.store(loss + row, rate * tl.where(small, near, far))
    if GRADIENT:
        scale = rate * tl.load(weight + row)
        at_x = (-scale * ratio).to(tl.float32)
        share = (scale / total).to(tl.float32)
        gradient += row * columns
        for start in range(0, columns, BLOCK):
            column = start + lanes
            entry = share * tl.exp(tl.load(logits + column, mask=column < columns, other=0.0) - top)
            entry = tl.where(column == x, at_x, entry)
            entry = tl.where(column < vocab, entry, 0.0)
            tl.store(gradient + column, entry.to(gradient.dtype.element_ty), mask=column < columns)


rows = functools.partial(launch, _masked, 4096, 16)
