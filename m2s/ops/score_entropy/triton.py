"""Score entropy of a free log-score and its gradient, one program for a row, one pass; `reference.py` has the mathematics.

The entries at k, at the clean token and at the mask are not like the others: they are taken out of the row for the time of the
pass (a log-score that costs nothing stands there), and put back.
"""

import functools
from typing import no_type_check

import triton
import triton.language as tl

from m2s.ops.launch import launch, prepare
from m2s.ops.softmax_tiles import LOG2E, LOWEST, tile

TILE = tl.constexpr(4)  # blocks of columns whose loads are under way at once


@no_type_check
@triton.jit
def _entropy(value, high, low, ratio, compared):
    """h(s, r) and s - r, from a logit and what is to be taken from it, high + low: r (e^d - 1 - d) and r (e^d - 1), d = log s -
    log r, by a series where d is small; s and s where r = 0 (`compared` is 0, the ratio 1 and d = log s)."""
    d = (value - high) - low
    series = d * (1 / 40320) + 1 / 5040
    series = series * d + 1 / 720
    series = series * d + 1 / 120
    series = series * d + 1 / 24
    series = series * d + 1 / 6
    series = (series * d + 1 / 2) * d
    grown = tl.exp2(d * LOG2E) - compared
    near = tl.abs(d) < 0.2 * compared
    slope = tl.where(near, series * d + d, grown)
    return ratio * tl.where(near, series * d, grown - d * compared), ratio * slope


@no_type_check
@triton.jit
def _halves(log_ratio, shift):
    """What is taken from a logit, log r + shift in float64, as two float32 numbers; r, and whether it is above zero: where not,
    the shift alone and a ratio of 1."""
    finite = log_ratio > -float("inf")
    log_ratio = tl.where(finite, log_ratio, 0.0)
    taken = log_ratio + shift
    high = taken.to(tl.float32)
    low = (taken - high.to(tl.float64)).to(tl.float32)
    return high, low, tl.exp(log_ratio).to(tl.float32), tl.where(finite, 1.0, 0.0).to(tl.float32)


@no_type_check
@triton.jit
def _free(
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
    gradient += row * gradient_stride
    scalars += row * told
    k, x = tl.load(current + row), tl.load(clean_token + row)
    rate = tl.load(scalars + 3)
    factor = tl.load(weight + row)
    scale = tl.where(rate > 0, rate * factor, 0.0).to(tl.float32)
    shift = tl.load(scalars + 4)
    high, low, ratio, compared = _halves(tl.load(scalars), shift)
    value_k, value_x = tl.load(logits + k), tl.load(logits + x)
    value_mask = tl.load(logits + vocab) if MASK else value_k
    nothing = tl.where(compared > 0, high, LOWEST)
    tl.debug_barrier()
    tl.store(logits + k, nothing)
    tl.store(logits + x, nothing)
    if MASK:
        tl.store(logits + vocab, nothing)
    tl.debug_barrier()

    states = vocab
    if MASK:
        states += 1
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    totals = tl.zeros([TILE, BLOCK], tl.float32)
    whole = vocab // (TILE * BLOCK) * (TILE * BLOCK)
    for start in range(0, whole, TILE * BLOCK):
        column = start + tile(BLOCK, TILE)
        value = tl.load(logits + column)
        if GRADIENT:
            tl.debug_barrier()  # the gradient lies where logits were that all threads have read by now
        entropy, slope = _entropy(value, high, low, ratio, compared)
        totals += entropy
        if GRADIENT:
            tl.store(gradient + column, tl.where(scale == 0, 0.0, scale * slope).to(gradient.dtype.element_ty))
    for start in range(whole, columns, BLOCK):
        column = start + lanes
        value = tl.load(logits + column, mask=column < states, other=0.0)
        if GRADIENT:
            tl.debug_barrier()
        entropy, slope = _entropy(value, high, low, ratio, compared)
        total += tl.where(column < states, entropy, 0.0)
        if GRADIENT:
            entry = tl.where(column < states, tl.where(scale == 0, 0.0, scale * slope), 0.0)
            tl.store(gradient + column, entry.to(gradient.dtype.element_ty), mask=column < columns)
    found = tl.sum(total.to(tl.float64), 0) + tl.sum(tl.sum(totals.to(tl.float64), 0), 0)

    high, low, ratio, compared = _halves(tl.load(scalars + 1), shift)
    entropy, slope_x = _entropy(value_x, high, low, ratio, compared)
    found += tl.where(k == x, 0.0, entropy.to(tl.float64))
    slope_x = tl.where(k == x, 0.0, tl.where(scale == 0, 0.0, scale * slope_x))
    if MASK:
        high, low, ratio, compared = _halves(tl.load(scalars + 2), shift)
        entropy, slope_mask = _entropy(value_mask, high, low, ratio, compared)
        found += tl.where(k == vocab, 0.0, entropy.to(tl.float64))
        slope_mask = tl.where(k == vocab, 0.0, tl.where(scale == 0, 0.0, scale * slope_mask))
    tl.store(loss + row, tl.where(rate > 0, rate * found, 0.0))
    tl.debug_barrier()
    if GRADIENT:
        tl.store(gradient + x, slope_x.to(gradient.dtype.element_ty))
        if MASK:
            tl.store(gradient + vocab, slope_mask.to(gradient.dtype.element_ty))
        tl.debug_barrier()
        tl.store(gradient + k, tl.zeros([], tl.float32).to(gradient.dtype.element_ty))
    else:
        tl.store(logits + x, value_x)
        if MASK:
            tl.store(logits + vocab, value_mask)
        tl.store(logits + k, value_k)


__all__ = ["prepare", "rows"]
rows = functools.partial(launch, _free, 512, 4)
