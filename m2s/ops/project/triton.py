"""The nearest posterior, one program for a row; `reference.py` has the mathematics.

The first pass over the row takes, of every BLOCK-th candidate, the two greatest and the sum: lane j stands for these two and
for the mean of its others. As [.]_+ is convex, what the lanes say of sum [s - sigma]_+ is too little, so the root of that is a
start below the true one, and a good one: small supports are the greatest of their lanes, large ones near the means. It is found
in registers. From any start, above the root too, a step of Newton's method ends below it, for left minus right is convex; each
takes a pass over the row, which is then in cache. A pass also takes the least candidate of the support, so it knows itself when
the support has stopped changing. The last pass writes mu.

Of log-scores the first pass leaves the scores where mu will stand, and the others read them there.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.project.reference import PASSES, line
from m2s.process import Site

INF = tl.constexpr(float("inf"))
MOST = tl.constexpr(PASSES)


@no_type_check
@triton.jit
def _power(n):
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@no_type_check
@triton.jit
def _exp(x):
    """To an ulp or two; the device's own loses |x| of them."""
    y = tl.minimum(tl.maximum(x, -150.0), 90.0)
    n = tl.floor(y * 1.44269504 + 0.5)
    r = (y - n * 0.693359375) + n * 2.12194440e-4
    tail = 1 / 24 + r * (1 / 120 + r * (1 / 720 + r * (1 / 5040)))
    series = 1.0 + r * (1.0 + r * (1 / 2 + r * (1 / 6 + r * tail)))
    power = n.to(tl.int32)
    half = power >> 1
    return tl.where(x == x, series * _power(half) * _power(power - half), x)


@no_type_check
@triton.jit
def _root(mass, size, near, slope, origin, gain):
    """Where the two lines through `near` meet: how far beyond it the root on this support is."""
    active = tl.where(size > 0, (mass - slope) / tl.where(size > 0, size, 1.0), -INF)
    return tl.maximum(active, (mass - (near - origin) * gain) / (size + gain))


