"""What a score vector says of its posterior, one program for a row; `reference.py` has the definitions.

The affine inverse and the analytic weights are straight lines in the score, with constants that hang on W = sum_{y != k} (s_y -
delta) alone (and on the mask's score). With b = alpha/m(k), n = K - 1 and e = s_mask - delta_mask, for a clean k

    b mu~_y = s_y - delta + ((delta - curvature) W + delta_mask e) / (1 + n curvature),
    mu~_k = 1 - ((1 + n delta) W + n delta_mask e) / (b (1 + n curvature)),

for k = mask  b mu~_y = s_y - delta + (b - W) / K,  and a candidate's weight is negative where s_y < q(y) sum(s). So one pass
gives W, the least score and the counts in the box: that is the lowest mu~ and all classes. How much lies below the two levels
at which mu~ and the weights turn negative takes a second pass, only where something does, and from the end of the row, which is
still in cache.

The bridged scores miss one direction: the score's part in it is (delta_mask W - (1 + n delta) e) / sqrt(1 + n curvature) for a
clean k, and (W - b) / sqrt(K) at the mask.

A score in float32 is compared with a bound x in float64 as with a float32: s >= x where s is no less than the least float32
that is no less than x. So float64 is left to the sums, and no comparison is rounded. That all scores are finite is seen from
their sum; where one is not, the pass is made again with a look at each.
"""

import struct
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.classify.naive import ScoreMeasures
from m2s.process import RankOne

INF = tl.constexpr(float("inf"))
BLOCK, LINES, WARPS = 1024, 4, 8  # columns in a block, blocks in a tile, warps of a program


@no_type_check
@triton.jit
def _least_above(x, NARROW: tl.constexpr):
    """The least number of the scores' precision that is no less than x."""
    if NARROW:
        near = x.to(tl.float32)
        bits = near.to(tl.int32, bitcast=True)
        next_up = tl.where(near < 0, bits - 1, bits + 1).to(tl.float32, bitcast=True)
        return tl.where(near.to(tl.float64) < x, next_up, near)
    else:
        return x


@no_type_check
@triton.jit
def _finite(score):
    return tl.where(tl.abs(score) < INF, score, 1.0)


