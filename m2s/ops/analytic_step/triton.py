"""The analytic step as a Triton kernel, one program per row.

`naive.py` has the definition. P_{t|s}(k|y) is the same number c for every y != k. Up to c, the weight of y is linear in the
value of the row, which is the score s_y or mu_y:

    log-scores: w_y / c = (s_y - q(y) S) / A,                      S = 1 + sum_{y != k} s_y
    posteriors: w_y / c = alpha_s mu_y / m_t(k) + m_s(y) N,        N = (1 - mu_k) / m_t(k) + mu_k / (alpha_t + m_t(k))

The first pass computes S, or the mass of the tokens other than k. The second pass computes the sum of the positive weights of
each block of 256 columns. These sums say in which block the drawn token lies, and only that block is read again. Weights and
sums are float64. A row with c = 0 stays and is not read: its token is certainly clean.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.reverse_step.cpu import BLOCK
from m2s.ops.reverse_step.triton import LINES, WARPS, _first_above
from m2s.process import RankOne


@no_type_check
@triton.jit
def _values(rows, column, inside, shift, LOG: tl.constexpr):
    """The scores or probabilities at some columns, 0 outside."""
    if LOG:
        return tl.exp(tl.load(rows + column, mask=inside, other=float("-inf")).to(tl.float64) - shift)
    else:
        return tl.load(rows + column, mask=inside, other=0.0).to(tl.float64)


@no_type_check
@triton.jit
def _draw(
    rows,
    stride,
    current,
    uniforms,
    scalars,
    count,
    tokens,
    dropped,
    vocab,
    LOG: tl.constexpr,
    MASK: tl.constexpr,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw the next token of one row. `scalars` are those of `_site_scalars`, [C, count]."""
    row = tl.program_id(0).to(tl.int64)
    rows += row * stride
    scalars += row
    k = tl.load(current + row)
    survival, q_clean, q_mask = tl.load(scalars), tl.load(scalars + count), tl.load(scalars + 2 * count)
    masked = k == vocab
    shift = survival * 0.0
    if LOG:
        shift += tl.load(scalars + 3 * count)
    into = tl.where(masked, q_mask, q_clean)  # q(k), the factor of all weights but that of k
    tl.store(tokens + row, k)
    tl.store(dropped + row, 0.0)

    if into > 0:
        line, lane, tile = tl.arange(0, LINES), tl.arange(0, BLOCK), tl.arange(0, TILES)
        at = k.to(tl.int32)
        totals = tl.zeros([LINES, BLOCK], tl.float64)
        for i in range(0, tl.cdiv(vocab, LINES * BLOCK)):
            column = (i * LINES + line)[:, None] * BLOCK + lane[None, :]
            totals += _values(rows, column, (column < vocab) & (column != at), shift, LOG)
        total = tl.sum(tl.sum(totals, 1), 0)
        value_mask = total * 0.0
        if MASK:
            value_mask = _values(rows, vocab, masked == 0, shift, LOG)
        if LOG:
            total += value_mask + 1.0
            slope = 1 / survival
            level_clean, level_mask = -q_clean * total / survival, -q_mask * total / survival
            weight_k = (1.0 - into * total) / survival
        else:
            alpha_s, clean_s, mask_s = (
                tl.load(scalars + 3 * count),
                tl.load(scalars + 4 * count),
                tl.load(scalars + 5 * count),
            )
            m_k, p_kk = tl.load(scalars + 6 * count), tl.load(scalars + 7 * count)
            mu_k = _values(rows, at, masked == 0, shift, LOG)
            likely = total / m_k + mu_k / p_kk
            slope = alpha_s / m_k
            level_clean, level_mask = clean_s * likely, mask_s * likely
            weight_k = alpha_s * mu_k / p_kk + tl.where(masked, level_mask, level_clean)
        weight_k *= (survival + into) / into

        sums = tl.zeros([TILES, LINES], tl.float64)
        negative = tl.zeros([LINES], tl.float64)
        for i in range(0, tl.cdiv(vocab, LINES * BLOCK)):
            column = (i * LINES + line)[:, None] * BLOCK + lane[None, :]
            inside = (column < vocab) & (column != at)
            weight = tl.where(inside, slope * _values(rows, column, inside, shift, LOG) + level_clean, 0.0)
            positive = tl.sum(tl.maximum(weight, 0.0), 1)
            negative -= tl.sum(tl.minimum(weight, 0.0), 1)
            here = (tile == i)[:, None]  # tile i of registers: a dynamic index is not possible
            sums = tl.where(here, positive[None, :], sums)
        sums = tl.reshape(sums, [TILES * LINES])
        negative_mass = tl.sum(negative, 0) - tl.minimum(weight_k, 0.0)
        weight_k = tl.maximum(weight_k, 0.0)
        weight_mask = total * 0.0
        if MASK:
            weight_mask = slope * value_mask + level_mask
            negative_mass -= tl.where(masked, 0.0, tl.minimum(weight_mask, 0.0))
            weight_mask = tl.where(masked, weight_k, tl.maximum(weight_mask, 0.0))

        # inverse CDF: first over blocks, then inside the block; the mask comes after all clean tokens
        index = tl.arange(0, TILES * LINES)
        sums += tl.where((masked == 0) & (index == at // BLOCK), weight_k, 0.0)
        cumulative = tl.cumsum(sums, 0)
        clean = tl.sum(sums, 0)
        target = tl.load(uniforms + row) * (clean + weight_mask)
        block = _first_above(cumulative, sums > 0, index, target, TILES * LINES)
        before = tl.sum(tl.where(index == block - 1, cumulative, 0.0), 0)
        column = block * BLOCK + lane
        inside = (column < vocab) & (column != at)
        weight = tl.where(inside, slope * _values(rows, column, inside, shift, LOG) + level_clean, 0.0)
        weight = tl.maximum(weight, 0.0) + tl.where((masked == 0) & (column == at), weight_k, 0.0)
        token = block * BLOCK + _first_above(tl.cumsum(weight, 0), weight > 0, lane, target - before, BLOCK)
        token = tl.minimum(token, vocab - 1).to(tl.int64)
        if MASK:  # as in naive.py, the last state where no weight is positive
            token = tl.where(((weight_mask > 0) | (clean == 0)) & (target >= clean), vocab, token)
        tl.store(tokens + row, token)
        # The maximum and the minimum drop NaN. Of a row with NaN or infinity the negative mass is NaN, so that it is noticed.
        tl.store(dropped + row, tl.where(tl.abs(total) < float("inf"), negative_mass * into, float("nan")))


def _site_scalars(x_t: Tensor, s: Tensor, t: Tensor, process: RankOne, posterior: bool, shift: Tensor | None) -> Tensor:
    """A, q(clean), q(mask) of the step; then the shift, or alpha_s, m_s(clean), m_s(mask), m_t(k) and alpha_t + m_t(k)."""
    survival, removed = process.removed_noise(s, t)
    found = [survival, *removed]
    if posterior:
        # At s = 0 the step removes all noise, also where alpha_0 < 1.
        clean, left = s <= 0, process.mixing(s)
        site = process.at(x_t, t)
        found += [torch.where(clean, 1.0, process.alpha(s)), *(torch.where(clean, 0.0, part) for part in left)]
        found += [site.m_k, site.stay]
    else:
        found.append(torch.zeros_like(survival) if shift is None else shift)
    return torch.stack([value.double().expand(x_t.shape) for value in found])


def draw_next_token(
    rows: Tensor,
    x_t: Tensor,
    s: Tensor,
    t: Tensor,
    u: Tensor,
    process: RankOne,
    posterior: bool,
    shift: Tensor | None = None,
    lines: int = LINES,
    warps: int = WARPS,
) -> tuple[Tensor, Tensor]:
    """Run `naive.draw_next_token` for rows in float32 as a kernel.

    Args:
        rows: Log-scores or posteriors `[N, V]` in float32.
        x_t: Current tokens `[N]`.
        s: Times at the end of the step `[N]`.
        t: Times `[N]`.
        u: Uniform numbers `[N]`.
        process: A rank-one process.
        posterior: Whether the rows are posteriors.
        shift: Number subtracted from the log-scores of each row `[N]`, or None.
        lines: Blocks per tile.
        warps: Warps per program.

    Returns:
        The next tokens and the total of the negative weights, `[N]` each.
    """
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    tokens = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    dropped = torch.empty(len(rows), dtype=torch.float64, device=rows.device)
    if len(rows):
        blocks = triton.cdiv(process.vocab, BLOCK)
        lines = min(lines, triton.next_power_of_2(blocks))
        _draw[(len(rows),)](
            rows,
            rows.stride(0),
            x_t.long().contiguous(),
            u.double().contiguous(),
            _site_scalars(x_t, s.double(), t.double(), process, posterior, shift),
            len(rows),
            tokens,
            dropped,
            process.vocab,
            LOG=not posterior,
            MASK=process.mask is not None,
            TILES=triton.next_power_of_2(triton.cdiv(blocks, lines)),
            LINES=lines,
            BLOCK=BLOCK,
            num_warps=warps,
        )
    return tokens, dropped
