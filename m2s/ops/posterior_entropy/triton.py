"""Score entropy through the rank-one bridge and its gradient, one program for a row; `reference.py` has the mathematics.

Three passes over the row: the greatest logit and the sum of the weights; the sums of log(1 + e) and of 1/(1 + e), one division
for eight columns and one logarithm for a lane, from the end to the beginning, so that each pass begins with what the one before
it left in the cache; the gradient. The entries at k and x are not like the others: they are taken out of the row for the time
of the passes, and put back. Two programs share a multiprocessor, so that one computes while the other waits; what is read for
the last time makes room in the cache.

Every thread repeats what is said of the row as a whole: quotients of the process's scalars are made beforehand (`prepare`).
"""

import functools
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.launch import launch
from m2s.ops.softmax_tiles import LN2, LOG2E, LOWEST, TILE, sum_of_weights, tile, weights

GROUP = tl.constexpr(8)  # columns to one division: 1 + e goes up to 1e17, so that their product stays in range


@no_type_check
@triton.jit
def _series(e):
    """e - log(1 + e) for small e."""
    z = e / (e + 2)
    square = z * z
    return z * (e - square * (2 / 3 + square * (2 / 5 + square * (2 / 7))))


@no_type_check
@triton.jit
def _times(product, exponents, factor):
    """product 2^exponents times a factor, of which only the part in [1, 2) is multiplied: no logarithm until the end."""
    bits = factor.to(tl.int64, bitcast=True)
    part = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    return product * part, exponents + ((bits >> 52) - 1023).to(tl.int32)


@no_type_check
@triton.jit
def _wide(w):
    """A float32 >= 0 in float64 by its bits, for conversions and powers wait for the same unit. Below 2^-126 it is too great by
    at most 2^-126."""
    return ((w.to(tl.uint32, bitcast=True).to(tl.uint64) << 29) + 0x3800000000000000).to(tl.float64, bitcast=True)


@no_type_check
@triton.jit
def _slope(w, sign, minus_pivot, divisor_w, divisor_1, shift):
    root = tl.rsqrt(w * divisor_w + divisor_1)
    return w * ((w * sign + minus_pivot) * (root * root) + shift)


