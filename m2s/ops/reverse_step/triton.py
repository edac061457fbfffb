"""The draw and the steps in one pass over the row, one program for each; `reference.py` has the mathematics.

The row is read in tiles of several blocks of 256 columns. Of each block stay its greatest logit and the float64 sum of its
weights, the current token left out; they say in which block the drawn token lies, and that block alone is read again. The
uniforms of a step are made here, from the counters of `m2s.samplers.Noise`. A row that stays whatever its posterior is is not
read at all: both routes that leave are linear in off and mu_k, which sum to one.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2s.ops.philox.triton import uniform as _uniform
from m2s.ops.reverse_step.naive import BLOCK, BayesRoutes, Counter, Routes, TokenDraw

LINES, WARPS = 8, 4  # blocks in a tile, warps of a program


@no_type_check
@triton.jit
def _first_above(cumulative, possible, index, target, SIZE: tl.constexpr):
    """The first possible index whose cumulative sum exceeds the target; where rounding leaves none, the last possible one."""
    found = tl.min(tl.where((cumulative > target) & possible, index, SIZE), 0)
    last = tl.max(tl.where(possible, index, -1), 0)
    return tl.minimum(found, tl.where(last < 0, SIZE - 1, last))


@no_type_check
@triton.jit
def _integer(u, count):
    return tl.minimum((u * count).to(tl.int64), count - 1)


@no_type_check
@triton.jit(do_not_specialize=["first", "length", "low_key", "high_key", "step", "token_word", "jump_word", "route_word"])
def _draw(
    logits,
    stride,
    current,
    offsets,
    uniforms,
    numbers,
    column_stride,
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
    shares,
    owns,
    offs,
    vocab,
    mask,
    ROUTES: tl.constexpr,
    OTHER: tl.constexpr,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
        numbers += row
        number_0 = tl.load(numbers)
        number_1 = tl.load(numbers + column_stride)
        number_2 = tl.load(numbers + 2 * column_stride)
        number_3 = tl.load(numbers + 3 * column_stride)
        number_4 = tl.load(numbers + 4 * column_stride)
        if ROUTES == "bayes":
            go, jump, own, stay, mask_share = number_0, number_1, number_2, number_3, number_4
            most = go + jump / tl.minimum(own, stay)
        else:
            into, own, stay = number_0, number_1, number_2
            count = vocab - 1 + masked.to(tl.int32)
            clean_mass = number_3
            mask_mass = tl.where(masked, 0.0, number_4)
            rate = tl.load(numbers + 5 * column_stride)
            span = tl.load(numbers + 6 * column_stride)
            most = span * (rate * (into + (clean_mass * count + mask_mass) / tl.minimum(own, stay)))
        read = (offset != float("inf")) & (w < most + most * 1e-9)
    tl.store(tokens + row, k)
    tl.store(offs + row, 0.0)
    if ROUTES == "none":
        tl.store(shares + row, 0.0 if OTHER else 1.0)
        tl.store(owns + row, 1.0)

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
            here = (tile == i)[:, None]
            tops = tl.where(here, top[None, :], tops)
            sums = tl.where(here, tl.sum(weight.to(tl.float64), 1)[None, :], sums)
        tops, sums = tl.reshape(tops, [TILES * LINES]), tl.reshape(sums, [TILES * LINES])

        own_logit = tl.load(logits + at, mask=clean, other=float("-inf")).to(tl.float64) + offset
        best = tl.max(tops, 0).to(tl.float64)
        best = tl.where(best > float("-inf"), best, tl.where(own_logit > float("-inf"), own_logit, 0.0))
        scale = tl.exp(tops.to(tl.float64) - best)
        sums = sums * scale
        others = tl.sum(sums, 0)
        own_log = own_logit - best
        fraction = tl.exp(-tl.abs(own_log))
        mu_k = tl.where(own_log > 0, 1.0, fraction)
        off = tl.where(own_log > 0, others * fraction, others)
        both = tl.where(mu_k + off > 0, mu_k + off, 1.0)
        mu_k, off = mu_k / both, off / both

        if ROUTES == "none":
            u = tl.load(uniforms + row)
        else:
            u = _uniform(sample, moment, site, token_word.to(tl.uint64), low, high)
            v = _uniform(sample, moment, site, jump_word.to(tl.uint64), low, high)
        if OTHER:
            own_weight = others * 0.0
        else:
            own_weight = tl.exp(tl.minimum(own_log, 600.0))
        index = tl.arange(0, TILES * LINES)
        sums += tl.where(clean & (index == at // BLOCK), own_weight, 0.0)
        cumulative = tl.cumsum(sums, 0)
        total = others + own_weight
        target = u * total
        block = _first_above(cumulative, sums > 0, index, target, TILES * LINES)
        before = tl.sum(tl.where(index == block - 1, cumulative, 0.0), 0)
        factor = tl.sum(tl.where(index == block, scale, 0.0), 0)
        top = tl.max(tl.where(index == block, tops, float("-inf")), 0)
        column = block * BLOCK + lane
        value = tl.load(logits + column, mask=(column < vocab) & (column != at), other=float("-inf"))
        weight = tl.exp(value - tl.where(top > float("-inf"), top, 0.0)).to(tl.float64)
        extra = tl.where(clean & (column == at), own_weight, 0.0)
        inside = tl.cumsum(weight * factor + extra, 0)
        token = block * BLOCK + _first_above(inside, (weight > 0) | (extra > 0), lane, target - before, BLOCK)
        token = tl.minimum(token, vocab - 1)

        if ROUTES == "none":
            drawn = tl.exp(tl.load(logits + token).to(tl.float64) - best)
            share = tl.where(clean & (token == at), own_weight, drawn) / tl.where(total > 0, total, 1.0)
            tl.store(shares + row, share)
            tl.store(offs + row, off)
            tl.store(owns + row, mu_k)
            tl.store(tokens + row, token.to(tl.int64))
        else:
            drawn = token.to(tl.int64)
            common = off / own + mu_k / stay
            if ROUTES == "bayes":
                landing = _integer((v - mask_share) / tl.where(mask_share < 1, 1 - mask_share, 1.0), vocab)
                landing = tl.where(v < mask_share, mask, landing)
                leave = go + jump * common
                moved = tl.where(w < go, drawn, landing)
            else:
                to_token = into * off
                to_clean = common * clean_mass * count
                total = to_token + to_clean + common * mask_mass
                v = v * total
                place = (v - to_token) / tl.where(to_clean > 0, to_clean, 1.0)
                place = tl.minimum(tl.maximum(place, 0.0), 1.0)
                landing = _integer(place, count)
                landing += tl.where(masked | (landing < k), 0, 1)
                landing = tl.where((mask < 0) | (v < to_token + to_clean), landing, mask)
                leave = span * (rate * total)
                moved = tl.where(v < to_token, drawn, landing)
            tl.store(offs + row, leave)
            tl.store(tokens + row, tl.where(w < leave, moved, k))


def draw_token(
    rows: Tensor, k: Tensor, offset: Tensor, u: Tensor, vocab: int, other: bool, lines: int = LINES, warps: int = WARPS
) -> TokenDraw:
    """`reference.draw` of rows in float32."""
    token, share, own, off = _empty(rows, torch.int64), *(_empty(rows, torch.float64) for _ in range(3))
    nowhere = Counter(token, 1, (0, 0), 0, (0, 0, 0))
    _launch(rows, k, offset, u, off, nowhere, 0, (token, share, own, off), vocab, None, "none", other, lines, warps)
    return TokenDraw(token, share, own, off)


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
    """`routes.take` of a draw, with the uniforms of the sites `first`, `first` + 1, ... of the counter, whose words are those
    for token, jump and route. The weight of the routes that leave is right where it exceeds one."""
    token, leave = _empty(rows, torch.int64), _empty(rows, torch.float64)
    numbers = torch.stack([value.double() for value in routes])
    name = "bayes" if isinstance(routes, BayesRoutes) else "euler"
    out = (token, leave, leave, leave)
    _launch(rows, k, offset, leave, numbers, counter, first, out, vocab, mask, name, routes.other, lines, warps)
    return token, leave


def _empty(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(len(rows), dtype=dtype, device=rows.device)


def _launch(
    rows: Tensor,
    k: Tensor,
    offset: Tensor,
    u: Tensor,
    numbers: Tensor,
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
    if rows.dtype != torch.float32 or rows.stride(-1) != 1 or rows.shape[1] < vocab:
        raise ValueError(f"rows are {rows.dtype} {list(rows.shape)}, expected {vocab} or more adjacent float32 in each")
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
        numbers,
        numbers.stride(0),
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