@no_type_check
@triton.jit
def _tile(rows, start, k, vocab, spare, WHOLE: tl.constexpr, LOG: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr):
    """Which columns of a tile are candidates, and their scores. A tile that is WHOLE is read without a look at where the row
    ends, so that its loads stand together, and has `spare` at k."""
    lanes, blocks = tl.arange(0, BLOCK), tl.arange(0, LINES)[:, None] * BLOCK
    column = start + blocks + lanes[None, :]
    inside = column != k
    if WHOLE:
        score = tl.load((rows + start + lanes)[None, :] + blocks)
    else:
        inside = inside & (column < vocab)
        score = tl.load(rows + column, mask=inside, other=0.0)
    if LOG:
        score = tl.exp(score.to(tl.float64))
    if WHOLE:
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
    WHOLE: tl.constexpr,
    SQUARES: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """Of every lane of a tile: how many scores are in the two boxes, the least, the sum and that of the squares."""
    within = (score >= floor) & (score <= ceiling)
    within_loose = (score >= floor_loose) & (score <= ceiling_loose)
    if CLEAN:
        score = _finite(score)
    least = score
    if not WHOLE:
        within, within_loose = within & inside, within_loose & inside
        least, score = tl.where(inside, score, INF), tl.where(inside, score, 0.0)
    wide = score.to(tl.float64)
    total = tl.sum(wide, 0)
    squares = tl.sum(wide * wide, 0) if SQUARES else total
    return tl.sum(tl.where(within, 1, 0), 0), tl.sum(tl.where(within_loose, 1, 0), 0), tl.min(least, 0), total, squares


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
    SQUARES: tl.constexpr,
    CLEAN: tl.constexpr,
    LOG: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What `_lanes` has, of the row."""
    within = tl.zeros([BLOCK], tl.int32)
    within_loose = tl.zeros([BLOCK], tl.int32)
    least = tl.full([BLOCK], INF, floor.dtype)
    totals = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    whole = vocab // (LINES * BLOCK) * (LINES * BLOCK)
    for start in range(0, whole, LINES * BLOCK):
        inside, score = _tile(rows, start, k, vocab, spare, True, LOG, LINES, BLOCK)
        a, b, c, d, e = _lanes(inside, score, floor, ceiling, floor_loose, ceiling_loose, True, SQUARES, CLEAN)
        within, within_loose, least = within + a, within_loose + b, tl.minimum(least, c)
        totals, squares = totals + d, squares + e
    for start in range(whole, vocab, BLOCK):
        inside, score = _tile(rows, start, k, vocab, spare, False, LOG, 1, BLOCK)
        a, b, c, d, e = _lanes(inside, score, floor, ceiling, floor_loose, ceiling_loose, False, SQUARES, CLEAN)
        within, within_loose, least = within + a, within_loose + b, tl.minimum(least, c)
        totals, squares = totals + d, squares + e
    return tl.sum(within, 0), tl.sum(within_loose, 0), tl.min(least, 0), tl.sum(totals, 0), tl.sum(squares, 0)


@no_type_check
@triton.jit
def _below(inside, score, level, WHOLE: tl.constexpr):
    """Of every lane of a tile: how many scores lie below the level, and their sum."""
    below = (score < level) if WHOLE else (score < level) & inside
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
    STEP: tl.constexpr,
    CLEAN: tl.constexpr,
    LOG: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What `_below` has, of the row and of both levels. It begins where the first pass ended."""
    signed_size = tl.zeros([BLOCK], tl.int32)
    weighed_size = tl.zeros([BLOCK], tl.int32)
    signed_sums = tl.zeros([BLOCK], tl.float64)
    weighed_sums = tl.zeros([BLOCK], tl.float64)
    whole = vocab // (LINES * BLOCK) * (LINES * BLOCK)
    for start in range(whole, vocab, BLOCK):
        inside, score = _tile(rows, start, k, vocab, spare, False, LOG, 1, BLOCK)
        if CLEAN:
            score = _finite(score)
        size, total = _below(inside, score, signed, False)
        signed_size, signed_sums = signed_size + size, signed_sums + total
        if STEP:
            size, total = _below(inside, score, weighed, False)
            weighed_size, weighed_sums = weighed_size + size, weighed_sums + total
    for start in range(0, whole, LINES * BLOCK):
        inside, score = _tile(rows, whole - LINES * BLOCK - start, k, vocab, spare, True, LOG, LINES, BLOCK)
        if CLEAN:
            score = _finite(score)
        size, total = _below(inside, score, signed, True)
        signed_size, signed_sums = signed_size + size, signed_sums + total
        if STEP:
            size, total = _below(inside, score, weighed, True)
            weighed_size, weighed_sums = weighed_size + size, weighed_sums + total
    return tl.sum(signed_size, 0), tl.sum(signed_sums, 0), tl.sum(weighed_size, 0), tl.sum(weighed_sums, 0)


@no_type_check
@triton.jit
def _mass(size, total, level):
    """sum [level - s]_+, of how many lie below the level and their sum."""
    return tl.where(size > 0, tl.maximum(size * level - total, 0.0), 0.0)