@no_type_check
@triton.jit
def _bridged(
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
    scalars += row * told
    k, x = tl.load(current + row), tl.load(clean_token + row)
    same = k == x
    k_clean = (k != vocab) if MASK else (k == k)
    apart = k_clean & (k != x)
    k_here = tl.where(k_clean, k, x)
    value_x, value_k = tl.load(logits + x), tl.load(logits + k_here)
    tl.debug_barrier()
    tl.store(logits + x, LOWEST)
    tl.store(logits + k_here, LOWEST)
    tl.debug_barrier()

    lanes = tl.arange(0, BLOCK)
    whole = vocab // (GROUP * BLOCK) * (GROUP * BLOCK)
    top_rest, sum_rest = sum_of_weights(logits, vocab, whole, BLOCK)
    top = tl.maximum(top_rest, tl.maximum(value_x * LOG2E, value_k * LOG2E))

    # in float64; logarithms to the base 2
    offset = tl.load(scalars)
    log_x = value_x.to(tl.float64) * LOG2E - top.to(tl.float64)
    log_k = value_k.to(tl.float64) * LOG2E - top.to(tl.float64)
    w_x, w_k = tl.exp2(log_x + tl.where(same, offset, 0.0)), tl.exp2(log_k + offset)
    top_w = tl.exp2(top_rest.to(tl.float64) - top.to(tl.float64))
    rest_w = sum_rest * top_w
    total = rest_w + w_x + tl.where(apart, w_k, 0.0)
    per_total = 1 / total
    rest, mu_x, mu_k = rest_w * per_total, w_x * per_total, tl.where(k_clean, w_k * per_total, 0.0)
    off = tl.where(same, rest, rest + mu_x)
    alpha_own = tl.load(scalars + 2)  # alpha / m(k)
    alpha_stay = tl.load(scalars + 3)  # alpha / (alpha + m(k))
    own_stay = tl.load(scalars + 4)  # m(k) / (alpha + m(k))
    to_slope = tl.load(scalars + 5)  # of mu_y in e_y
    slope = to_slope * per_total
    level = tl.where(same, off * alpha_own, -mu_k * alpha_stay)
    kept = off + mu_k * own_stay
    level_1 = tl.where(same, 1.0 + level, kept)
    product = tl.full([BLOCK], 1.0, tl.float64)
    exponents = tl.zeros([BLOCK], tl.int32)
    inverses = tl.zeros([BLOCK], tl.float64)
    divisor = tl.full([BLOCK], 1.0, tl.float64)
    dividend = tl.zeros([BLOCK], tl.float64)
    for start in range(whole, vocab, BLOCK):
        column = start + lanes
        v = slope * _wide(weights(logits, column, vocab, top, TAIL=True, HINT="")) + level_1
        v = tl.where(column < vocab, v, 1.0)
        dividend = dividend * v + tl.where(column < vocab, divisor, 0.0)
        divisor = divisor * v
    inverses += dividend / divisor
    product, exponents = _times(product, exponents, divisor)
    for back in range(GROUP * BLOCK, whole + 1, GROUP * BLOCK):  # from the end, which the first pass read last; without a
        first = whole - back if GRADIENT else back - GROUP * BLOCK  # gradient forwards, in fewer registers
        divisor = tl.full([BLOCK], 1.0, tl.float64)
        dividend = tl.zeros([BLOCK], tl.float64)
        for i in tl.static_range(GROUP):
            column = first + i * BLOCK + lanes
            v = slope * _wide(weights(logits, column, vocab, top, TAIL=False, HINT="")) + level_1
            dividend = dividend * v + divisor
            divisor = divisor * v
        inverses += dividend / divisor
        product, exponents = _times(product, exponents, divisor)
    if not GRADIENT:  # no gradient takes the place of the logits
        tl.debug_barrier()
        tl.store(logits + x, value_x)
        tl.store(logits + k_here, value_k)
    logs = tl.log(product) + exponents.to(tl.float64) * LN2
    taken_out = tl.where(apart, 2, 1)  # columns with w = 0 that are no candidates
    taken = taken_out.to(tl.float64)
    candidates = (vocab - taken_out).to(tl.float64)
    linear = slope * rest_w + candidates * level
    log_level, per_level = tl.log(level_1), 1 / level_1
    sum_g = tl.maximum(linear - (tl.sum(logs, 0) - taken * log_level), 0.0)
    sum_big_g = candidates - (tl.sum(inverses, 0) - taken * per_level)
    rate = tl.load(scalars + 1)  # 0 where the site does not count
    clean_bulk = tl.load(scalars + 6)  # m(y) over what k has
    clean_stay = tl.load(scalars + 7)  # m(y) / (alpha + m(k))
    alpha_x = tl.load(scalars + 8)  # alpha / (alpha + m(x))
    stay_x_own = tl.load(scalars + 9)  # (alpha + m(x)) / m(k)
    value = clean_bulk * sum_g
    e_x = -alpha_x * (rest + mu_k + clean_stay * mu_k)
    share_x = alpha_x * mu_x + tl.load(scalars + 13) * kept  # 1 + e_x
    log_1 = tl.log(share_x)
    value += tl.where(same, 0.0, stay_x_own * tl.where(tl.abs(e_x) < 0.01, _series(e_x), e_x - log_1))
    if MASK:
        mask_bulk = tl.where(k_clean, tl.load(scalars + 11), 0.0)  # m(mask) over what k has
        value += mask_bulk * tl.where(tl.abs(level) < 0.01, _series(level), level - log_level)
    factor = tl.load(weight + row)
    tl.store(loss + row, tl.where(rate > 0, rate * value, 0.0))

    if GRADIENT:
        scale = tl.where((rate > 0) & (factor != 0), rate * alpha_own * factor, 0.0)
        ratio_x = 1 / share_x
        g_x = tl.where(same, 0.0, e_x * ratio_x)
        mu_g_x = mu_x * g_x
        from_slope = tl.load(scalars + 10)  # 1 / to_slope
        g_bar = (linear - level_1 * sum_big_g) * from_slope + mu_g_x
        big_c = clean_stay * (sum_big_g + g_x)  # C / (alpha + m(k))
        if MASK:
            mask_stay = tl.where(k_clean, tl.load(scalars + 12), 0.0)  # m(mask) / (alpha + m(k))
            big_c += mask_stay * level * per_level
        e_top = slope * top_w + level
        by_top = e_top > 0
        per_top = tl.where(by_top, 1 / (slope * top_w + level_1), 1.0)
        c = tl.where(by_top, e_top * per_top, 0.0)
        pivot = tl.where(by_top, top_w, -level * from_slope * total)
        # (G - c) + (c + shift), and 1 / v by a root, which takes one instruction: so the sign goes into the dividend
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
        for start in range(0, whole, TILE * BLOCK):
            column = start + tile(BLOCK, TILE)
            w = weights(logits, column, vocab, top, TAIL=False, HINT="evict_first")
            tl.debug_barrier()  # the gradient lies where logits were that all threads have read by now
            entry = _slope(w, sign, minus_pivot, divisor_w, divisor_1, shift)
            tl.store(gradient + column, entry.to(gradient.dtype.element_ty), eviction_policy="evict_first")
        for start in range(whole, columns, BLOCK):
            column = start + lanes
            w = weights(logits, column, vocab, top, TAIL=True, HINT="evict_first")
            tl.debug_barrier()
            entry = _slope(w, sign, minus_pivot, divisor_w, divisor_1, shift)
            entry = tl.where(column < vocab, entry, 0.0)
            tl.store(gradient + column, entry.to(gradient.dtype.element_ty), mask=column < columns)
        tl.debug_barrier()
        tl.store(gradient + x, at_x.to(gradient.dtype.element_ty))
        tl.store(gradient + k_here, at_k.to(gradient.dtype.element_ty))


def prepare(k: Tensor, x: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of all rows: the tokens, and [14, N] quotients of what the reference is told, with logarithms to the base 2."""
    offset, alpha, own, stay, clean, mask, rate = scalars
    counted = (rate > 0) & (own > 0)
    own = torch.where(own > 0, own, 1)
    reached = torch.where(k == x, stay, own)
    to_slope = torch.where(k == x, stay / own, 1) * alpha / clean
    stay_x = alpha + clean
    quotients = [
        offset / LN2.value,
        torch.where(counted, rate, 0),
        alpha / own,
        alpha / stay,
        own / stay,
        to_slope,
        clean / reached,
        clean / stay,
        alpha / stay_x,
        stay_x / own,
        1 / to_slope,
        mask / reached,
        mask / stay,
        clean / stay_x,
    ]
    return k.int(), x.int(), torch.stack(quotients, -1).t()


rows = functools.partial(launch, _bridged, 1024, 8)
"""For m(y) > 0 at clean y. The logits are afterwards what they were before, but not all the time."""
