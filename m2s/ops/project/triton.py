"""The nearest posterior, one program for a row; `reference.py` has the mathematics.

A row is read from memory once: its first HELD blocks stay in registers, 64 KB of the 256 KB that a multiprocessor has of them,
and of 50,257 scores what is left is short enough for the cache next to it. The first pass takes the greatest score and the sum
of each lane, that is of every BLOCK-th candidate: the lane stands for its greatest and for the mean of its others. As [.]_+ is
convex, what the lanes say of sum [s - sigma]_+ is too little, so the root of that is a start below the true one. From any
start, above the root too, a step of Newton's method ends below it, for left minus right is convex; each takes a pass. A pass
also takes the least candidate of the support, so it knows itself when the support has stopped changing. The last pass writes
mu.

Of log-scores the first pass leaves the scores that are not held where mu will stand, and the others read them there.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.project.naive import PASSES
from m2s.process import SiteCoefficients

INF = tl.constexpr(float("inf"))
MOST = tl.constexpr(PASSES)
BLOCK, HELD, REST, WARPS = 2048, 8, 4, 16  # columns in a block, blocks in registers, other blocks at a time, warps


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
def _above(score, near, WIDE: tl.constexpr):
    """Of every lane of a tile: how far its scores lie above `near` in all, how many lie below, and the least distance above as
    bits, among which those of a negative number are the greatest."""
    BITS: tl.constexpr = tl.uint64 if WIDE else tl.uint32
    distance = score - near
    bits = distance.to(BITS, bitcast=True)
    below = tl.sum(bits >> (63 if WIDE else 31), 0).to(tl.int32)
    return tl.sum(tl.maximum(distance, 0.0), 0), below, tl.min(bits, 0)


@no_type_check
@triton.jit
def _share(score, near, beyond, inverse):
    """u = [s - sigma]_+ / b; what is no number stays so."""
    excess = (score - near) - beyond
    return tl.where(excess <= 0, 0.0, excess * inverse)


@no_type_check
@triton.jit
def _loose(rows, start, columns, k, other, REST: tl.constexpr, BLOCK: tl.constexpr):
    """A tile that is not held: its columns, which of them are candidates, and their scores, `other` elsewhere."""
    column = start + tl.arange(0, REST)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (column < columns) & (column != k)
    return column, inside, tl.load(rows + column, mask=inside, other=other)


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
    WHOLE: tl.constexpr,
    HELD: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows += row * stride
    mu += row * states
    kind = mu.dtype.element_ty
    EPSILON: tl.constexpr = 2.3e-16 if WIDE else 1.2e-7
    FIRST: tl.constexpr = HELD * BLOCK  # of the columns that are not held
    k = tl.load(current + row).to(tl.int32)
    alpha, own, stay = tl.load(scalars + row), tl.load(scalars + count + row), tl.load(scalars + 2 * count + row)
    clean, masking = tl.load(scalars + 3 * count + row), tl.load(scalars + 4 * count + row)
    known = (own == 0) | (alpha == 0)
    columns = tl.where(known, 0, vocab)
    lanes = tl.arange(0, BLOCK)
    blocks = tl.arange(0, HELD)[:, None] * BLOCK
    column = blocks + lanes[None, :]
    if not WHOLE:
        held = tl.load(rows + column, mask=column < columns, other=0.0)
    elif MASK:
        wanted = tl.full([HELD, BLOCK], 1, tl.int1) & (known == 0)
        held = tl.load((rows + lanes)[None, :] + blocks, mask=wanted, other=0.0, eviction_policy="evict_first")
    else:
        held = tl.load((rows + lanes)[None, :] + blocks, eviction_policy="evict_first")

    sums = tl.zeros([BLOCK], kind)
    tops = tl.full([BLOCK], -INF, kind)
    for start in range(FIRST, columns, REST * BLOCK):
        place, inside, score = _loose(rows, start, columns, k, -INF if LOG else 0.0, REST, BLOCK)
        # a number, because conditions are few to a thread, and keeping them would keep later loads waiting
        penalty = tl.where(inside, 0.0, -INF).to(kind)
        if LOG:
            score = tl.exp(score) if WIDE else _exp(score)
            tl.store(mu + place, score, mask=inside)
        sums += tl.sum(score, 0)
        tops = tl.maximum(tops, tl.max(score + penalty, 0))
    if LOG:
        held = tl.exp(held) if WIDE else _exp(held)
    inside = (column != k) & (known == 0)
    if not WHOLE:
        inside = inside & (column < vocab)
    sums += tl.sum(tl.where(inside, held, 0.0), 0)
    held = tl.where(inside, held, -INF)
    tops = tl.maximum(tops, tl.max(held, 0))
    total = tl.sum(sums.to(tl.float64), 0)

    slope = tl.where(known, 0.0, alpha / tl.where(known, 1.0, own))
    delta, delta_mask = clean / stay, masking / stay
    curvature = 2 * delta + (vocab - 1) * delta * delta + delta_mask * delta_mask
    origin = delta + (vocab - 1) * delta * delta - delta * total
    if MASK:
        last = tl.load(rows + vocab, mask=k != vocab, other=0.0)
        if LOG:
            last = tl.where(k != vocab, tl.exp(last) if WIDE else _exp(last), 0.0)
            rows = mu
            tl.debug_barrier()
        origin -= delta_mask * (last.to(tl.float64) - delta_mask)
        origin = tl.where(k == vocab, -INF, origin)
        curvature = tl.where(k == vocab, 1.0, curvature)
    elif LOG:
        rows = mu
        tl.debug_barrier()
    gain = 1 / curvature

    slope_here, origin_here, gain_here = slope.to(kind), origin.to(kind), gain.to(kind)
    many = tl.where(lanes < columns, (columns - 1 - lanes) // BLOCK + 1, 0)
    many -= tl.where((lanes == k % BLOCK) & (k < columns), 1, 0)
    others = tl.maximum(many - 1, 0).to(kind)
    means = tl.where(others > 0, (sums - tops) / tl.maximum(others, 1.0), -INF)
    zero = slope_here * 0.0
    low = _root(tl.max(tops, 0), zero + 1.0, zero, slope_here, origin_here, gain_here)
    near = tl.maximum(low, _root(tl.sum(sums, 0), tl.sum(many, 0).to(kind), zero, slope_here, origin_here, gain_here))
    moving, before = slope > 0, -slope_here
    passes = 0
    while moving:
        mass = tl.sum(tl.maximum(tops - near, 0.0) + others * tl.maximum(means - near, 0.0), 0)
        size = tl.sum(tl.where(tops >= near, 1.0, 0.0) + tl.where(means >= near, others, 0.0), 0).to(kind)
        step = _root(mass, size, near, slope_here, origin_here, gain_here)
        near += step
        passes += 1
        moving = (step > 0) & (size != before) & (passes < 20)
        before = size
    near = tl.where(tl.abs(near) < INF, near, low)
    near -= tl.abs(near) * 1e-6

    seen = FIRST + tl.cdiv(tl.maximum(columns - FIRST, 0), REST * BLOCK) * (REST * BLOCK)
    moving, before = slope > 0, -slope
    passes = 0
    beyond = slope * 0.0
    while moving:
        masses, below, least = _above(held, near, WIDE)
        for start in range(FIRST, columns, REST * BLOCK):
            _, _, score = _loose(rows, start, columns, k, -INF, REST, BLOCK)
            mass_here, below_here, least_here = _above(score, near, WIDE)
            masses += mass_here
            below += below_here
            least = tl.minimum(least, least_here)
        size = (seen - tl.sum(below, 0)).to(tl.float64)
        nearest = tl.min(least, 0).to(kind, bitcast=True).to(tl.float64)
        beyond = _root(tl.sum(masses.to(tl.float64), 0), size, near.to(tl.float64), slope, origin, gain)
        sigma = near.to(tl.float64) + beyond
        passes += 1
        # what is summed is measured from `near`: its rounding counts by how much of the mass that has to be taken off again
        settled = (beyond >= 0) & (size * beyond <= slope) & ((beyond <= nearest) | (size == 0))
        settled = settled | (columns * tl.abs(beyond) <= EPSILON * slope)  # all of them together could not move the mass
        moving = (size != before) & (passes < MOST) & (settled == 0)
        before = size
        # a little below, where that costs nothing, lest rounding put it above the root and a pass be needed to say so
        room = tl.where(size * tl.abs(sigma) * EPSILON <= slope, tl.abs(sigma) * EPSILON, 0.0)
        near = tl.where(moving, sigma.to(kind) - room.to(kind), near)
    tl.store(taken + row, passes)

    active = (near.to(tl.float64) + beyond - origin) * gain > slope
    near = tl.where(known, INF, tl.where(tl.abs(total) < INF, near, float("nan")))
    inverse, beyond_here = (own / tl.where(known, 1.0, alpha)).to(kind), beyond.to(kind)
    u = _share(held, near, beyond_here, inverse)
    if WHOLE:
        tl.store((mu + lanes)[None, :] + blocks, u)
    else:
        tl.store(mu + column, u, mask=column < states)
    sums = tl.sum(u, 0)
    for start in range(FIRST, states, REST * BLOCK):
        place, _, score = _loose(rows, start, columns, k, -INF, REST, BLOCK)
        part = _share(score, near, beyond_here, inverse)
        tl.store(mu + place, part, mask=place < states)
        sums += tl.sum(part, 0)
    rest = 1.0 - tl.sum(sums.to(tl.float64), 0)
    rest = tl.where(active | (rest < 0) | (k == vocab), 0.0, rest)
    tl.debug_barrier()
    tl.store(mu + k, tl.where(known, 1.0, rest).to(kind))


@torch.library.custom_op("m2s::nearest", mutates_args=())
def _launch(
    rows: Tensor, k: Tensor, scalars: Tensor, vocab: int, states: int, log: bool, block: int, held: int, rest: int, warps: int
) -> tuple[Tensor, Tensor]:
    mu = torch.empty(len(rows), states, dtype=rows.dtype, device=rows.device)
    passes = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
    if len(rows):
        block = min(block * 4 // rows.element_size(), max(64, triton.next_power_of_2(vocab) // 16))
        held = min(held, max(1, triton.next_power_of_2(vocab // block + 1) // 2))
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
            WHOLE=held * block <= vocab,
            HELD=held,
            REST=rest,
            BLOCK=block,
            num_warps=warps,
        )
    return mu, passes


@_launch.register_fake
def _(
    rows: Tensor, k: Tensor, scalars: Tensor, vocab: int, states: int, log: bool, block: int, held: int, rest: int, warps: int
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(len(rows), states), rows.new_empty(len(rows), dtype=torch.int32)


def nearest_posterior(
    rows: Tensor,
    k: Tensor,
    site: SiteCoefficients,
    states: int,
    mask: int | None,
    log: bool,
    block: int = BLOCK,
    held: int = HELD,
    rest: int = REST,
    warps: int = WARPS,
) -> tuple[Tensor, Tensor]:
    """mu, and how many passes of Newton's method each row took besides the first and the last. `held` blocks of a row stay in
    registers, the others are read `rest` at a time; of float64, half a block."""
    scalars = torch.stack([site.alpha, site.own, site.stay, site.clean, site.mask])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    vocab = states if mask is None else mask
    return _launch(rows, k.contiguous(), scalars, vocab, states, log, block, held, rest, warps)