@no_type_check
@triton.jit
def _measure(
    rows,
    counts,
    sums,
    current,
    scalars,
    count,
    stride,
    vocab,
    loose_low,
    loose_high,
    MASK: tl.constexpr,
    STEP: tl.constexpr,
    LOG: tl.constexpr,
    NARROW: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows += row * stride
    scalars += row
    k = tl.load(current + row).to(tl.int32)
    alpha, own, stay = tl.load(scalars), tl.load(scalars + count), tl.load(scalars + 2 * count)
    plain, masking, rate = tl.load(scalars + 3 * count), tl.load(scalars + 4 * count), tl.load(scalars + 5 * count)
    known, counted, masked = own == 0, rate > 0, k == vocab
    own = tl.where(known, 1.0, own)
    n = (vocab - 1).to(tl.float64)
    candidates = tl.where(masked, n + 1, n)
    unit, slope = own / alpha, alpha / own
    delta, delta_mask = plain / tl.where(masked, own, stay), masking / stay
    curvature = 2 * delta + n * delta * delta + delta_mask * delta_mask
    spread = 1 + n * curvature
    low, high = tl.where(counted, delta, 0.0), tl.where(counted, (alpha + plain) / own, INF)
    less, more = loose_low.to(tl.float64, bitcast=True), loose_high.to(tl.float64, bitcast=True)

    # in a whole tile k has the score of another candidate, which is taken off again
    spare = tl.load(rows + tl.where(k == 0, 1, 0))
    if LOG:
        spare = tl.exp(spare.to(tl.float64))
    whole = vocab // (LINES * BLOCK) * (LINES * BLOCK)
    idle = tl.where(k < whole, 1.0, 0.0)
    floor, floor_loose = _least_above(low, NARROW), _least_above(low * less, NARROW)
    ceiling, ceiling_loose = -_least_above(-high, NARROW), -_least_above(-high * more, NARROW)
    within, within_loose, least, scored, squares = _first_pass(
        rows, k, vocab, spare, floor, ceiling, floor_loose, ceiling_loose, MASK, False, LOG, LINES, BLOCK
    )
    clean = (tl.abs(scored) < INF) == 0
    if clean:
        within, within_loose, least, scored, squares = _first_pass(
            rows, k, vocab, spare, floor, ceiling, floor_loose, ceiling_loose, MASK, True, LOG, LINES, BLOCK
        )
    # the mask itself, looked at after the candidates: nothing of it takes registers while they are read
    outside = tl.full([], 0, tl.int64)
    beyond = tl.full([], 0, tl.int64)
    last = delta * 0.0
    if MASK:
        last = tl.load(rows + vocab, mask=masked == 0, other=0.0).to(tl.float64)
        if LOG:
            last = tl.where(masked, 0.0, tl.exp(last))
        low_last, high_last = tl.where(counted, delta_mask, 0.0), tl.where(counted, masking / own, INF)
        outside += (((last >= low_last) & (last <= high_last) | masked) == 0).to(tl.int64)
        beyond += (((last >= low_last * less) & (last <= high_last * more) | masked) == 0).to(tl.int64)
        last = _finite(last)
    e = tl.where(masked, 0.0, last - delta_mask)

    idle_within = tl.where((spare >= floor) & (spare <= ceiling), idle, 0.0)
    idle_within_loose = tl.where((spare >= floor_loose) & (spare <= ceiling_loose), idle, 0.0)
    tl.store(counts + row, outside + (candidates + idle_within).to(tl.int64) - within)
    tl.store(counts + count + row, beyond + (candidates + idle_within_loose).to(tl.int64) - within_loose)
    spare_wide = _finite(spare).to(tl.float64)
    scored -= idle * spare_wide
    squares -= idle * (spare_wide * spare_wide)
    lowest = least.to(tl.float64)
    total = scored - candidates * delta
    constant = tl.where(masked, slope / (n + 1), delta_mask * e / spread)
    factor = tl.where(masked, -1 / (n + 1), (delta - curvature) / spread)
    signed = tl.where(known, -INF, delta - constant - factor * total)
    weighed = signed * 0 - INF
    if STEP:
        keep, mixing = tl.load(scalars + 6 * count), tl.load(scalars + 7 * count)
        mixing_mask = tl.load(scalars + 8 * count)
        into = tl.where(masked, mixing_mask, mixing)
        weighed = tl.where(into > 0, mixing * (1 + last + scored), -INF)
    signed_level, weighed_level = _least_above(signed, NARROW), _least_above(weighed, NARROW)
    signed_size = tl.full([], 0, tl.int32)
    weighed_size = tl.full([], 0, tl.int32)
    signed_sum = tl.full([], 0, tl.float64)
    weighed_sum = tl.full([], 0, tl.float64)
    again = lowest < tl.maximum(signed, weighed)
    if again & (clean == 0):
        signed_size, signed_sum, weighed_size, weighed_sum = _second_pass(
            rows, k, vocab, spare, signed_level, weighed_level, STEP, False, LOG, LINES, BLOCK
        )
    if again & clean:
        signed_size, signed_sum, weighed_size, weighed_sum = _second_pass(
            rows, k, vocab, spare, signed_level, weighed_level, STEP, True, LOG, LINES, BLOCK
        )

    at_k = 1 - unit * ((1 + n * delta) * total + n * delta_mask * e) / spread
    at_k = tl.where(known | masked, INF, at_k)
    lowest = tl.minimum(unit * (lowest - delta + constant + factor * total), at_k)
    tl.store(sums + row, tl.where(known, 0.0, lowest))
    idle_below = tl.where(again & (_finite(spare) < signed_level), idle, 0.0)
    mass = _mass(signed_size.to(tl.float64) - idle_below, signed_sum - idle_below * spare_wide, signed)
    tl.store(sums + count + row, unit * mass + tl.maximum(-at_k, 0.0))
    if MASK:
        miss = (delta_mask * total - (1 + n * delta) * e) / tl.sqrt(spread)
        miss = tl.where(masked, (total - slope) / tl.sqrt(n + 1), miss)
        length = tl.sqrt(squares + last * last)
        tl.store(sums + 2 * count + row, tl.where(counted, tl.abs(miss) / tl.maximum(length, 1e-300), 0.0))
    else:
        tl.store(sums + 2 * count + row, 0.0)
    negative = tl.full([], 0, tl.int64)
    dropped = delta * 0.0
    if STEP:
        idle_below = tl.where(again & (_finite(spare) < weighed_level), idle, 0.0)
        size = weighed_size.to(tl.float64) - idle_below
        mass = _mass(size, weighed_sum - idle_below * spare_wide, weighed)
        at_k = 1 - into * (1 + last + scored)
        negative += size.to(tl.int64) + ((at_k < 0) & (keep + into > 0)).to(tl.int64)
        dropped = mass * into + tl.maximum(-at_k, 0.0) * (keep + into)
        if MASK:
            at_mask = tl.where(masked, 0.0, last - mixing_mask * (1 + last + scored))
            negative += ((at_mask < 0) & (into > 0)).to(tl.int64)
            dropped += tl.maximum(-at_mask, 0.0) * into
        dropped = dropped / keep
    tl.store(counts + 2 * count + row, negative)
    tl.store(sums + 3 * count + row, dropped)


@torch.library.custom_op("m2s::measure", mutates_args=())
def _launch(
    rows: Tensor,
    k: Tensor,
    scalars: Tensor,
    vocab: int,
    masked: bool,
    box_tolerance: float,
    log: bool,
    block: int,
    lines: int,
    warps: int,
) -> tuple[Tensor, Tensor]:
    counts = torch.empty(3, len(rows), dtype=torch.int64, device=rows.device)
    sums = torch.empty(4, len(rows), dtype=torch.float64, device=rows.device)
    if len(rows):
        block = min(block, max(64, triton.next_power_of_2(vocab)))
        _measure[(len(rows),)](
            rows,
            counts,
            sums,
            k,
            scalars,
            len(rows),
            rows.stride(0),
            vocab,
            *struct.unpack("<2q", struct.pack("<2d", 1 - box_tolerance, 1 + box_tolerance)),  # a number would be rounded
            MASK=masked,
            STEP=len(scalars) > 6,
            LOG=log,
            NARROW=rows.dtype == torch.float32 and not log,
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
    vocab: int,
    masked: bool,
    box_tolerance: float,
    log: bool,
    block: int,
    lines: int,
    warps: int,
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(3, len(rows), dtype=torch.int64), rows.new_empty(4, len(rows), dtype=torch.float64)


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
    """`reference.measure` of rows in float32 or float64, `lines` blocks at a time."""
    scalars = list(process.at(x_t, t))
    if s is not None:
        keep, mixing = process.removed_noise(s, t)
        scalars += [keep, *mixing]
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    masked = process.mask is not None
    counts, sums = _launch(
        rows, x_t.contiguous(), torch.stack(scalars), process.vocab, masked, box_tolerance, log, block, lines, warps
    )
    (outside, beyond, negative), (lowest, signed_mass, off_plane, negative_mass) = counts, sums
    return ScoreMeasures(outside, beyond, lowest, signed_mass, off_plane, negative, negative_mass)
