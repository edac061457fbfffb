"""Score entropy of posterior logits and its gradient as a Triton kernel, one program per row.

`cpu.py` has the mathematics and the names (e, g, G, C, Gbar). A row takes three passes:

1. the greatest logit and the sum of the softmax weights;
2. the sums of log(1 + e) and of 1/(1 + e), with one division for eight columns and one logarithm per lane. This pass runs from
   the end of the row to its beginning, so that it starts with what the first pass left in the cache;
3. the gradient, which overwrites the logits.

The entries at k and x follow other formulas. They are taken out of the row for the duration of the passes (replaced by the
logit `LOWEST`), which saves a comparison at every column, and put back at the end. Two programs share a multiprocessor, so that
one computes while the other waits for memory; values that are read for the last time leave the cache first.

Everything that belongs to the row as a whole is float64 and is repeated by every thread. `prepare` therefore computes quotients
of the process's scalars beforehand, for all rows at once.
"""

import functools
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.row_kernels import LN2, LOG2E, LOWEST, TILE, launch, sum_of_weights, tile, weights

GROUP = tl.constexpr(8)  # columns per division: 1 + e is at most 1e17, so the product of eight stays in the range of float64


@no_type_check
@triton.jit
def _series(e):
    """g(e) = e - log(1 + e) for small e, where the difference would cancel."""
    z = e / (e + 2)
    square = z * z
    return z * (e - square * (2 / 3 + square * (2 / 5 + square * (2 / 7))))


@no_type_check
@triton.jit
def _multiply_mantissa(product, exponents, factor):
    """Multiply product 2^exponents by a factor. Only mantissas in [1, 2) are multiplied and exponents are added as integers, so
    nothing overflows and a single logarithm at the end suffices."""
    bits = factor.to(tl.int64, bitcast=True)
    part = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    return product * part, exponents + ((bits >> 52) - 1023).to(tl.int32)


@no_type_check
@triton.jit
def _to_float64(w):
    """Convert a float32 >= 0 to float64 by shifting its bits: the conversion instruction would compete with exp2 for the
    special-function unit. Subnormal numbers (below 2^-126) come out too large by at most 2^-126."""
    return ((w.to(tl.uint32, bitcast=True).to(tl.uint64) << 29) + 0x3800000000000000).to(tl.float64, bitcast=True)


@no_type_check
@triton.jit
def _slope(w, sign, minus_pivot, divisor_w, divisor_1, shift):
    """Gradient at a column of weight w; 1/v is the square of a reciprocal root, which takes one instruction."""
    root = tl.rsqrt(w * divisor_w + divisor_1)
    return w * ((w * sign + minus_pivot) * (root * root) + shift)


