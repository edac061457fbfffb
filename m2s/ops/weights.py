"""What the kernels of the losses share: a row of logits as weights, w = 2^(l log2(e) - top), and their sum in one pass.

Powers of two, so that a weight takes one multiplication and one instruction more.
"""

from typing import no_type_check

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2.0**126))  # the logit of what is left out; a power of two: times LOG2E it is not rounded, also fused with a sum
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@no_type_check
@triton.jit
def weights(logits, column, vocab, top, TAIL: tl.constexpr):
    value = tl.load(logits + column, mask=column < vocab, other=LOWEST) if TAIL else tl.load(logits + column)
    return tl.exp2(value * LOG2E - top)


@no_type_check
@triton.jit
def sum_of_weights(logits, vocab, whole, BLOCK: tl.constexpr):
    """The greatest logit times log2(e), and the sum of the weights against it in float64. `whole` columns, a multiple of
    4 BLOCK, are read without a look at where the row ends."""
    lanes = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], LOWEST, tl.float32)
    scaled = tops * LOG2E  # rounded: what weights are powers against, so that no weight sees the rounding
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, whole, 4 * BLOCK):
        a, b = tl.load(logits + start + lanes), tl.load(logits + start + BLOCK + lanes)
        c, d = tl.load(logits + start + 2 * BLOCK + lanes), tl.load(logits + start + 3 * BLOCK + lanes)
        tops = tl.maximum(tops, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
        before, scaled = scaled, tops * LOG2E
        fresh = tl.exp2(a * LOG2E - scaled) + tl.exp2(b * LOG2E - scaled)
        fresh += tl.exp2(c * LOG2E - scaled) + tl.exp2(d * LOG2E - scaled)
        sums = sums * tl.exp2(before - scaled) + fresh
    for start in range(whole, vocab, BLOCK):
        column = start + lanes
        value = tl.load(logits + column, mask=column < vocab, other=LOWEST)
        tops = tl.maximum(tops, value)
        before, scaled = scaled, tops * LOG2E
        sums = sums * tl.exp2(before - scaled) + tl.exp2(value * LOG2E - scaled)
    top = tl.max(scaled, 0)
    return top, tl.sum((sums * tl.exp2(scaled - top)).to(tl.float64), 0)
