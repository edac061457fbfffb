"""The projection as a Triton kernel, one program per row.

`naive.py` has the definition and `cpu.py` Newton's method. A row is read from memory once. Its first HELD blocks stay in
registers (64 KB of the 256 KB of a multiprocessor); of 50,257 scores the rest is short enough for the L1 cache.

- The first pass computes the greatest score and the sum of each lane, that is of every BLOCK-th candidate. A lane is then
  represented by its greatest score and the mean of the others. As [.]_+ is convex, this underestimates sum [s - sigma]_+, so
  the root of the small problem is a start below the true one.
- From any start, also from above, a step of Newton's method ends below the root, because left minus right is convex. Each step
  takes one pass. A pass also computes the least candidate of the support and so detects by itself that the support has stopped
  changing.
- The last pass writes mu.

For log-scores the first pass stores the scores that are not held in registers in the memory of mu, and later passes read them
there: the exponential is computed once.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.project.cpu import LARGEST_LOG, PASSES
from m2s.process import SiteCoefficients

INF = tl.constexpr(float("inf"))
MOST = tl.constexpr(PASSES)
LARGEST, LARGEST_FLOAT64 = tl.constexpr(LARGEST_LOG[torch.float32]), tl.constexpr(LARGEST_LOG[torch.float64])
BLOCK, HELD, REST, WARPS = 2048, 8, 4, 16  # columns per block, blocks in registers, other blocks per load, warps


@no_type_check
@triton.jit
def _power(n):
    """2^n, by writing the exponent bits."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@no_type_check
@triton.jit
def _exp(x, FLOAT64: tl.constexpr):
    """exp, at most e^LARGEST. In float32 to an ulp or two; the fast instruction of the device loses |x| ulps."""
    if FLOAT64:
        return tl.exp(tl.where(x < INF, tl.minimum(x, LARGEST_FLOAT64), x))
    y = tl.minimum(tl.maximum(x, -150.0), LARGEST)
    n = tl.floor(y * 1.44269504 + 0.5)
    r = (y - n * 0.693359375) + n * 2.12194440e-4
    tail = 1 / 24 + r * (1 / 120 + r * (1 / 720 + r * (1 / 5040)))
    series = 1.0 + r * (1.0 + r * (1 / 2 + r * (1 / 6 + r * tail)))
    power = n.to(tl.int32)
    half = power >> 1
    return tl.where(x < INF, series * _power(half) * _power(power - half), x)  # infinity and NaN stay


@no_type_check
@triton.jit
def _root(mass, size, near, slope, origin, gain):
    """One Newton step: how far beyond `near` the root on this support lies."""
    active = tl.where(size > 0, (mass - slope) / tl.where(size > 0, size, 1.0), -INF)
    return tl.maximum(active, (mass - (near - origin) * gain) / (size + gain))


@no_type_check
@triton.jit
def _above(score, near, FLOAT64: tl.constexpr):
    """For every lane of a tile: sum of [score - near]_+, number of scores below, and the least distance above, as bits.

    The bits of a float as an unsigned integer order positive numbers correctly and put negative ones last, so a minimum of bits
    is the least distance above without a comparison with zero. The sign bit counts the scores below.
    """
    BITS: tl.constexpr = tl.uint64 if FLOAT64 else tl.uint32
    distance = score - near
    bits = distance.to(BITS, bitcast=True)
    below = tl.sum(bits >> (63 if FLOAT64 else 31), 0).to(tl.int32)
    return tl.sum(tl.maximum(distance, 0.0), 0), below, tl.min(bits, 0)


@no_type_check
@triton.jit
def _mu(score, near, beyond, inverse):
    """mu_y = [s_y - sigma]_+ / b; NaN stays NaN."""
    excess = (score - near) - beyond
    return tl.where(excess <= 0, 0.0, excess * inverse)


@no_type_check
@triton.jit
def _load_rest(rows, start, columns, k, other, REST: tl.constexpr, BLOCK: tl.constexpr):
    """A tile that is not in registers: its columns, which of them are candidates, and their scores, `other` elsewhere."""
    column = start + tl.arange(0, REST)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (column < columns) & (column != k)
    return column, inside, tl.load(rows + column, mask=inside, other=other)


