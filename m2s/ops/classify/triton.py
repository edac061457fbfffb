"""Measures of a score vector against its posterior as a Triton kernel, one program per row.

`naive.py` has the definitions. The affine inverse mu~ and the analytic weights are affine in the score, with constants that
depend only on W = sum_{y != k} (s_y - delta) and on the score of the mask. With b = alpha/m(k), n = K - 1 and e = s_mask -
delta_mask, for a clean k

    b mu~_y = s_y - delta + ((delta - curvature) W + delta_mask e) / (1 + n curvature),
    mu~_k = 1 - ((1 + n delta) W + n delta_mask e) / (b (1 + n curvature)),

for k = mask  b mu~_y = s_y - delta + (b - W) / K,  and a candidate's weight is negative where s_y < q(y) sum(s). So one pass
gives W, the least score and the counts inside the box, and with them the least mu~ and all classes. The mass below the two
levels at which mu~ and the weights turn negative takes a second pass. It runs only where some score lies below a level, and
from the end of the row, which is still in the cache.

The scores of posteriors span a hyperplane. The component of the score orthogonal to it is
(delta_mask W - (1 + n delta) e) / sqrt(1 + n curvature) for a clean k, and (W - b) / sqrt(K) at the mask.

A float32 score s is compared with a float64 bound x in float32: s >= x if and only if s is no less than the least float32
that is no less than x. So float64 arithmetic is needed only for the sums, and no comparison is rounded. The first pass
assumes that all scores are finite, which its sum shows afterwards; otherwise it is repeated with a check of each score.

The score of the projected posterior mu is s'_y = base + [s_y - sigma]_+ at a clean y != k. Here base = m(y) N, and N is the sum
of mu_z / P_t(k|z). So it is measured without being stored: the kernel runs again on the same row and applies this formula to
every score it reads (PROJECTED). sigma must be exact to float64, because mu~ divides by b. It comes from the projection in the
precision of the rows (`m2s.ops.project.triton.threshold`), and Newton's method continues from there in float64. One pass is
enough where no score lies between the two.
"""

import struct
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.classify.measures import ProjectedMeasures, ScoreMeasures
from m2s.ops.project.cpu import PASSES
from m2s.ops.project.triton import threshold
from m2s.process import RankOne

INF = tl.constexpr(float("inf"))
MOST = tl.constexpr(PASSES)
BLOCK, LINES, WARPS = 1024, 4, 8  # columns per block, blocks per tile, warps per program


@no_type_check
@triton.jit
def _least_above(x, FLOAT32: tl.constexpr):
    """The least number in the precision of the scores that is no less than x."""
    if FLOAT32:
        near = x.to(tl.float32)
        # Floats of one sign are ordered like their bits, so that the next one is an integer away.
        bits = near.to(tl.int32, bitcast=True)
        next_up = tl.where(near < 0, bits - 1, bits + 1).to(tl.float32, bitcast=True)
        return tl.where(near.to(tl.float64) < x, next_up, near)
    else:
        return x


@no_type_check
@triton.jit
def _finite(score):
    """1 in place of NaN and infinity."""
    return tl.where(tl.abs(score) < INF, score, 1.0)


@no_type_check
@triton.jit
def _bridge(score, near, beyond, base, PROJECTED: tl.constexpr):
    """The score of the projected posterior, or the score as it is. sigma = near + beyond."""
    if PROJECTED:
        return base + tl.maximum((_finite(score) - near) - beyond, 0.0)
    else:
        return score


@no_type_check
@triton.jit
def _tile(rows, start, k, vocab, spare, FULL: tl.constexpr, LOG: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr):
    """Which columns of a tile are candidates, and their scores.

    A FULL tile lies inside the row: it is read without a mask, so that its loads are issued together, and has `spare` at k.
    """
    lanes, blocks = tl.arange(0, BLOCK), tl.arange(0, LINES)[:, None] * BLOCK
    column = start + blocks + lanes[None, :]
    inside = column != k
    if FULL:
        score = tl.load((rows + start + lanes)[None, :] + blocks)
    else:
        inside = inside & (column < vocab)
        score = tl.load(rows + column, mask=inside, other=0.0)
    if LOG:
        score = tl.exp(score.to(tl.float64))
    if FULL:
        score = tl.where(inside, score, spare)
    return inside, score


