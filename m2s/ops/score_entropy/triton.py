"""Score entropy of an unconstrained log-score and its gradient as a Triton kernel, one program per row, one pass.

`cpu.py` has the mathematics. The entries at k, at the clean token x and at the mask have ratios r different from the others.
They are taken out of the row for the duration of the pass (replaced by a log-score of zero loss) and put back at the end, so
that the loop needs no comparison per column.
"""

import functools
from typing import no_type_check

import triton
import triton.language as tl

from m2s.ops.row_kernels import LOG2E, LOWEST, launch, prepare, tile

TILE = tl.constexpr(4)  # blocks per tile: their loads are issued together


@no_type_check
@triton.jit
def _entropy(value, high, low, ratio, compared):
    """h(s, r) = r (e^d - 1 - d) and s - r = r (e^d - 1), where d = log s - log r = value - high - low.

    Small d take a series, where the differences would cancel. Where r = 0, h = s: then `compared` is 0, the ratio is 1 and
    d = log s.
    """
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
def split(log_ratio, shift):
    """Return log r + shift in float64 as a sum high + low of two float32: subtracting it from a logit keeps all digits.

    Also returns r, and whether it is positive; where r = 0, the split is that of the shift alone and the ratio is 1.

    Args:
        log_ratio: log r in float64; -inf stands for r = 0.
        shift: Number that is subtracted from logits to get log s.
    """
    finite = log_ratio > -float("inf")
    log_ratio = tl.where(finite, log_ratio, 0.0)
    subtracted = log_ratio + shift
    high = subtracted.to(tl.float32)
    low = (subtracted - high.to(tl.float64)).to(tl.float32)
    return high, low, tl.exp(log_ratio).to(tl.float32), tl.where(finite, 1.0, 0.0).to(tl.float32)


@no_type_check
@triton.jit
def entropy_of_columns(
    logits,
    gradient,
    columns,
    vocab,
    states,
    high,
    low,
    ratio,
    compared,
    scale,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return sum_y h(s_y, r) of a row, and overwrite the row by scale (s_y - r), in one pass.

    Args:
        logits: Pointer to the row of log s + shift.
        gradient: Pointer to the row of the gradient, at the same address.
        columns: Columns of the row. The gradient of those past `states` is 0.
        vocab: Number of clean tokens.
        states: Columns that count.
        high: log r + shift, from `split`.
        low: What `high` lacks.
        ratio: r, or 1 where it is 0.
        compared: 1, or 0 where r = 0.
        scale: Factor of the gradient.
        GRADIENT: Whether the gradient is wanted.
        BLOCK: Columns per block.
    """
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    totals = tl.zeros([TILE, BLOCK], tl.float32)
    full = vocab // (TILE * BLOCK) * (TILE * BLOCK)
    for start in range(0, full, TILE * BLOCK):
        column = start + tile(BLOCK, TILE)
        value = tl.load(logits + column)
        if GRADIENT:
            tl.debug_barrier()  # the gradient overwrites logits: all threads must have read them
        entropy, slope = _entropy(value, high, low, ratio, compared)
        totals += entropy
        if GRADIENT:
            tl.store(gradient + column, tl.where(scale == 0, 0.0, scale * slope).to(gradient.dtype.element_ty))
    for start in range(full, columns, BLOCK):
        column = start + lanes
        value = tl.load(logits + column, mask=column < states, other=0.0)
        if GRADIENT:
            tl.debug_barrier()
        entropy, slope = _entropy(value, high, low, ratio, compared)
        total += tl.where(column < states, entropy, 0.0)
        if GRADIENT:
            entry = tl.where(column < states, tl.where(scale == 0, 0.0, scale * slope), 0.0)
            tl.store(gradient + column, entry.to(gradient.dtype.element_ty), mask=column < columns)
    # float32 sums per lane, float64 across lanes
    return tl.sum(total.to(tl.float64), 0) + tl.sum(tl.sum(totals.to(tl.float64), 0), 0)


@no_type_check
@triton.jit
def _score_entropy(
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
    """Loss and gradient of one row. Its five scalars are those of `row_scalars` in cpu.py."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    gradient += row * gradient_stride
    row_scalars += row * row_scalars_stride
    k, x = tl.load(current + row), tl.load(clean_token + row)
    rate = tl.load(row_scalars + 3)
    row_weight = tl.load(weight + row)
    scale = tl.where(rate > 0, rate * row_weight, 0.0).to(tl.float32)
    shift = tl.load(row_scalars + 4)
    high, low, ratio, compared = split(tl.load(row_scalars), shift)
    value_k, value_x = tl.load(logits + k), tl.load(logits + x)
    value_mask = tl.load(logits + vocab) if MASK else value_k
    zero_loss = tl.where(compared > 0, high, LOWEST)  # a log-score equal to log r, or s = 0 where r = 0
    tl.debug_barrier()
    tl.store(logits + k, zero_loss)
    tl.store(logits + x, zero_loss)
    if MASK:
        tl.store(logits + vocab, zero_loss)
    tl.debug_barrier()

    states = vocab
    if MASK:
        states += 1
    sum_h = entropy_of_columns(
        logits, gradient, columns, vocab, states, high, low, ratio, compared, scale, GRADIENT=GRADIENT, BLOCK=BLOCK
    )

    # the clean token and the mask, each with a different ratio
    high, low, ratio, compared = split(tl.load(row_scalars + 1), shift)
    entropy, slope_x = _entropy(value_x, high, low, ratio, compared)
    sum_h += tl.where(k == x, 0.0, entropy.to(tl.float64))
    slope_x = tl.where(k == x, 0.0, tl.where(scale == 0, 0.0, scale * slope_x))
    if MASK:
        high, low, ratio, compared = split(tl.load(row_scalars + 2), shift)
        entropy, slope_mask = _entropy(value_mask, high, low, ratio, compared)
        sum_h += tl.where(k == vocab, 0.0, entropy.to(tl.float64))
        slope_mask = tl.where(k == vocab, 0.0, tl.where(scale == 0, 0.0, scale * slope_mask))
    tl.store(loss + row, tl.where(rate > 0, rate * sum_h, 0.0))
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


__all__ = ["entropy_of_columns", "prepare", "row_losses", "split"]
row_losses = functools.partial(launch, _score_entropy, 512, 4)