@no_type_check
@triton.jit
def _nearest(
    rows,
    mu,
    taken,
    current,
    scalars,
    count,
    stride,
    vocab,
    states,
    MASK: tl.constexpr,
    LOG: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows += row * stride
    mu += row * states
    kind = mu.dtype.element_ty
    EPSILON: tl.constexpr = 2.3e-16 if WIDE else 1.2e-7
    k = tl.load(current + row)
    slope = tl.load(scalars + row)
    delta = tl.load(scalars + 2 * count + row)
    gain = tl.load(scalars + 3 * count + row)
    origin = tl.load(scalars + 4 * count + row)
    known = slope == 0
    columns = tl.where(known, 0, vocab)
    lanes = tl.arange(0, BLOCK)

    sums = tl.zeros([BLOCK], kind)
    tops = tl.full([BLOCK], -INF, kind)
    seconds = tl.full([BLOCK], -INF, kind)
    for start in range(0, columns, BLOCK):
        column = start + lanes
        inside = (column < columns) & (column != k)
        score = tl.load(rows + column, mask=inside, other=0.0)
        if LOG:
            score = tl.exp(score) if WIDE else _exp(score)
            tl.store(mu + column, score, mask=inside)
        sums += tl.where(inside, score, 0.0)
        score = tl.where(inside, score, -INF)
        seconds = tl.maximum(seconds, tl.minimum(tops, score))
        tops = tl.maximum(tops, score)
    total = tl.sum(sums.to(tl.float64), 0)
    top = tl.max(tops, 0)
    origin -= delta * total
    if MASK:
        last = tl.load(rows + vocab, mask=k != vocab, other=0.0)
        if LOG:
            last = tl.where(k != vocab, tl.exp(last) if WIDE else _exp(last), 0.0)
        origin -= tl.load(scalars + 5 * count + row) * last.to(tl.float64)
    if LOG:
        rows = mu
        tl.debug_barrier()

    slope_here, origin_here, gain_here = slope.to(kind), origin.to(kind), gain.to(kind)
    held = tl.where(lanes < columns, (columns - 1 - lanes) // BLOCK + 1, 0) - tl.where(
        (lanes == k % BLOCK) & (k < columns), 1, 0
    )
    others = tl.maximum(held - 2, 0).to(kind)
    means = tl.where(others > 0, (sums - tops - seconds) / tl.maximum(others, 1.0), -INF)
    zero = slope_here * 0.0
    low = _root(top, zero + 1.0, zero, slope_here, origin_here, gain_here)
    near = tl.maximum(low, _root(tl.sum(sums, 0), tl.sum(held, 0).to(kind), zero, slope_here, origin_here, gain_here))
    moving, before = slope > 0, -slope_here
    passes = 0
    while moving:
        masses = tl.maximum(tops - near, 0.0) + tl.maximum(seconds - near, 0.0) + others * tl.maximum(means - near, 0.0)
        sizes = tl.where(tops >= near, 1, 0) + tl.where(seconds >= near, 1, 0)
        mass = tl.sum(masses, 0)
        size = tl.sum(sizes.to(kind) + tl.where(means >= near, others, 0.0), 0)
        step = _root(mass, size, near, slope_here, origin_here, gain_here)
        near += step
        passes += 1
        moving = (step > 0) & (size != before) & (passes < 20)
        before = size
    near = tl.where(tl.abs(near) < INF, near, low)
    near -= tl.abs(near) * 1e-6

    moving, before = slope > 0, -slope
    passes = 0
    beyond = slope * 0.0
    while moving:
        masses = tl.zeros([BLOCK], kind)
        sizes = tl.zeros([BLOCK], tl.int32)
        least = tl.full([BLOCK], INF, kind)
        for start in range(0, columns, BLOCK):
            column = start + lanes
            inside = (column < columns) & (column != k)
            score = tl.load(rows + column, mask=inside, other=-INF)
            above = score >= near
            masses += tl.where(above, score - near, 0.0)
            sizes += tl.where(above, 1, 0)
            least = tl.minimum(least, tl.where(above, score, INF))
        size = tl.sum(sizes, 0).to(tl.float64)
        beyond = _root(tl.sum(masses.to(tl.float64), 0), size, near.to(tl.float64), slope, origin, gain)
        sigma = near.to(tl.float64) + beyond
        passes += 1
        # what is summed is measured from `near`: its rounding counts by how much of the mass that has to be taken off again
        settled = (beyond >= 0) & (size * beyond <= slope) & (sigma <= tl.min(least, 0).to(tl.float64))
        settled = settled | (columns * tl.abs(beyond) <= EPSILON * slope)  # all of them together could not move the mass
        moving = (size != before) & (passes < MOST) & (settled == 0)
        before = size
        # a little below, where that costs nothing, lest rounding put it above the root and a pass be needed to say so
        room = tl.where(size * tl.abs(sigma) * EPSILON <= slope, tl.abs(sigma) * EPSILON, 0.0)
        near = tl.where(moving, sigma.to(kind) - room.to(kind), near)
    tl.store(taken + row, passes)

    active = (near.to(tl.float64) + beyond - origin) * gain > slope
    near = tl.where(tl.abs(total) < INF, near, float("nan"))
    inverse = tl.load(scalars + count + row).to(kind)
    sums = tl.zeros([BLOCK], kind)
    for start in range(0, states, BLOCK):
        column = start + lanes
        inside = (column < columns) & (column != k)
        excess = (tl.load(rows + column, mask=inside, other=0.0) - near) - beyond.to(kind)
        u = tl.where(inside & ((excess <= 0) == 0), excess * inverse, 0.0)
        tl.store(mu + column, u, mask=(column < states) & (column != k))
        sums += u
    rest = 1.0 - tl.sum(sums.to(tl.float64), 0)
    rest = tl.where(active | (rest < 0) | (k == vocab), 0.0, rest)
    tl.store(mu + k, tl.where(known, 1.0, rest).to(kind))


@torch.library.custom_op("m2s::nearest", mutates_args=())
def _launch(
    rows: Tensor, k: Tensor, scalars: Tensor, vocab: int, states: int, log: bool, block: int, warps: int
) -> tuple[Tensor, Tensor]:
    mu = torch.empty(len(rows), states, dtype=rows.dtype, device=rows.device)
    passes = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
    if len(rows):
        _nearest[(len(rows),)](
            rows,
            mu,
            passes,
            k,
            scalars,
            len(rows),
            rows.stride(0),
            vocab,
            states,
            MASK=states > vocab,
            LOG=log,
            WIDE=rows.dtype == torch.float64,
            BLOCK=min(block * 4 // rows.element_size(), max(64, triton.next_power_of_2(vocab))),
            num_warps=warps,
        )
    return mu, passes


@_launch.register_fake
def _(
    rows: Tensor, k: Tensor, scalars: Tensor, vocab: int, states: int, log: bool, block: int, warps: int
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(len(rows), states), rows.new_empty(len(rows), dtype=torch.int32)


def nearest(
    rows: Tensor, k: Tensor, site: Site, states: int, mask: int | None, log: bool, block: int = 8192, warps: int = 16
) -> tuple[Tensor, Tensor]:
    """mu, and how many passes of Newton's method each row took besides the first and the last. Of float64, half a block."""
    vocab = states if mask is None else mask
    known, slope, delta, delta_mask, gain = line(k, site, vocab, mask)
    origin = delta + (vocab - 1) * delta**2 + delta_mask**2  # but for the scores
    if mask is not None:
        origin = torch.where(k == mask, -torch.inf, origin)
    scalars = torch.stack([torch.where(known, 0, slope), 1 / slope, delta, gain, origin, delta_mask])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return _launch(rows, k.int(), scalars, vocab, states, log, block, warps)
