"""What a score vector says of its posterior, one program for a row; `reference.py` has the definitions.

The affine inverse and the analytic weights are straight lines in the score, with constants that hang on W = sum_{y != k} (s_y -
delta) alone (and on the mask's score). With b = alpha/m(k), n = K - 1 and e = s_mask - delta_mask, for a clean k

    b mu~_y = s_y - delta + ((delta - curvature) W + delta_mask e) / (1 + n curvature),
    mu~_k = 1 - ((1 + n delta) W + n delta_mask e) / (b (1 + n curvature)),

for k = mask  b mu~_y = s_y - delta + (b - W) / K,  and a candidate's weight is negative where s_y < q(y) sum(s). So one pass
gives W, the least score and the counts in the box: that is the lowest mu~ and all classes. How much lies below the two
levels at which mu~ and the weights turn negative takes a second pass, in cache, and only where something does.

The bridged scores miss one direction: the score's part in it is (delta_mask W - (1 + n delta) e) / sqrt(1 + n curvature) for a
clean k, and (W - b) / sqrt(K) at the mask.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.audit.reference import Measures, finite
from m2s.process import RankOne

INF = tl.constexpr(float("inf"))


@no_type_check
@triton.jit
def _candidates(rows, k, vocab, start, lanes, LOG: tl.constexpr):
    """One block: which columns are candidates, and their scores in float64."""
    column = start + lanes
    inside = (column < vocab) & (column != k)
    score = tl.load(rows + column, mask=inside, other=0.0).to(tl.float64)
    if LOG:
        score = tl.exp(score)
    return inside, score


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
    SQUARES: tl.constexpr,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows += row * stride
    k = tl.load(current + row)
    scalars += row
    delta = tl.load(scalars)
    low, high = tl.load(scalars + count), tl.load(scalars + 2 * count)
    low_loose, high_loose = tl.load(scalars + 3 * count), tl.load(scalars + 4 * count)
    lanes = tl.arange(0, BLOCK)

    totals = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    least = tl.full([BLOCK], INF, tl.float64)
    outside = tl.zeros([BLOCK], tl.int32)
    beyond = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        inside, score = _candidates(rows, k, vocab, start, lanes, LOG)
        outside += (inside & (((score >= low) & (score <= high)) == 0)).to(tl.int32)
        beyond += (inside & (((score >= low_loose) & (score <= high_loose)) == 0)).to(tl.int32)
        score = tl.where(tl.abs(score) < INF, score, 1.0)
        totals += tl.where(inside, score - delta, 0.0)
        if SQUARES:
            squares += tl.where(inside, score * score, 0.0)
        least = tl.minimum(least, tl.where(inside, score, INF))
    total, lowest = tl.sum(totals, 0), tl.min(least, 0)
    tl.store(counts + row, tl.sum(outside, 0))
    tl.store(counts + count + row, tl.sum(beyond, 0))
    tl.store(sums + row, total)
    tl.store(sums + count + row, tl.sum(squares, 0))
    tl.store(sums + 2 * count + row, lowest)

    signed = tl.load(scalars + 5 * count) + tl.load(scalars + 6 * count) * total
    weighed = tl.load(scalars + 7 * count) + tl.load(scalars + 8 * count) * total
    below_signed = tl.zeros([BLOCK], tl.float64)
    below_weighed = tl.zeros([BLOCK], tl.float64)
    negative = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tl.where(lowest < tl.maximum(signed, weighed), vocab, 0), BLOCK):
        inside, score = _candidates(rows, k, vocab, start, lanes, LOG)
        score = tl.where(tl.abs(score) < INF, score, 1.0)
        below_signed += tl.where(inside, tl.maximum(signed - score, 0.0), 0.0)
        below_weighed += tl.where(inside, tl.maximum(weighed - score, 0.0), 0.0)
        negative += (inside & (score < weighed)).to(tl.int32)
    tl.store(counts + 2 * count + row, tl.sum(negative, 0))
    tl.store(sums + 3 * count + row, tl.sum(below_signed, 0))
    tl.store(sums + 4 * count + row, tl.sum(below_weighed, 0))


@torch.library.custom_op("m2s::measure", mutates_args=())
def _launch(
    rows: Tensor, k: Tensor, scalars: Tensor, vocab: int, squares: bool, log: bool, block: int, warps: int
) -> tuple[Tensor, Tensor]:
    counts = torch.empty(3, len(rows), dtype=torch.int32, device=rows.device)
    sums = torch.empty(5, len(rows), dtype=torch.float64, device=rows.device)
    if len(rows):
        _measure[(len(rows),)](
            rows,
            counts,
            sums,
            k,
            scalars,
            len(rows),
            rows.stride(0),
            vocab,
            SQUARES=squares,
            LOG=log,
            BLOCK=min(block, max(64, triton.next_power_of_2(vocab))),
            num_warps=warps,
        )
    return counts, sums


@_launch.register_fake
def _(
    rows: Tensor, k: Tensor, scalars: Tensor, vocab: int, squares: bool, log: bool, block: int, warps: int
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(3, len(rows), dtype=torch.int32), rows.new_empty(5, len(rows), dtype=torch.float64)


def measure(
    rows: Tensor,
    x_t: Tensor,
    t: Tensor,
    s: Tensor | None,
    process: RankOne,
    box_tolerance: float,
    log: bool,
    block: int = 2048,
    warps: int = 8,
) -> Measures:
    k, vocab, n = x_t.long(), process.vocab, process.vocab - 1
    site = process.at(x_t, t)
    known, counted = site.own == 0, site.rate > 0
    masked = torch.zeros_like(known) if process.mask is None else k == process.mask
    own = torch.where(known, 1, site.own)
    unit, candidates = own / site.alpha, torch.where(masked, vocab, n)  # 1/b
    delta, delta_mask = site.clean / torch.where(masked, own, site.stay), site.mask / site.stay
    curvature = 2 * delta + n * delta**2 + delta_mask**2

    def bounds(low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
        low, high = low.where(counted, 0), high.where(counted, torch.inf)
        return low, high, low * (1 - box_tolerance), high * (1 + box_tolerance)

    box = bounds(delta, (site.alpha + site.clean) / own)
    last, e = torch.zeros_like(delta), torch.zeros_like(delta)
    outside, beyond = torch.zeros_like(k), torch.zeros_like(k)
    if process.mask is not None:
        last = rows[:, process.mask].double()
        last = last.exp() if log else last
        low, high, low_loose, high_loose = bounds(delta_mask, site.mask / own)
        outside = (~((last >= low) & (last <= high) | masked)).long()
        beyond = (~((last >= low_loose) & (last <= high_loose) | masked)).long()
        last = torch.where(masked, 0, finite(last))
        e = torch.where(masked, 0, last - delta_mask)
    spread = 1 + n * curvature
    constant = torch.where(masked, 1 / unit / vocab, delta_mask * e / spread)
    factor = torch.where(masked, -1 / vocab, (delta - curvature) / spread)
    never = torch.full_like(delta, -torch.inf)
    levels = [torch.where(known, never, delta - constant), torch.where(known, 0, -factor)]
    if s is None:
        levels += [never, torch.zeros_like(delta)]
    else:
        keep, mixing = process.step(s, t)
        into = torch.where(masked, mixing.mask, mixing.clean)
        levels += [
            torch.where(into > 0, mixing.clean * (1 + last + candidates * delta), never),
            torch.where(into > 0, mixing.clean, 0),
        ]
    scalars = torch.stack([delta, *box, *levels])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    counts, sums = _launch(rows, k.int(), scalars, vocab, process.mask is not None, log, block, warps)
    total, squares, least, below_signed, below_weighed = sums

    at_k = 1 - unit * ((1 + n * delta) * total + n * delta_mask * e) / spread
    at_k = torch.where(known | masked, torch.inf, at_k)
    lowest = torch.minimum(unit * (least - delta + constant + factor * total), at_k)
    lowest = torch.where(known, 0, lowest)
    signed_mass = unit * below_signed + (-at_k).clamp(min=0)
    off_plane = torch.zeros_like(lowest)
    if process.mask is not None:
        miss = torch.where(masked, (total - 1 / unit) / vocab**0.5, (delta_mask * total - (1 + n * delta) * e) / spread.sqrt())
        off_plane = torch.where(counted, miss.abs() / (squares + last**2).sqrt().clamp(min=1e-300), 0)
    negative, mass = torch.zeros_like(outside), torch.zeros_like(lowest)
    if s is not None:
        sum_s = 1 + last + candidates * delta + total
        others = [(1 - into * sum_s, keep + into)]
        if process.mask is not None:
            others.append((torch.where(masked, 0, last - mixing.mask * sum_s), into))
        negative = counts[2] + sum(((weight < 0) & (arrival > 0)).long() for weight, arrival in others)
        mass = (below_weighed * into + sum((-weight).clamp(min=0) * arrival for weight, arrival in others)) / keep
    return Measures(outside + counts[0], beyond + counts[1], lowest, signed_mass, off_plane, negative, mass)
