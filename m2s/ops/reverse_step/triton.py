"""Draws from the posterior and complete sampling steps as one Triton kernel, one program per row, one pass over the row.

`cpu.py` and `routes.py` have the mathematics. The row is read in tiles of several blocks of 256 columns. Of each block the
kernel keeps the greatest logit and the float64 sum of its weights, the current token left out. These say in which block the
drawn token lies, and only that block is read again. A step draws its uniform numbers in the kernel, from the same counters as
`m2s.ops.counter_noise`. A row that would stay under any posterior is not read at all: the weights of both routes that leave
are linear in off and mu_k, which sum to one, so their maximum is known beforehand.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.philox.triton import uniform as _uniform
from m2s.ops.reverse_step.cpu import BLOCK
from m2s.ops.reverse_step.routes import BayesRoutes, Counter, Routes, TokenDraw

LINES, WARPS = 8, 4  # blocks per tile, warps per program


@no_type_check
@triton.jit
def _first_above(cumulative, possible, index, target, SIZE: tl.constexpr):
    """The first possible index whose cumulative sum exceeds the target; where rounding leaves none, the last possible one."""
    found = tl.min(tl.where((cumulative > target) & possible, index, SIZE), 0)
    last = tl.max(tl.where(possible, index, -1), 0)
    return tl.minimum(found, tl.where(last < 0, SIZE - 1, last))


@no_type_check
@triton.jit
def _uniform_integer(u, count):
    """One of 0, ..., count - 1 with equal probabilities."""
    return tl.minimum((u * count).to(tl.int64), count - 1)


@no_type_check
@triton.jit(do_not_specialize=["first", "length", "low_key", "high_key", "step", "token_word", "jump_word", "route_word"])
def _draw(
    logits,
    stride,
    current,
    offsets,
    uniforms,
    row_scalars,
    row_scalars_stride,
    samples,
    first,
    length,
    low_key,
    high_key,
    step,
    token_word,
    jump_word,
    route_word,
    tokens,
    probabilities,
    mus_k,
    offs,
    vocab,
    mask,
    ROUTES: tl.constexpr,
    OTHER: tl.constexpr,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw a token (ROUTES "none"), or take a Bayes or Euler step. `row_scalars` are the fields of the routes, [C, N]."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    k = tl.load(current + row)
    offset = tl.load(offsets + row)
    clean = (k >= 0) & (k < vocab)
    masked = k == mask
    if ROUTES == "none":
        read = offset != float("inf")
    else:
        number = first + row
        sample = tl.load(samples + number // length).to(tl.uint64) & 0xFFFFFFFF
        site = (number % length).to(tl.uint64)
        low, high, moment = low_key.to(tl.uint64), high_key.to(tl.uint64), step.to(tl.uint64)
        w = _uniform(sample, moment, site, route_word.to(tl.uint64), low, high)
        row_scalars += row
        # the fields of BayesRoutes or EulerRoutes, in their order
        scalar_0 = tl.load(row_scalars)
        scalar_1 = tl.load(row_scalars + row_scalars_stride)
        scalar_2 = tl.load(row_scalars + 2 * row_scalars_stride)
        scalar_3 = tl.load(row_scalars + 3 * row_scalars_stride)
        scalar_4 = tl.load(row_scalars + 4 * row_scalars_stride)
        if ROUTES == "bayes":
            go, jump, m_k, stay, mask_share = scalar_0, scalar_1, scalar_2, scalar_3, scalar_4
            most = go + jump / tl.minimum(m_k, stay)
        else:
            into, m_k, stay = scalar_0, scalar_1, scalar_2
            count = vocab - 1 + masked.to(tl.int32)  # clean tokens other than k
            clean_mass = scalar_3
            mask_mass = tl.where(masked, 0.0, scalar_4)
            rate = tl.load(row_scalars + 5 * row_scalars_stride)
            step_length = tl.load(row_scalars + 6 * row_scalars_stride)
            most = step_length * (rate * (into + (clean_mass * count + mask_mass) / tl.minimum(m_k, stay)))
        # `most` bounds the weight of leaving over all posteriors; the margin covers its rounding
        read = (offset != float("inf")) & (w < most + most * 1e-9)
    # the result of a row that is not read: it stays
    tl.store(tokens + row, k)
    tl.store(offs + row, 0.0)
    if ROUTES == "none":
        tl.store(probabilities + row, 0.0 if OTHER else 1.0)
        tl.store(mus_k + row, 1.0)

    if read:
        line, lane, tile = tl.arange(0, LINES), tl.arange(0, BLOCK), tl.arange(0, TILES)
        at = k.to(tl.int32)
        tops = tl.full([TILES, LINES], float("-inf"), tl.float32)
        sums = tl.zeros([TILES, LINES], tl.float64)
        for i in range(0, tl.cdiv(vocab, LINES * BLOCK)):
            column = (i * LINES + line)[:, None] * BLOCK + lane[None, :]
            value = tl.load(logits + column, mask=(column < vocab) & (column != at), other=float("-inf"))
            top = tl.max(value, 1)
            weight = tl.exp(value - tl.where(top > float("-inf"), top, 0.0)[:, None])
            here = (tile == i)[:, None]  # tile i of registers: a dynamic index is not possible
            tops = tl.where(here, top[None, :], tops)
            sums = tl.where(here, tl.sum(weight.to(tl.float64), 1)[None, :], sums)
        tops, sums = tl.reshape(tops, [TILES * LINES]), tl.reshape(sums, [TILES * LINES])

        logit_k = tl.load(logits + at, mask=clean, other=float("-inf")).to(tl.float64) + offset
        best = tl.max(tops, 0).to(tl.float64)
        best = tl.where(best > float("-inf"), best, tl.where(logit_k > float("-inf"), logit_k, 0.0))
        scale = tl.exp(tops.to(tl.float64) - best)
        sums = sums * scale
        others = tl.sum(sums, 0)
        log_k = logit_k - best
        # mu_k and off, scaled so that the greater of the two exponentials is 1: neither overflows nor loses digits
        fraction = tl.exp(-tl.abs(log_k))
        mu_k = tl.where(log_k > 0, 1.0, fraction)
        off = tl.where(log_k > 0, others * fraction, others)
        both = tl.where(mu_k + off > 0, mu_k + off, 1.0)
        mu_k, off = mu_k / both, off / both

        if ROUTES == "none":
            u = tl.load(uniforms + row)
        else:
            u = _uniform(sample, moment, site, token_word.to(tl.uint64), low, high)
            v = _uniform(sample, moment, site, jump_word.to(tl.uint64), low, high)
        if OTHER:
            weight_k = others * 0.0
        else:
            weight_k = tl.exp(tl.minimum(log_k, 600.0))
        index = tl.arange(0, TILES * LINES)
        sums += tl.where(clean & (index == at // BLOCK), weight_k, 0.0)
        cumulative = tl.cumsum(sums, 0)
        total = others + weight_k
        target = u * total
        # inverse CDF: first over blocks, then inside the block
        block = _first_above(cumulative, sums > 0, index, target, TILES * LINES)
        before = tl.sum(tl.where(index == block - 1, cumulative, 0.0), 0)
        factor = tl.sum(tl.where(index == block, scale, 0.0), 0)
        top = tl.max(tl.where(index == block, tops, float("-inf")), 0)
        column = block * BLOCK + lane
        value = tl.load(logits + column, mask=(column < vocab) & (column != at), other=float("-inf"))
        weight = tl.exp(value - tl.where(top > float("-inf"), top, 0.0)).to(tl.float64)
        extra = tl.where(clean & (column == at), weight_k, 0.0)
        inside = tl.cumsum(weight * factor + extra, 0)
        token = block * BLOCK + _first_above(inside, (weight > 0) | (extra > 0), lane, target - before, BLOCK)
        token = tl.minimum(token, vocab - 1)

        if ROUTES == "none":
            drawn = tl.exp(tl.load(logits + token).to(tl.float64) - best)
            probability = tl.where(clean & (token == at), weight_k, drawn) / tl.where(total > 0, total, 1.0)
            tl.store(probabilities + row, probability)
            tl.store(offs + row, off)
            tl.store(mus_k + row, mu_k)
            tl.store(tokens + row, token.to(tl.int64))
        else:
            drawn = token.to(tl.int64)
            common = off / m_k + mu_k / stay
            if ROUTES == "bayes":
                target_token = _uniform_integer((v - mask_share) / tl.where(mask_share < 1, 1 - mask_share, 1.0), vocab)
                target_token = tl.where(v < mask_share, mask, target_token)
                leave = go + jump * common
                moved = tl.where(w < go, drawn, target_token)
            else:
                to_token = into * off
                to_clean = common * clean_mass * count
                total = to_token + to_clean + common * mask_mass
                v = v * total
                place = (v - to_token) / tl.where(to_clean > 0, to_clean, 1.0)
                place = tl.minimum(tl.maximum(place, 0.0), 1.0)
                target_token = _uniform_integer(place, count)
                target_token += tl.where(masked | (target_token < k), 0, 1)
                target_token = tl.where((mask < 0) | (v < to_token + to_clean), target_token, mask)
                leave = step_length * (rate * total)
                moved = tl.where(v < to_token, drawn, target_token)
            tl.store(offs + row, leave)
            tl.store(tokens + row, tl.where(w < leave, moved, k))


def draw_token(
    rows: Tensor, k: Tensor, offset: Tensor, u: Tensor, vocab: int, other: bool, lines: int = LINES, warps: int = WARPS
) -> TokenDraw:
    """Run `cpu.draw_token` for rows in float32 as a kernel.

    Args:
        rows: Posterior logits `[N, V]` in float32, columns contiguous.
        k: Current tokens `[N]`.
        offset: Number added to the logit of k `[N]`.
        u: Uniform numbers `[N]`.
        vocab: Number of clean tokens.
        other: Draw from the posterior without k.
        lines: Blocks per tile.
        warps: Warps per program.

    Returns:
        Token, its probability, mu_k, and the mass of the other tokens, `[N]` each.
    """
    token, probability, mu_k, off = _empty(rows, torch.int64), *(_empty(rows, torch.float64) for _ in range(3))
    no_counter = Counter(token, 1, (0, 0), 0, (0, 0, 0))
    out = (token, probability, mu_k, off)
    _launch(rows, k, offset, u, off, no_counter, 0, out, vocab, None, "none", other, lines, warps)
    return TokenDraw(*out)


def step(
    rows: Tensor,
    k: Tensor,
    offset: Tensor,
    routes: Routes,
    counter: Counter,
    first: int,
    vocab: int,
    mask: int | None,
    lines: int = LINES,
    warps: int = WARPS,
) -> tuple[Tensor, Tensor]:
    """Draw a token and take the step of `routes`, in one kernel.

    Args:
        rows: Posterior logits `[N, V]` in float32, columns contiguous.
        k: Current tokens `[N]`.
        offset: Number added to the logit of k `[N]`.
        routes: The step, fields `[N]`.
        counter: Counter of the uniform numbers; its words are those of token, jump and route.
        first: Position of the first row, counted through all samples of the counter.
        vocab: Number of clean tokens.
        mask: The mask token, or None.
        lines: Blocks per tile.
        warps: Warps per program.

    Returns:
        The next tokens, and the weight of the routes that leave. The weight is exact where it exceeds one; rows that were not
        read have 0.
    """
    token, leave = _empty(rows, torch.int64), _empty(rows, torch.float64)
    row_scalars = torch.stack([value.double() for value in routes])
    name = "bayes" if isinstance(routes, BayesRoutes) else "euler"
    out = (token, leave, leave, leave)
    _launch(rows, k, offset, leave, row_scalars, counter, first, out, vocab, mask, name, routes.other, lines, warps)
    return token, leave


def _empty(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """One number per row, not initialized."""
    return torch.empty(len(rows), dtype=dtype, device=rows.device)


def _launch(
    rows: Tensor,
    k: Tensor,
    offset: Tensor,
    u: Tensor,
    row_scalars: Tensor,
    counter: Counter,
    first: int,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    vocab: int,
    mask: int | None,
    routes: str,
    other: bool,
    lines: int,
    warps: int,
) -> None:
    """Check the rows and start one program for each."""
    if rows.dtype != torch.float32 or rows.stride(-1) != 1 or rows.shape[1] < vocab:
        raise ValueError(
            f"rows are {rows.dtype} {list(rows.shape)}, but the kernel needs {vocab} or more adjacent float32 in each"
        )
    if not len(rows):
        return
    blocks = triton.cdiv(vocab, BLOCK)
    lines = min(lines, triton.next_power_of_2(blocks))
    _draw[(len(rows),)](
        rows,
        rows.stride(0),
        k.long().contiguous(),
        offset.double().contiguous(),
        u.double().contiguous(),
        row_scalars,
        row_scalars.stride(0),
        counter.samples.long().contiguous(),
        first,
        counter.length,
        *counter.key,
        counter.step,
        *counter.words,
        *out,
        vocab,
        -1 if mask is None else mask,
        ROUTES=routes,
        OTHER=other,
        TILES=triton.next_power_of_2(triton.cdiv(blocks, lines)),
        LINES=lines,
        BLOCK=BLOCK,
        num_warps=warps,
    )
