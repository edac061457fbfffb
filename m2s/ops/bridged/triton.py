"""Score entropy through the rank-one bridge and its gradient, one program for a row; `reference.py` has the mathematics.

Three passes over the row, of which the later ones find it in cache: the greatest logit and the sum of the weights; the sums
of g and of G; the gradient. The row's scalars and its sums are float64, one logarithm and one division for eight columns.
"""

import functools
from typing import no_type_check

import triton
import triton.language as tl

from m2s.ops.launch import launch

LOWEST = tl.constexpr(-3.0e38)  # what is left out of a maximum


@no_type_check
@triton.jit
def _excess(e, one_plus_e):
    z = e / (e + 2)
    square = z * z
    near = z * (e - square * (2 / 3 + square * (2 / 5 + square * (2 / 7))))
    return tl.where(tl.abs(e) < 0.01, near, e - tl.log(one_plus_e))


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
    offset = tl.load(scalars + row)
    alpha = tl.load(scalars + rows + row)
    own = tl.load(scalars + 2 * rows + row)
    stay = tl.load(scalars + 3 * rows + row)
    clean = tl.load(scalars + 4 * rows + row)
    mask_mass = tl.load(scalars + 5 * rows + row)
    rate = tl.load(scalars + 6 * rows + row)
    counted = (rate > 0) & (own > 0)
    own = tl.where(own > 0, own, 1.0)
    same = k == x
    k_clean = (k != vocab) if MASK else (k == k)
    apart = k_clean & (k != x)
    k_here = tl.where(k_clean, k, x)

    lanes = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], LOWEST, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        column = start + lanes
        inside = (column < vocab) & (column != x) & (column != k_here)
        value = tl.where(inside, tl.load(logits + column, mask=column < columns, other=0.0), LOWEST)
        higher = tl.maximum(tops, value)
        sums = sums * tl.exp(tops - higher) + tl.exp(value - higher)
        tops = higher
    top_rest = tl.max(tops, 0)
    sum_rest = tl.sum((sums * tl.exp(tops - top_rest)).to(tl.float64), 0)
    value_x, value_k = tl.load(logits + x), tl.load(logits + k_here)
    top = tl.maximum(top_rest, tl.maximum(value_x, value_k))
    top_w = tl.exp((top_rest - top).to(tl.float64))
    rest_w = sum_rest * top_w
    logit_x = value_x.to(tl.float64) - top.to(tl.float64)
    logit_k = value_k.to(tl.float64) - top.to(tl.float64)
    w_x, w_k = tl.exp(logit_x + tl.where(same, offset, 0.0)), tl.exp(logit_k + offset)
    total = rest_w + w_x + tl.where(apart, w_k, 0.0)
    rest, mu_x, mu_k = rest_w / total, w_x / total, tl.where(k_clean, w_k / total, 0.0)
    log_mu_x = logit_x - tl.log(total)
    off = tl.where(same, rest, rest + mu_x)

    compared = clean > 0
    slope = tl.where(same, stay / own, 1.0) * alpha / tl.where(compared, clean, 1.0) / total
    level = tl.where(same, off * alpha / own, -mu_k * alpha / stay)
    kept = off + mu_k * own / stay
    level_1 = tl.where(counted, tl.where(same, 1.0 + level, kept), 1.0)
    candidates = vocab - tl.where(apart, 2, 1)
    linear = slope * rest_w + candidates.to(tl.float64) * level
    part = tl.arange(0, BLOCK // 8)
    logs = tl.zeros([BLOCK // 8], tl.float64)
    quotients = tl.zeros([BLOCK // 8], tl.float64)
    for start in range(0, vocab, BLOCK):
        divisor = tl.full([BLOCK // 8], 1.0, tl.float64)
        dividend = tl.zeros([BLOCK // 8], tl.float64)
        for i in tl.static_range(8):
            column = start + i * (BLOCK // 8) + part
            inside = (column < vocab) & (column != x) & (column != k_here)
            value = tl.load(logits + column, mask=column < columns, other=0.0)
            scaled = slope * tl.exp(value - top).to(tl.float64)
            v = tl.where(inside, scaled + level_1, 1.0)
            dividend = dividend * v + divisor * tl.where(inside, scaled + level, 0.0)
            divisor = divisor * v
        logs += tl.log(divisor)
        quotients += dividend / divisor
    sum_g = tl.maximum(linear - tl.sum(logs, 0), 0.0)
    sum_big_g = tl.sum(quotients, 0)
    bulk = tl.where(compared, clean / tl.where(same, stay, own) * sum_g, alpha / own * rest)

    stay_x = alpha + clean
    e_x = -alpha / stay_x * (rest + mu_k + clean * mu_k / stay)
    score_x = tl.where(compared, alpha * mu_x + clean * kept, 1.0)
    log_1 = tl.where(compared, tl.log(score_x / stay_x), log_mu_x)
    entropy_x = stay_x / own * tl.where(e_x > -0.5, _excess(e_x, tl.exp(log_1)), e_x - log_1)
    value = bulk + tl.where(same, 0.0, entropy_x)
    excess_level = _excess(level, level_1)
    candidate = k_clean & (mask_mass > 0)
    if MASK:
        value += tl.where(candidate, mask_mass / tl.where(same, stay, own) * excess_level, 0.0)
    factor = tl.load(weight + row)
    tl.store(loss + row, tl.where(counted, rate * value, 0.0))

    if GRADIENT:
        sum_mu_g = (linear - level_1 * sum_big_g) / (slope * total)
        ratio_x = tl.where(compared, stay_x / score_x, 0.0)
        mu_g_x = tl.where(same, 0.0, tl.where(compared, mu_x * e_x * ratio_x, e_x))
        g_bar = tl.where(compared, sum_mu_g, rest) + mu_g_x
        big_c = clean * (sum_big_g + tl.where(same, 0.0, e_x * ratio_x))
        if MASK:
            big_c += tl.where(candidate, mask_mass * level / level_1, 0.0)
        shift = mu_k * big_c / stay - g_bar
        scale = tl.where(counted & (factor != 0), rate * alpha / own * factor, 0.0)
        gradient_k = -scale * mu_k * (g_bar + off * big_c / stay)
        gradient_x = scale * (mu_g_x + mu_x * shift)
        e_top, v_top = slope * top_w + level, slope * top_w + level_1
        by_top = e_top > 0
        lift = tl.where(compared, tl.where(by_top, slope / v_top, slope), 0.0) * (scale / total)
        pivot = tl.where(by_top, top_w, -level / slope).to(tl.float32)
        c = tl.where(compared, tl.where(by_top, e_top / v_top, 0.0), 1.0)
        shift = ((c + shift) * (scale / total)).to(tl.float32)
        flat = lift == 0
        divisor_1 = tl.where(flat, float("inf"), level_1 / tl.where(flat, 1.0, lift)).to(tl.float32)
        divisor_w = tl.where(flat, 1.0, slope / tl.where(flat, 1.0, lift)).to(tl.float32)
        at_k = tl.where(k_clean, gradient_k, gradient_x).to(tl.float32)
        at_x = tl.where(same, gradient_k, gradient_x).to(tl.float32)
        gradient += row * columns
        for start in range(0, columns, BLOCK):
            column = start + lanes
            w = tl.exp(tl.load(logits + column, mask=column < columns, other=0.0) - top)
            entry = w * ((w - pivot) / (w * divisor_w + divisor_1) + shift)
            entry = tl.where(column == x, at_x, entry)
            entry = tl.where(column == k_here, at_k, entry)
            entry = tl.where(column < vocab, entry, 0.0)
            tl.store(gradient + column, entry.to(gradient.dtype.element_ty), mask=column < columns)


rows = functools.partial(launch, _bridged, 4096, 16)
