"""Score entropy of a free log-score and its gradient, one program for a row, one pass; `reference.py` has the mathematics."""

import functools
from typing import no_type_check

import triton
import triton.language as tl

from m2s.ops.launch import launch


@no_type_check
@triton.jit
def _against(value, log_ratio, HIGH: tl.constexpr):
    """e^d - 1 - d and e^d - 1 for d = value - log_ratio, a float64 scalar taken off in two parts."""
    finite = log_ratio > -float("inf")
    taken = tl.where(finite, log_ratio, 0.0)
    high = taken.to(HIGH)
    d = tl.where(finite, (value - high) - (taken - high.to(tl.float64)).to(HIGH), 0.0)
    series = d * (1 / 40320) + 1 / 5040
    series = series * d + 1 / 720
    series = series * d + 1 / 120
    series = series * d + 1 / 24
    series = series * d + 1 / 6
    series = (series * d + 1 / 2) * d * d
    grown = tl.exp(d) - 1
    near = tl.abs(d) < 0.2
    bregman, slope = tl.where(near, series, grown - d), tl.where(near, series + d, grown)
    ratio = tl.exp(log_ratio).to(HIGH)
    score = tl.exp(value)
    return tl.where(finite, ratio * bregman, score), tl.where(finite, ratio * slope, score)


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
    k, x = tl.load(current + row), tl.load(clean_token + row)
    log_r = tl.load(scalars + row)
    log_r_x = tl.load(scalars + rows + row)
    log_r_mask = tl.load(scalars + 2 * rows + row)
    rate = tl.load(scalars + 3 * rows + row)
    states = vocab
    if MASK:
        states += 1
    factor = tl.load(weight + row)
    scale = tl.where(rate > 0, rate * factor, 0.0).to(tl.float32)
    value_x = tl.load(logits + x)
    entropy_x, slope_x = _against(value_x, log_r_x, tl.float32)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, columns, BLOCK):
        column = start + lanes
        inside = (column < states) & (column != k)
        value = tl.load(logits + column, mask=column < columns, other=0.0)
        entropy, slope = _against(value, log_r, tl.float32)
        entropy, slope = tl.where(column == x, entropy_x, entropy), tl.where(column == x, slope_x, slope)
        if MASK:
            entropy_mask, slope_mask = _against(value, log_r_mask, tl.float32)
            entropy = tl.where(column == vocab, entropy_mask, entropy)
            slope = tl.where(column == vocab, slope_mask, slope)
        total += tl.where(inside, entropy, 0.0).to(tl.float64)
        if GRADIENT:
            entry = scale * tl.where(inside, tl.where(scale == 0, 0.0, slope), 0.0)
            tl.store(gradient + row * columns + column, entry.to(gradient.dtype.element_ty), mask=column < columns)
    tl.store(loss + row, tl.where(rate > 0, rate * tl.sum(total, 0), 0.0))


rows = functools.partial(launch, _free, 2048, 8)