@no_type_check
@triton.jit
def _lanes(
    inside,
    score,
    floor,
    ceiling,
    floor_loose,
    ceiling_loose,
    near,
    beyond,
    base,
    FULL: tl.constexpr,
    SQUARES: tl.constexpr,
    REPLACE: tl.constexpr,
    PROJECTED: tl.constexpr,
):
    """For every lane of a tile: number of scores in the two boxes, the least score, the sum, and the sum of squares.

    PROJECTED: these are of the projected scores, and two more sums are those of squares of how far the projection moves the
    scores, and of the scores as they are.
    """
    given = score
    score = _bridge(score, near, beyond, base, PROJECTED)
    within = (score >= floor) & (score <= ceiling)
    within_loose = (score >= floor_loose) & (score <= ceiling_loose)
    if REPLACE:
        score = _finite(score)
    least = score
    if not FULL:
        within, within_loose = within & inside, within_loose & inside
        least, score = tl.where(inside, score, INF), tl.where(inside, score, 0.0)
    wide = score.to(tl.float64)
    total = tl.sum(wide, 0)
    squares = tl.sum(wide * wide, 0) if SQUARES else total
    moved, given_squares = total, total
    if PROJECTED:
        given = _finite(given) if FULL else tl.where(inside, _finite(given), 0.0)
        gap = score - given
        moved, given_squares = tl.sum(gap * gap, 0), tl.sum(given * given, 0)
    inside_box, inside_loose = tl.sum(tl.where(within, 1, 0), 0), tl.sum(tl.where(within_loose, 1, 0), 0)
    return inside_box, inside_loose, tl.min(least, 0), total, squares, moved, given_squares


