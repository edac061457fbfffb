"""What the kernels of the losses share: a row of logits as weights, w = 2^(l log2(e) - top), and their sum in one pass.

Powers of two, so that a weight takes one multiplication and one instruction more. A row is read in tiles of several blocks of
columns, whose loads are all under way before the first is waited for.
"""

from typing import no_type_check

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2.0**126))  # the logit of what is left out; a power of two: times LOG2E it is not rounded
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TILE = tl.constexpr(8)  # blocks of a tile


@no_type_check
@triton.jit
def tile(BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """The columns of the first tile."""
    return tl.arange(0, COUNT)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@no_type_check
@triton.jit
def weights(logits, column, vocab, top, TAIL: tl.constexpr, HINT: tl.constexpr):
    """Of columns that may lie past the row's end (`TAIL`); the hint says how long the cache is to keep what was read."""
    if TAIL:
        value = tl.load(logits + column, mask=column < vocab, other=LOWEST, eviction_policy=HINT)
    else:
        value = tl.load(logits + column, eviction_policy=HINT)
    return tl.exp2(value * LOG2E - top)


@no_type_check
@triton.jit
def _four(at, BLOCK: tl.constexpr):
    return tl.load(at), tl.load(at + BLOCK), tl.load(at + 2 * BLOCK), tl.load(at + 3 * BLOCK)


@no_type_check
@triton.jit
def _greatest(a, b, c, d):
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@no_type_check
@triton.jit
def _powers(a, b, c, d, top):
    one, two = tl.exp2(a * LOG2E - top) + tl.exp2(b * LOG2E - top), tl.exp2(c * LOG2E - top) + tl.exp2(d * LOG2E - top)
    return one + two


@no_type_check
@triton.jit
def sum_of_weights(logits, vocab, whole, BLOCK: tl.constexpr):
    """The greatest logit times log2(e), and the sum of the weights against it in float64. `whole` columns, some tiles, are read
    without a look at where the row ends."""
    lanes = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], LOWEST, tl.float32)
    scaled = tops * LOG2E  # rounded: what weights are powers against, so that no weight sees the rounding
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, whole, TILE * BLOCK):  # by hand: a maximum over a tile would go through shared memory
        a, b, c, d = _four(logits + start + lanes, BLOCK)
        e, f, g, h = _four(logits + start + 4 * BLOCK + lanes, BLOCK)
        tops = tl.maximum(tops, tl.maximum(_greatest(a, b, c, d), _greatest(e, f, g, h)))
        before, scaled = scaled, tops * LOG2E
        sums = sums * tl.exp2(before - scaled) + (_powers(a, b, c, d, scaled) + _powers(e, f, g, h, scaled))
    for start in range(whole, vocab, BLOCK):
        column = start + lanes
        value = tl.load(logits + column, mask=column < vocab, other=LOWEST)
        tops = tl.maximum(tops, value)
        before, scaled = scaled, tops * LOG2E
        sums = sums * tl.exp2(before - scaled) + tl.exp2(value * LOG2E - scaled)
    top = tl.max(scaled, 0)
    return top, tl.sum((sums * tl.exp2(scaled - top)).to(tl.float64), 0)