@no_type_check
@triton.jit
def _project(
    rows,
    mu,
    passes_out,
    thresholds,
    current,
    scalars,
    count,
    stride,
    vocab,
    states,
    MASK: tl.constexpr,
    LOG: tl.constexpr,
    WRITE: tl.constexpr,
    FLOAT64: tl.constexpr,
    FULL: tl.constexpr,
    HELD: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Project one row. `scalars` are alpha, m(k), P(k|k), m(clean), m(mask), [5, count]. Without WRITE, find sigma alone."""
    row = tl.program_id(0).to(tl.int64)
    rows += row * stride
    mu += row * states
    dtype = mu.dtype.element_ty
    EPSILON: tl.constexpr = 2.3e-16 if FLOAT64 else 1.2e-7
    FIRST: tl.constexpr = HELD * BLOCK  # the first column that is not in registers
    k = tl.load(current + row).to(tl.int32)
    alpha, m_k, p_kk = tl.load(scalars + row), tl.load(scalars + count + row), tl.load(scalars + 2 * count + row)
    m_clean, m_mask = tl.load(scalars + 3 * count + row), tl.load(scalars + 4 * count + row)
    known = (m_k == 0) | (alpha == 0)
    columns = tl.where(known, 0, vocab)
    lanes = tl.arange(0, BLOCK)
    blocks = tl.arange(0, HELD)[:, None] * BLOCK
    column = blocks + lanes[None, :]
    if not FULL:
        held = tl.load(rows + column, mask=column < columns, other=0.0)
    elif MASK:
        wanted = tl.full([HELD, BLOCK], 1, tl.int1) & (known == 0)
        held = tl.load((rows + lanes)[None, :] + blocks, mask=wanted, other=0.0, eviction_policy="evict_first")
    else:
        held = tl.load((rows + lanes)[None, :] + blocks, eviction_policy="evict_first")

    sums = tl.zeros([BLOCK], dtype)
    tops = tl.full([BLOCK], -INF, dtype)
    for start in range(FIRST, columns, REST * BLOCK):
        place, inside, score = _load_rest(rows, start, columns, k, -INF if LOG else 0.0, REST, BLOCK)
        # a float in place of a condition: predicate registers are few, and holding them would delay the next loads
        penalty = tl.where(inside, 0.0, -INF).to(dtype)
        if LOG:
            score = _exp(score, FLOAT64)
            tl.store(mu + place, score, mask=inside)
        sums += tl.sum(score, 0)
        tops = tl.maximum(tops, tl.max(score + penalty, 0))
    if LOG:
        held = _exp(held, FLOAT64)
    inside = (column != k) & (known == 0)
    if not FULL:
        inside = inside & (column < vocab)
    sums += tl.sum(tl.where(inside, held, 0.0), 0)
    held = tl.where(inside, held, -INF)
    tops = tl.maximum(tops, tl.max(held, 0))
    total = tl.sum(sums.to(tl.float64), 0)

    slope = tl.where(known, 0.0, alpha / tl.where(known, 1.0, m_k))
    delta, delta_mask = m_clean / p_kk, m_mask / p_kk
    curvature = 2 * delta + (vocab - 1) * delta * delta + delta_mask * delta_mask
    origin = delta + (vocab - 1) * delta * delta - delta * total
    if MASK:
        last = tl.load(rows + vocab, mask=k != vocab, other=0.0)
        if LOG:
            last = tl.where(k != vocab, _exp(last, FLOAT64), 0.0)
            rows = mu  # the scores of the first pass
            tl.debug_barrier()
        origin -= delta_mask * (last.to(tl.float64) - delta_mask)
        origin = tl.where(k == vocab, -INF, origin)
        curvature = tl.where(k == vocab, 1.0, curvature)
    elif LOG:
        rows = mu  # the scores of the first pass
        tl.debug_barrier()
    gain = 1 / curvature

    # the start: Newton's method on the lanes, each by its greatest score and the mean of its others
    slope_here, origin_here, gain_here = slope.to(dtype), origin.to(dtype), gain.to(dtype)
    # candidates of each lane
    lane_size = tl.where(lanes < columns, (columns - 1 - lanes) // BLOCK + 1, 0)
    lane_size -= tl.where((lanes == k % BLOCK) & (k < columns), 1, 0)
    others = tl.maximum(lane_size - 1, 0).to(dtype)
    means = tl.where(others > 0, (sums - tops) / tl.maximum(others, 1.0), -INF)
    zero = slope_here * 0.0
    low = _root(tl.max(tops, 0), zero + 1.0, zero, slope_here, origin_here, gain_here)
    near = tl.maximum(low, _root(tl.sum(sums, 0), tl.sum(lane_size, 0).to(dtype), zero, slope_here, origin_here, gain_here))
    moving, before = slope > 0, -slope_here
    passes = 0
    while moving:
        mass = tl.sum(tl.maximum(tops - near, 0.0) + others * tl.maximum(means - near, 0.0), 0)
        size = tl.sum(tl.where(tops >= near, 1.0, 0.0) + tl.where(means >= near, others, 0.0), 0).to(dtype)
        step = _root(mass, size, near, slope_here, origin_here, gain_here)
        near += step
        passes += 1
        moving = (step > 0) & (size != before) & (passes < 20)
        before = size
    near = tl.where(tl.abs(near) < INF, near, low)
    near -= tl.abs(near) * 1e-6  # below the root in spite of rounding

    # Newton's method on the row; `seen` counts all entries of the tiles, of which those below `near` are subtracted
    seen = FIRST + tl.cdiv(tl.maximum(columns - FIRST, 0), REST * BLOCK) * (REST * BLOCK)
    moving, before = slope > 0, -slope
    passes = 0
    beyond = slope * 0.0
    while moving:
        masses, below, least = _above(held, near, FLOAT64)
        for start in range(FIRST, columns, REST * BLOCK):
            _, _, score = _load_rest(rows, start, columns, k, -INF, REST, BLOCK)
            mass_here, below_here, least_here = _above(score, near, FLOAT64)
            masses += mass_here
            below += below_here
            least = tl.minimum(least, least_here)
        size = (seen - tl.sum(below, 0)).to(tl.float64)
        nearest = tl.min(least, 0).to(dtype, bitcast=True).to(tl.float64)
        beyond = _root(tl.sum(masses.to(tl.float64), 0), size, near.to(tl.float64), slope, origin, gain)
        sigma = near.to(tl.float64) + beyond
        passes += 1
        # masses are measured from `near`: rounding matters in proportion to the part of the mass that is subtracted again
        converged = (beyond >= 0) & (size * beyond <= slope) & ((beyond <= nearest) | (size == 0))
        converged = converged | (columns * tl.abs(beyond) <= EPSILON * slope)  # the rest cannot change the mass
        moving = (size != before) & (passes < MOST) & (converged == 0)
        before = size
        # start the next pass slightly below, where that costs nothing: rounding upwards would cost one more pass
        margin = tl.where(size * tl.abs(sigma) * EPSILON <= slope, tl.abs(sigma) * EPSILON, 0.0)
        near = tl.where(moving, sigma.to(dtype) - margin.to(dtype), near)
    tl.store(passes_out + row, passes)

    active = (near.to(tl.float64) + beyond - origin) * gain > slope
    near = tl.where(known, INF, tl.where(tl.abs(total) < INF, near, float("nan")))
    tl.store(thresholds + row, near.to(tl.float64) + beyond)
    if WRITE:
        inverse, beyond_here = (m_k / tl.where(known, 1.0, alpha)).to(dtype), beyond.to(dtype)
        u = _mu(held, near, beyond_here, inverse)
        if FULL:
            tl.store((mu + lanes)[None, :] + blocks, u)
        else:
            tl.store(mu + column, u, mask=column < states)
        sums = tl.sum(u, 0)
        for start in range(FIRST, states, REST * BLOCK):
            place, _, score = _load_rest(rows, start, columns, k, -INF, REST, BLOCK)
            part = _mu(score, near, beyond_here, inverse)
            tl.store(mu + place, part, mask=place < states)
            sums += tl.sum(part, 0)
        rest = 1.0 - tl.sum(sums.to(tl.float64), 0)
        rest = tl.where(active | (rest < 0) | (k == vocab), 0.0, rest)
        tl.debug_barrier()
        tl.store(mu + k, tl.where(known, 1.0, rest).to(dtype))


@torch.library.custom_op("m2s::project", mutates_args=())
def _launch(
    rows: Tensor,
    k: Tensor,
    scalars: Tensor,
    vocab: int,
    states: int,
    log: bool,
    write: bool,
    block: int,
    held: int,
    rest: int,
    warps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Start one program per row; return mu, passes and sigma. Not `write`: mu is only scratch memory for log-scores."""
    mu = torch.empty(len(rows) if write or log else 0, states, dtype=rows.dtype, device=rows.device)
    passes = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
    thresholds = torch.empty(len(rows), dtype=torch.float64, device=rows.device)
    if len(rows):
        block = min(block * 4 // rows.element_size(), max(64, triton.next_power_of_2(vocab) // 16))
        held = min(held, max(1, triton.next_power_of_2(vocab // block + 1) // 2))
        _project[(len(rows),)](
            rows,
            mu,
            passes,
            thresholds,
            k,
            scalars,
            len(rows),
            rows.stride(0),
            vocab,
            states,
            MASK=states > vocab,
            LOG=log,
            WRITE=write,
            FLOAT64=rows.dtype == torch.float64,
            FULL=held * block <= vocab,
            HELD=held,
            REST=rest,
            BLOCK=block,
            num_warps=warps,
        )
    return mu, passes, thresholds


@_launch.register_fake
def _(
    rows: Tensor,
    k: Tensor,
    scalars: Tensor,
    vocab: int,
    states: int,
    log: bool,
    write: bool,
    block: int,
    held: int,
    rest: int,
    warps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    mu = rows.new_empty(len(rows) if write or log else 0, states)
    return mu, rows.new_empty(len(rows), dtype=torch.int32), rows.new_empty(len(rows), dtype=torch.float64)


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
    """Project every row of float32 or float64 scores by the kernel.

    Args:
        rows: Scores `[N, V]`, or log-scores; columns from `states` on are ignored.
        k: Current tokens `[N]`.
        site: Scalars of the process `[N]`.
        states: Number of states, the mask included.
        mask: The mask token, or None.
        log: Whether the rows are log-scores.
        block: Columns per block; half as many for float64.
        held: Blocks of a row that stay in registers.
        rest: Other blocks that are loaded at once.
        warps: Warps per program.

    Returns:
        mu `[N, states]`, and how many passes of Newton's method each row took besides the first and the last pass.
    """
    rows, vocab = rows if rows.stride(-1) == 1 else rows.contiguous(), states if mask is None else mask
    return _launch(rows, k.contiguous(), _scalars(site), vocab, states, log, True, block, held, rest, warps)[:2]


def threshold(rows: Tensor, k: Tensor, site: SiteCoefficients, states: int, mask: int | None, log: bool) -> Tensor:
    """Compute sigma of `naive.py`, which determines the projection of a row, in the precision of the rows. mu is not written.

    Args:
        rows: Scores `[N, V]` in float32 or float64, or log-scores; columns from `states` on are ignored.
        k: Current tokens `[N]`.
        site: Scalars of the process `[N]`.
        states: Number of states, the mask included.
        mask: The mask token, or None.
        log: Whether the rows are log-scores.

    Returns:
        sigma `[N]` as float64; infinite where the posterior does not depend on the score, NaN where the sum of a row is not
        finite.
    """
    rows, vocab = rows if rows.stride(-1) == 1 else rows.contiguous(), states if mask is None else mask
    return _launch(rows, k.contiguous(), _scalars(site), vocab, states, log, False, BLOCK, HELD, REST, WARPS)[2]


def _scalars(site: SiteCoefficients) -> Tensor:
    """The scalars of every row as the kernel reads them, [5, N]."""
    return torch.stack([site.alpha, site.m_k, site.stay, site.clean, site.mask])