@no_type_check
@triton.jit
def _first_pass(
    rows,
    k,
    vocab,
    spare,
    floor,
    ceiling,
    floor_loose,
    ceiling_loose,
    near,
    beyond,
    base,
    SQUARES: tl.constexpr,
    REPLACE: tl.constexpr,
    PROJECTED: tl.constexpr,
    LOG: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The results of `_lanes` for the row."""
    within = tl.zeros([BLOCK], tl.int32)
    within_loose = tl.zeros([BLOCK], tl.int32)
    least = tl.full([BLOCK], INF, floor.dtype)
    totals = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    moved = tl.zeros([BLOCK], tl.float64)
    lengths = tl.zeros([BLOCK], tl.float64)
    full = vocab // (LINES * BLOCK) * (LINES * BLOCK)
    for start in range(0, full, LINES * BLOCK):
        inside, score = _tile(rows, start, k, vocab, spare, True, LOG, LINES, BLOCK)
        a, b, c, d, e, f, g = _lanes(
            inside, score, floor, ceiling, floor_loose, ceiling_loose, near, beyond, base, True, SQUARES, REPLACE, PROJECTED
        )
        within, within_loose, least = within + a, within_loose + b, tl.minimum(least, c)
        totals, squares = totals + d, squares + e
        if PROJECTED:
            moved, lengths = moved + f, lengths + g
    for start in range(full, vocab, BLOCK):
        inside, score = _tile(rows, start, k, vocab, spare, False, LOG, 1, BLOCK)
        a, b, c, d, e, f, g = _lanes(
            inside, score, floor, ceiling, floor_loose, ceiling_loose, near, beyond, base, False, SQUARES, REPLACE, PROJECTED
        )
        within, within_loose, least = within + a, within_loose + b, tl.minimum(least, c)
        totals, squares = totals + d, squares + e
        if PROJECTED:
            moved, lengths = moved + f, lengths + g
    first, second = tl.sum(within, 0), tl.sum(within_loose, 0)
    return first, second, tl.min(least, 0), tl.sum(totals, 0), tl.sum(squares, 0), tl.sum(moved, 0), tl.sum(lengths, 0)


@no_type_check
@triton.jit
def _below(inside, score, level, FULL: tl.constexpr):
    """For every lane of a tile: number of scores below the level, and their sum."""
    below = (score < level) if FULL else (score < level) & inside
    return tl.sum(tl.where(below, 1, 0), 0), tl.sum(tl.where(below, score, 0.0).to(tl.float64), 0)


@no_type_check
@triton.jit
def _second_pass(
    rows,
    k,
    vocab,
    spare,
    signed,
    weighed,
    near,
    beyond,
    base,
    STEP: tl.constexpr,
    REPLACE: tl.constexpr,
    PROJECTED: tl.constexpr,
    LOG: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The results of `_below` for the row and both levels. It begins where the first pass ended, with what is in the cache."""
    signed_size = tl.zeros([BLOCK], tl.int32)
    weighed_size = tl.zeros([BLOCK], tl.int32)
    signed_sums = tl.zeros([BLOCK], tl.float64)
    weighed_sums = tl.zeros([BLOCK], tl.float64)
    full = vocab // (LINES * BLOCK) * (LINES * BLOCK)
    for start in range(full, vocab, BLOCK):
        inside, score = _tile(rows, start, k, vocab, spare, False, LOG, 1, BLOCK)
        if REPLACE:
            score = _finite(score)
        score = _bridge(score, near, beyond, base, PROJECTED)
        size, total = _below(inside, score, signed, False)
        signed_size, signed_sums = signed_size + size, signed_sums + total
        if STEP:
            size, total = _below(inside, score, weighed, False)
            weighed_size, weighed_sums = weighed_size + size, weighed_sums + total
    for start in range(0, full, LINES * BLOCK):
        inside, score = _tile(rows, full - LINES * BLOCK - start, k, vocab, spare, True, LOG, LINES, BLOCK)
        if REPLACE:
            score = _finite(score)
        score = _bridge(score, near, beyond, base, PROJECTED)
        size, total = _below(inside, score, signed, True)
        signed_size, signed_sums = signed_size + size, signed_sums + total
        if STEP:
            size, total = _below(inside, score, weighed, True)
            weighed_size, weighed_sums = weighed_size + size, weighed_sums + total
    return tl.sum(signed_size, 0), tl.sum(signed_sums, 0), tl.sum(weighed_size, 0), tl.sum(weighed_sums, 0)


@no_type_check
@triton.jit
def _above(inside, score, near, FULL: tl.constexpr):
    """For every lane of a tile: sum of [s - near]_+, number of scores from `near` on, the least and the greatest one below."""
    score = _finite(score)
    above = (score >= near) if FULL else (score >= near) & inside
    below = (score < near) if FULL else (score < near) & inside
    mass, size = tl.sum(tl.where(above, score - near, 0.0).to(tl.float64), 0), tl.sum(tl.where(above, 1, 0), 0)
    return mass, size, tl.min(tl.where(above, score, INF), 0), tl.max(tl.where(below, score, -INF), 0)


@no_type_check
@triton.jit
def _above_pass(rows, k, vocab, spare, near, LOG: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr):
    """The results of `_above` for the row, without the copy of `spare` at k."""
    masses = tl.zeros([BLOCK], tl.float64)
    sizes = tl.zeros([BLOCK], tl.int32)
    least = tl.full([BLOCK], INF, tl.float64)
    greatest = tl.full([BLOCK], -INF, tl.float64)
    full = vocab // (LINES * BLOCK) * (LINES * BLOCK)
    for start in range(0, full, LINES * BLOCK):
        inside, score = _tile(rows, start, k, vocab, spare, True, LOG, LINES, BLOCK)
        a, b, c, d = _above(inside, score, near, True)
        masses, sizes, least, greatest = masses + a, sizes + b, tl.minimum(least, c), tl.maximum(greatest, d)
    for start in range(full, vocab, BLOCK):
        inside, score = _tile(rows, start, k, vocab, spare, False, LOG, 1, BLOCK)
        a, b, c, d = _above(inside, score, near, False)
        masses, sizes, least, greatest = masses + a, sizes + b, tl.minimum(least, c), tl.maximum(greatest, d)
    copied = _finite(spare).to(tl.float64) - near
    copies = tl.where((k < full) & (copied >= 0), 1.0, 0.0)
    mass, size = tl.sum(masses, 0) - copies * copied, tl.sum(sizes, 0).to(tl.float64) - copies
    return mass, size, tl.min(least, 0), tl.max(greatest, 0)


@no_type_check
@triton.jit
def _refine(
    rows,
    k,
    vocab,
    spare,
    start,
    b,
    origin,
    gain,
    known,
    LOG: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sigma in float64 and the sum of [s - sigma]_+, by Newton's method from a start of lower precision.

    sigma is returned as the place of the last pass and the step from there: s - sigma keeps its digits where it is small.
    """
    # Below the root in spite of the rounding of the start: then no step can leave the range of the scores.
    near = tl.where(tl.abs(start) < INF, start - tl.abs(start) * 5e-7, 0.0)
    place, beyond, mass = near, near * 0.0, near * 0.0
    moving, passes = known == 0, 0
    while moving:
        here, size, least, greatest = _above_pass(rows, k, vocab, spare, near, LOG, LINES, BLOCK)
        active = tl.where(size > 0, (here - b) / tl.where(size > 0, size, 1.0), -INF)
        step = tl.maximum(active, (here - (near - origin) * gain) / (size + gain))
        empty = (step > -INF) == 0  # no score above, and only the branch that needs one
        root = tl.where(empty, 0.0, near + step)
        # between the old and the new place lies no score, and the mass is not the difference of much larger numbers
        same = tl.where(step >= 0, root <= least, root >= greatest) & (size * tl.abs(step) <= b)
        same = same | (tl.abs(step) <= 2.3e-16 * tl.abs(near))
        mass, place, beyond, near = here - size * step, near, tl.where(empty, -near, step), root
        passes += 1
        moving = ((same == 0) | empty) & (passes < MOST)
    return place, beyond, tl.maximum(mass, 0.0)


@no_type_check
@triton.jit
def _mass(size, total, level):
    """sum [level - s]_+ from the number of scores below the level and their sum."""
    return tl.where(size > 0, tl.maximum(size * level - total, 0.0), 0.0)


@no_type_check
@triton.jit
def _measure(
    rows,
    counts,
    sums,
    current,
    scalars,
    solved,
    count,
    stride,
    vocab,
    loose_low,
    loose_high,
    MASK: tl.constexpr,
    STEP: tl.constexpr,
    PROJECTED: tl.constexpr,
    LOG: tl.constexpr,
    FLOAT32: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Measure one row. `scalars` are the six of `SiteCoefficients`, then alpha, q(clean), q(mask) of the step: [C, count].

    PROJECTED: measure the projected score. `solved` has the start of sigma and the sum of the scores as they are, [2, count].
    """
    row = tl.program_id(0).to(tl.int64)
    rows += row * stride
    scalars += row
    k = tl.load(current + row).to(tl.int32)
    alpha, m_k, p_kk = tl.load(scalars), tl.load(scalars + count), tl.load(scalars + 2 * count)
    m_clean, m_mask, rate = tl.load(scalars + 3 * count), tl.load(scalars + 4 * count), tl.load(scalars + 5 * count)
    known, counted, masked = m_k == 0, rate > 0, k == vocab
    m_k = tl.where(known, 1.0, m_k)
    n = (vocab - 1).to(tl.float64)
    candidates = tl.where(masked, n + 1, n)
    unit, slope = m_k / alpha, alpha / m_k
    delta, delta_mask = m_clean / tl.where(masked, m_k, p_kk), m_mask / p_kk
    curvature = 2 * delta + n * delta * delta + delta_mask * delta_mask
    spread = 1 + n * curvature
    low, high = tl.where(counted, delta, 0.0), tl.where(counted, (alpha + m_clean) / m_k, INF)
    # Triton passes a Python float in float32. The factors are near 1 and come as the bits of a float64 in an integer.
    less, more = loose_low.to(tl.float64, bitcast=True), loose_high.to(tl.float64, bitcast=True)

    # in a full tile the score at k is replaced by `spare`, the score of another candidate; its contributions are subtracted
    # below
    spare = tl.load(rows + tl.where(k == 0, 1, 0))
    if LOG:
        spare = tl.exp(spare.to(tl.float64))
    full = vocab // (LINES * BLOCK) * (LINES * BLOCK)
    k_in_full_tile = tl.where(k < full, 1.0, 0.0)
    floor, floor_loose = _least_above(low, FLOAT32), _least_above(low * less, FLOAT32)
    # the greatest number that is no more than x is minus the least that is no less than -x
    ceiling, ceiling_loose = -_least_above(-high, FLOAT32), -_least_above(-high * more, FLOAT32)
    near, beyond_near = delta * 0.0, delta * 0.0  # sigma is their sum
    base, base_mask = delta * 0.0, delta * 0.0
    given_mask = delta * 0.0  # the score of the mask, as it is
    spare_score = spare
    if PROJECTED:
        if MASK:
            given_mask = tl.load(rows + vocab, mask=masked == 0, other=0.0).to(tl.float64)
            if LOG:
                given_mask = tl.where(masked, 0.0, tl.exp(given_mask))
            given_mask = _finite(given_mask)
        shift = m_clean / p_kk  # delta of a clean k
        origin = shift + (n * shift - tl.load(solved + count + row)) * shift - delta_mask * (given_mask - delta_mask)
        origin = tl.where(masked, -INF, origin)
        gain = 1 / tl.where(masked, 1.0, 2 * shift + n * shift * shift + delta_mask * delta_mask)
        near, beyond_near, mass = _refine(
            rows, k, vocab, spare, tl.load(solved + row), slope, origin, gain, known | (alpha == 0), LOG, LINES, BLOCK
        )
        others = mass / slope  # the posterior of all tokens but k
        active = masked | ((near + beyond_near - origin) * gain > slope)
        common = others / m_k + tl.where(active, 0.0, tl.maximum(1 - others, 0.0)) / p_kk
        base, base_mask = m_clean * common, m_mask * common
        spare_score = _bridge(spare, near, beyond_near, base, True)
    within, within_loose, least, sum_scores, squares, moved, given_squares = _first_pass(
        rows,
        k,
        vocab,
        spare,
        floor,
        ceiling,
        floor_loose,
        ceiling_loose,
        near,
        beyond_near,
        base,
        MASK,
        False,
        PROJECTED,
        LOG,
        LINES,
        BLOCK,
    )
    has_nonfinite = (tl.abs(sum_scores) < INF) == 0  # written so that it is true for NaN
    if not PROJECTED:  # noqa: SIM102  (a constant of the compiler, and a condition of the kernel)
        if has_nonfinite:
            within, within_loose, least, sum_scores, squares, moved, given_squares = _first_pass(
                rows,
                k,
                vocab,
                spare,
                floor,
                ceiling,
                floor_loose,
                ceiling_loose,
                near,
                beyond_near,
                base,
                MASK,
                True,
                PROJECTED,
                LOG,
                LINES,
                BLOCK,
            )
    # the mask itself comes after the candidates, so that it takes no registers during the pass
    outside = tl.full([], 0, tl.int64)
    beyond = tl.full([], 0, tl.int64)
    s_mask = delta * 0.0
    if MASK:
        if PROJECTED:
            s_mask = tl.where(masked, 0.0, base_mask)
        else:
            s_mask = tl.load(rows + vocab, mask=masked == 0, other=0.0).to(tl.float64)
            if LOG:
                s_mask = tl.where(masked, 0.0, tl.exp(s_mask))
        low_mask, high_mask = tl.where(counted, delta_mask, 0.0), tl.where(counted, m_mask / m_k, INF)
        outside += (((s_mask >= low_mask) & (s_mask <= high_mask) | masked) == 0).to(tl.int64)
        beyond += (((s_mask >= low_mask * less) & (s_mask <= high_mask * more) | masked) == 0).to(tl.int64)
        s_mask = _finite(s_mask)
    e = tl.where(masked, 0.0, s_mask - delta_mask)

    spare_within = tl.where((spare_score >= floor) & (spare_score <= ceiling), k_in_full_tile, 0.0)
    spare_within_loose = tl.where((spare_score >= floor_loose) & (spare_score <= ceiling_loose), k_in_full_tile, 0.0)
    tl.store(counts + row, outside + (candidates + spare_within).to(tl.int64) - within)
    tl.store(counts + count + row, beyond + (candidates + spare_within_loose).to(tl.int64) - within_loose)
    spare_float64 = _finite(spare_score).to(tl.float64)
    sum_scores -= k_in_full_tile * spare_float64
    squares -= k_in_full_tile * (spare_float64 * spare_float64)
    # mu~_y = unit (s_y - delta + constant + factor W): negative where s_y < `signed`; a weight is negative below `weighed`
    lowest = least.to(tl.float64)
    w_sum = sum_scores - candidates * delta
    constant = tl.where(masked, slope / (n + 1), delta_mask * e / spread)
    factor = tl.where(masked, -1 / (n + 1), (delta - curvature) / spread)
    signed = tl.where(known, -INF, delta - constant - factor * w_sum)
    weighed = signed * 0 - INF
    if STEP:
        alpha_step, q_clean = tl.load(scalars + 6 * count), tl.load(scalars + 7 * count)
        q_mask = tl.load(scalars + 8 * count)
        q_k = tl.where(masked, q_mask, q_clean)
        weighed = tl.where(q_k > 0, q_clean * (1 + s_mask + sum_scores), -INF)
    signed_level, weighed_level = _least_above(signed, FLOAT32), _least_above(weighed, FLOAT32)
    signed_size = tl.full([], 0, tl.int32)
    weighed_size = tl.full([], 0, tl.int32)
    signed_sum = tl.full([], 0, tl.float64)
    weighed_sum = tl.full([], 0, tl.float64)
    again = lowest < tl.maximum(signed, weighed)
    if again & (has_nonfinite == 0):
        signed_size, signed_sum, weighed_size, weighed_sum = _second_pass(
            rows,
            k,
            vocab,
            spare,
            signed_level,
            weighed_level,
            near,
            beyond_near,
            base,
            STEP,
            False,
            PROJECTED,
            LOG,
            LINES,
            BLOCK,
        )
    if not PROJECTED:  # noqa: SIM102
        if again & has_nonfinite:
            signed_size, signed_sum, weighed_size, weighed_sum = _second_pass(
                rows,
                k,
                vocab,
                spare,
                signed_level,
                weighed_level,
                near,
                beyond_near,
                base,
                STEP,
                True,
                PROJECTED,
                LOG,
                LINES,
                BLOCK,
            )

    # results: least mu~, mass of negative mu~, distance from the hyperplane, negative weights and their mass
    at_k = 1 - unit * ((1 + n * delta) * w_sum + n * delta_mask * e) / spread
    at_k = tl.where(known | masked, INF, at_k)
    lowest = tl.minimum(unit * (lowest - delta + constant + factor * w_sum), at_k)
    tl.store(sums + row, tl.where(known, 0.0, lowest))
    spare_below = tl.where(again & (_finite(spare_score) < signed_level), k_in_full_tile, 0.0)
    mass = _mass(signed_size.to(tl.float64) - spare_below, signed_sum - spare_below * spare_float64, signed)
    tl.store(sums + count + row, unit * mass + tl.maximum(-at_k, 0.0))
    if MASK:
        miss = (delta_mask * w_sum - (1 + n * delta) * e) / tl.sqrt(spread)
        miss = tl.where(masked, (w_sum - slope) / tl.sqrt(n + 1), miss)
        length = tl.sqrt(squares + s_mask * s_mask)
        tl.store(sums + 2 * count + row, tl.where(counted, tl.abs(miss) / tl.maximum(length, 1e-300), 0.0))
    else:
        tl.store(sums + 2 * count + row, 0.0)
    negative = tl.full([], 0, tl.int64)
    dropped = delta * 0.0
    if STEP:
        spare_below = tl.where(again & (_finite(spare_score) < weighed_level), k_in_full_tile, 0.0)
        size = weighed_size.to(tl.float64) - spare_below
        mass = _mass(size, weighed_sum - spare_below * spare_float64, weighed)
        at_k = 1 - q_k * (1 + s_mask + sum_scores)
        negative += size.to(tl.int64) + ((at_k < 0) & (alpha_step + q_k > 0)).to(tl.int64)
        dropped = mass * q_k + tl.maximum(-at_k, 0.0) * (alpha_step + q_k)
        if MASK:
            at_mask = tl.where(masked, 0.0, s_mask - q_mask * (1 + s_mask + sum_scores))
            negative += ((at_mask < 0) & (q_k > 0)).to(tl.int64)
            dropped += tl.maximum(-at_mask, 0.0) * q_k
        dropped = dropped / alpha_step
    tl.store(counts + 2 * count + row, negative)
    tl.store(sums + 3 * count + row, dropped)
    if PROJECTED:
        spare_given = _finite(spare).to(tl.float64)
        gap = spare_score - spare_given
        gap_mask = tl.where(masked, 0.0, base_mask - given_mask)
        moved += gap_mask * gap_mask - k_in_full_tile * (gap * gap)
        given_squares += given_mask * given_mask - k_in_full_tile * (spare_given * spare_given)
        ratio = tl.sqrt(tl.maximum(moved, 0.0)) / tl.maximum(tl.sqrt(tl.maximum(given_squares, 0.0)), 1e-300)
        tl.store(sums + 4 * count + row, tl.where(counted, ratio, 0.0))
    else:
        tl.store(sums + 4 * count + row, sum_scores)


@torch.library.custom_op("m2s::measure_scores", mutates_args=())
def _launch(
    rows: Tensor,
    k: Tensor,
    scalars: Tensor,
    solved: Tensor | None,
    vocab: int,
    has_mask: bool,
    box_tolerance: float,
    log: bool,
    block: int,
    lines: int,
    warps: int,
) -> tuple[Tensor, Tensor]:
    """Start one program per row; return counts [3, N] and sums [5, N]. With `solved`, projected scores are measured."""
    counts = torch.empty(3, len(rows), dtype=torch.int64, device=rows.device)
    sums = torch.empty(5, len(rows), dtype=torch.float64, device=rows.device)
    if len(rows):
        block = min(block, max(64, triton.next_power_of_2(vocab)))
        _measure[(len(rows),)](
            rows,
            counts,
            sums,
            k,
            scalars,
            scalars if solved is None else solved,  # a pointer that is not read
            len(rows),
            rows.stride(0),
            vocab,
            *struct.unpack(
                "<2q", struct.pack("<2d", 1 - box_tolerance, 1 + box_tolerance)
            ),  # as bits: a float argument would be rounded to float32
            MASK=has_mask,
            STEP=len(scalars) > 6,
            PROJECTED=solved is not None,
            LOG=log,
            FLOAT32=rows.dtype == torch.float32 and not log,
            LINES=lines,
            BLOCK=block,
            num_warps=warps,
        )
    return counts, sums


@_launch.register_fake
def _(
    rows: Tensor,
    k: Tensor,
    scalars: Tensor,
    solved: Tensor | None,
    vocab: int,
    has_mask: bool,
    box_tolerance: float,
    log: bool,
    block: int,
    lines: int,
    warps: int,
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(3, len(rows), dtype=torch.int64), rows.new_empty(5, len(rows), dtype=torch.float64)


def measure_scores(
    rows: Tensor,
    x_t: Tensor,
    t: Tensor,
    s: Tensor | None,
    process: RankOne,
    box_tolerance: float,
    log: bool,
    block: int = BLOCK,
    lines: int = LINES,
    warps: int = WARPS,
) -> ScoreMeasures:
    """Run `naive.measure_scores` for rows in float32 or float64 as a kernel.

    Args:
        rows: Scores `[N, V]`, or log-scores.
        x_t: Current tokens `[N]`.
        t: Times `[N]`.
        s: Times of the analytic step's end `[N]`, or None.
        process: A rank-one process.
        box_tolerance: Relative tolerance of the box.
        log: Whether the rows are log-scores.
        block: Columns per block.
        lines: Blocks per tile.
        warps: Warps per program.

    Returns:
        The measures, `[N]` each.
    """
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    scalars, has_mask = _scalars(x_t, t, s, process), process.mask is not None
    given = (rows, x_t.contiguous(), scalars, None, process.vocab, has_mask, box_tolerance, log, block, lines, warps)
    return _measures(*_launch(*given))


def measure_projected(
    rows: Tensor,
    x_t: Tensor,
    t: Tensor,
    s: Tensor | None,
    process: RankOne,
    box_tolerance: float,
    block: int = BLOCK,
    lines: int = LINES,
    warps: int = WARPS,
) -> ProjectedMeasures:
    """Run `naive_projected.measure_projected` for log-scores in float32 or float64 as a kernel.

    Args:
        rows: Log-scores `[N, V]`.
        x_t: Current tokens `[N]`.
        t: Times `[N]`.
        s: Times of the analytic step's end `[N]`, or None.
        process: A rank-one process.
        box_tolerance: Relative tolerance of the box.
        block: Columns per block.
        lines: Blocks per tile.
        warps: Warps per program.

    Returns:
        The measures before and after projection, `[N]` each.
    """
    rows, k = rows if rows.stride(-1) == 1 else rows.contiguous(), x_t.contiguous()
    scalars, has_mask = _scalars(x_t, t, s, process), process.mask is not None
    sizes = (process.vocab, has_mask, box_tolerance, True, block, lines, warps)
    counts, sums = _launch(rows, k, scalars, None, *sizes)
    start = threshold(rows, k, process.at(x_t, t), process.states, process.mask, log=True)
    after = _launch(rows, k, scalars, torch.stack([start, sums[4]]), *sizes)
    return ProjectedMeasures(_measures(counts, sums), _measures(*after), after[1][4], sums[4])


def _scalars(x_t: Tensor, t: Tensor, s: Tensor | None, process: RankOne) -> Tensor:
    """The scalars of every row as the kernel reads them, [C, N]."""
    scalars = list(process.at(x_t, t))
    if s is not None:
        alpha_step, mixing = process.removed_noise(s, t)
        scalars += [alpha_step, *mixing]
    return torch.stack(scalars)


def _measures(counts: Tensor, sums: Tensor) -> ScoreMeasures:
    """The measures from what the kernel returns."""
    (outside, beyond, negative), (lowest, signed_mass, off_plane, negative_mass, _) = counts, sums
    return ScoreMeasures(outside, beyond, lowest, signed_mass, off_plane, negative, negative_mass)