@no_type_check
@triton.jit
def _posterior_entropy(
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
    """Loss and gradient of one row. Its 14 scalars are contiguous, in the order of the list in `prepare`."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    row_scalars += row * row_scalars_stride
    k, x = tl.load(current + row), tl.load(clean_token + row)
    # `k_here` is the column of k, or x again where k is the mask and has no column
    same = k == x
    k_clean = (k != vocab) if MASK else (k == k)
    apart = k_clean & (k != x)
    k_here = tl.where(k_clean, k, x)
    value_x, value_k = tl.load(logits + x), tl.load(logits + k_here)
    tl.debug_barrier()  # all threads must have read the two values before they are overwritten
    tl.store(logits + x, LOWEST)
    tl.store(logits + k_here, LOWEST)
    tl.debug_barrier()

    lanes = tl.arange(0, BLOCK)
    full = vocab // (GROUP * BLOCK) * (GROUP * BLOCK)
    top_rest, sum_rest = sum_of_weights(logits, vocab, full, BLOCK)
    top = tl.maximum(top_rest, tl.maximum(value_x * LOG2E, value_k * LOG2E))

    # the posterior at k, at x and elsewhere, in float64 with logarithms to the base 2
    offset = tl.load(row_scalars)
    log_x = value_x.to(tl.float64) * LOG2E - top.to(tl.float64)
    log_k = value_k.to(tl.float64) * LOG2E - top.to(tl.float64)
    w_x, w_k = tl.exp2(log_x + tl.where(same, offset, 0.0)), tl.exp2(log_k + offset)
    top_w = tl.exp2(top_rest.to(tl.float64) - top.to(tl.float64))
    rest_w = sum_rest * top_w
    total = rest_w + w_x + tl.where(apart, w_k, 0.0)
    per_total = 1 / total
    rest, mu_x, mu_k = rest_w * per_total, w_x * per_total, tl.where(k_clean, w_k * per_total, 0.0)
    off = tl.where(same, rest, rest + mu_x)
    alpha_over_m_k = tl.load(row_scalars + 2)
    alpha_over_p_kk = tl.load(row_scalars + 3)
    m_k_over_p_kk = tl.load(row_scalars + 4)
    to_slope = tl.load(row_scalars + 5)  # d e_y / d mu_y
    slope = to_slope * per_total
    level = tl.where(same, off * alpha_over_m_k, -mu_k * alpha_over_p_kk)
    flow = off + mu_k * m_k_over_p_kk
    level_1 = tl.where(same, 1.0 + level, flow)
    # second pass: product of 1 + e and sum of 1/(1 + e) = dividend / divisor, lane by lane
    product = tl.full([BLOCK], 1.0, tl.float64)
    exponents = tl.zeros([BLOCK], tl.int32)
    inverses = tl.zeros([BLOCK], tl.float64)
    divisor = tl.full([BLOCK], 1.0, tl.float64)
    dividend = tl.zeros([BLOCK], tl.float64)
    for start in range(full, vocab, BLOCK):
        column = start + lanes
        v = slope * _to_float64(weights(logits, column, vocab, top, TAIL=True, HINT="")) + level_1
        v = tl.where(column < vocab, v, 1.0)
        dividend = dividend * v + tl.where(column < vocab, divisor, 0.0)
        divisor = divisor * v
    inverses += dividend / divisor
    product, exponents = _multiply_mantissa(product, exponents, divisor)
    # from the end, which the first pass read last; without a gradient forwards, which takes fewer registers
    for back in range(GROUP * BLOCK, full + 1, GROUP * BLOCK):
        first = full - back if GRADIENT else back - GROUP * BLOCK
        divisor = tl.full([BLOCK], 1.0, tl.float64)
        dividend = tl.zeros([BLOCK], tl.float64)
        for i in tl.static_range(GROUP):
            column = first + i * BLOCK + lanes
            v = slope * _to_float64(weights(logits, column, vocab, top, TAIL=False, HINT="")) + level_1
            dividend = dividend * v + divisor
            divisor = divisor * v
        inverses += dividend / divisor
        product, exponents = _multiply_mantissa(product, exponents, divisor)
    if not GRADIENT:  # the logits are read again by the caller: put the two entries back
        tl.debug_barrier()
        tl.store(logits + x, value_x)
        tl.store(logits + k_here, value_k)
    logs = tl.log(product) + exponents.to(tl.float64) * LN2
    taken_out = tl.where(apart, 2, 1)  # columns with w = 0 that are no candidates: k and x
    taken = taken_out.to(tl.float64)
    candidates = (vocab - taken_out).to(tl.float64)
    sum_e = slope * rest_w + candidates * level
    log_level, per_level = tl.log(level_1), 1 / level_1
    sum_g = tl.maximum(sum_e - (tl.sum(logs, 0) - taken * log_level), 0.0)
    # G = e/(1 + e) = 1 - 1/(1 + e)
    sum_big_g = candidates - (tl.sum(inverses, 0) - taken * per_level)
    rate = tl.load(row_scalars + 1)  # n(k), or 0 where the row has no loss
    m_clean_over_p_k = tl.load(row_scalars + 6)  # P(k|x_0) is m(k), or P(k|k) where k = x
    m_clean_over_p_kk = tl.load(row_scalars + 7)
    alpha_over_p_xx = tl.load(row_scalars + 8)
    p_xx_over_m_k = tl.load(row_scalars + 9)
    value = m_clean_over_p_k * sum_g
    e_x = -alpha_over_p_xx * (rest + mu_k + m_clean_over_p_kk * mu_k)
    one_plus_e_x = alpha_over_p_xx * mu_x + tl.load(row_scalars + 13) * flow
    log_1 = tl.log(one_plus_e_x)
    value += tl.where(same, 0.0, p_xx_over_m_k * tl.where(tl.abs(e_x) < 0.01, _series(e_x), e_x - log_1))
    if MASK:
        m_mask_over_p_k = tl.where(k_clean, tl.load(row_scalars + 11), 0.0)
        value += m_mask_over_p_k * tl.where(tl.abs(level) < 0.01, _series(level), level - log_level)
    row_weight = tl.load(weight + row)
    tl.store(loss + row, tl.where(rate > 0, rate * value, 0.0))

    if GRADIENT:
        scale = tl.where((rate > 0) & (row_weight != 0), rate * alpha_over_m_k * row_weight, 0.0)
        ratio_x = 1 / one_plus_e_x
        g_x = tl.where(same, 0.0, e_x * ratio_x)
        mu_g_x = mu_x * g_x
        from_slope = tl.load(row_scalars + 10)  # 1 / to_slope
        g_bar = (sum_e - level_1 * sum_big_g) * from_slope + mu_g_x
        big_c = m_clean_over_p_kk * (sum_big_g + g_x)  # C / (alpha + m(k))
        if MASK:
            m_mask_over_p_kk = tl.where(k_clean, tl.load(row_scalars + 12), 0.0)
            big_c += m_mask_over_p_kk * level * per_level
        e_top = slope * top_w + level
        by_top = e_top > 0
        per_top = tl.where(by_top, 1 / (slope * top_w + level_1), 1.0)
        c = tl.where(by_top, e_top * per_top, 0.0)
        pivot = tl.where(by_top, top_w, -level * from_slope * total)
        # G + shift as (G - c) + (c + shift), as in cpu.py. 1/v is computed as a squared reciprocal root, which needs v > 0:
        # the sign goes into the dividend
        lift = per_top * tl.abs(scale) * per_total
        flat = lift == 0
        per_lift = tl.where(flat, 0.0, 1 / tl.where(flat, 1.0, lift))
        divisor_w = per_lift.to(tl.float32)
        divisor_1 = tl.where(flat, float("inf"), level_1 * from_slope * total * per_lift).to(tl.float32)
        sign = tl.where(scale < 0, -1.0, 1.0)
        minus_pivot = (-sign * pivot).to(tl.float32)
        sign = sign.to(tl.float32)
        shift = mu_k * big_c - g_bar
        at_k = -scale * mu_k * (g_bar + off * big_c)
        at_x = scale * (mu_g_x + mu_x * shift)
        at_x = tl.where(same, at_k, at_x)
        at_k = tl.where(k_clean, at_k, at_x)
        shift = ((c + shift) * scale * per_total).to(tl.float32)
        gradient += row * gradient_stride
        for start in range(0, full, TILE * BLOCK):
            column = start + tile(BLOCK, TILE)
            w = weights(logits, column, vocab, top, TAIL=False, HINT="evict_first")
            tl.debug_barrier()  # the gradient overwrites logits: all threads must have read them
            entry = _slope(w, sign, minus_pivot, divisor_w, divisor_1, shift)
            tl.store(gradient + column, entry.to(gradient.dtype.element_ty), eviction_policy="evict_first")
        for start in range(full, columns, BLOCK):
            column = start + lanes
            w = weights(logits, column, vocab, top, TAIL=True, HINT="evict_first")
            tl.debug_barrier()
            entry = _slope(w, sign, minus_pivot, divisor_w, divisor_1, shift)
            entry = tl.where(column < vocab, entry, 0.0)
            tl.store(gradient + column, entry.to(gradient.dtype.element_ty), mask=column < columns)
        tl.debug_barrier()
        tl.store(gradient + x, at_x.to(gradient.dtype.element_ty))
        tl.store(gradient + k_here, at_k.to(gradient.dtype.element_ty))


def prepare(x_t: Tensor, x_0: Tensor, row_scalars: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert tokens to int32 and compute the quotients of the row scalars that the kernel reads.

    Args:
        x_t: Current tokens `[N]`.
        x_0: Clean tokens `[N]`.
        row_scalars: `[7, N]`, from `m2s.ops.posterior_entropy.row_scalars`.

    Returns:
        Tokens in int32, and `[14, N]` quotients (the list below), the 14 numbers of a row contiguous in memory.
    """
    offset, alpha, m_k, p_kk, m_clean, m_mask, rate = row_scalars
    counted = (rate > 0) & (m_k > 0)
    m_k = torch.where(m_k > 0, m_k, 1)
    p_k = torch.where(x_t == x_0, p_kk, m_k)  # P(k|x_0)
    to_slope = torch.where(x_t == x_0, p_kk / m_k, 1) * alpha / m_clean
    p_xx = alpha + m_clean
    quotients = [
        offset / LN2.value,
        torch.where(counted, rate, 0),
        alpha / m_k,
        alpha / p_kk,
        m_k / p_kk,
        to_slope,
        m_clean / p_k,
        m_clean / p_kk,
        alpha / p_xx,
        p_xx / m_k,
        1 / to_slope,
        m_mask / p_k,
        m_mask / p_kk,
        m_clean / p_xx,
    ]
    return x_t.int(), x_0.int(), torch.stack(quotients, -1).t()


row_losses = functools.partial(launch, _posterior_entropy, 1024, 8)
"""`cpu.row_losses` for processes with m(y) > 0 at clean y. The logits are modified during the call and, without a weight,
restored at its end."""
