"""Score entropy through the rank-one bridge, without cancellation and without a K-vector for any candidate.

At a site with current token k and clean token x the loss is n(k) sum_{y != k} h(s_y, r_y), h(s, r) = r g(e), e = s/r - 1,
g(e) = e - log(1 + e). Written directly this cancels: at K = 50,257 and t = 1e-3 single terms are far larger than their sum.
Here e is never found by subtraction from one. With M = m(k), D = alpha + m(k), off = sum_{z != k} mu_z:

    k = x:                  r_y = m(y)/D,             e_y = (alpha/M) (off + D mu_y / m(y))
    k != x, y not in {k,x}: r_y = m(y)/M,             e_y = alpha (mu_y / m(y) - mu_k / D)
    k != x, y = x:          r_x = (alpha + m(x))/M,   e_x = -alpha/(alpha + m(x)) (rest + mu_k + m(x) mu_k / D)

where rest sums mu outside {k, x}, so that 1 - mu_x is rest + mu_k. Where m(y) = 0, r_y = 0 and h = s_y. The gradient, with
G_y = e_y / (1 + e_y), C = sum_{y != k} m(y) G_y and Gbar = sum_{y != k} mu_y G_y, is n(k) alpha/M times

    mu_z (G_z - Gbar + mu_k C / D)  at logit z != k,      -mu_k (Gbar + off C / D)  at logit k.

It is found together with the value, in three passes over the vocabulary, a block of rows at a time so that the block stays in
cache; nothing else is made for the backward pass. So that G_z - Gbar does not cancel where all G are near one, G is taken
relative to a constant c.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2s.process import Site

CPU_BLOCK = 1 << 16  # logits worked on at once on a CPU, so that the buffers stay in cache
GPU_BLOCK = 1 << 26


def block_rows(logits: Tensor) -> int:
    """How many rows to work on at once; all of them when compiled, where the compiler fuses the passes."""
    rows, columns = logits.shape
    if torch.compiler.is_compiling():
        return rows
    return max(1, (CPU_BLOCK if logits.device.type == "cpu" else GPU_BLOCK) // columns)


Room = Sequence[Tensor | None]  # tensors to write into, or None for new ones


def excess(e: Tensor, one_plus_e: Tensor, room: Room = (None,) * 5) -> Tensor:
    """g(e) = e - log(1 + e), given both e and 1 + e. Near 0, where that cancels, by g = z e - 2 z^3 (1/3 + z^2/5 + ...), z =
    e/(2+e).

    Split at c = e clamped to the range of the series: g(e) = g(c) + (e - c) - log((1+e) / (1+c)), whose last terms are exactly
    0 inside.
    """
    low, high = (-0.25, 0.3) if e.dtype == torch.float32 else (-0.02, 0.02)
    near = torch.clamp(e, low, high, out=room[0])
    near_1 = torch.clamp(one_plus_e, 1 + low, 1 + high, out=room[1])
    far = torch.div(near_1, one_plus_e, out=room[2]).log_().add_(e).sub_(near)
    z = torch.div(near, near_1.add_(1), out=room[1])
    square = torch.mul(z, z, out=room[3])
    series = torch.mul(square, 2 / 7, out=room[4]).add_(2 / 5).mul_(square).add_(2 / 3).mul_(square)
    return far.add_(torch.sub(near, series, out=room[4]).mul_(z))


class _Ratios(NamedTuple):
    """The scalars of every row, [N, 1] each, for w_y = total mu_y: e_y = slope w_y + level, 1 + e_y = slope w_y + level_1, y
    outside {k, x}.
    """

    slope: Tensor
    level: Tensor
    level_1: Tensor
    pivot: Tensor  # G_y - c = lift (w_y - pivot) / (1 + e_y)
    lift: Tensor

    def at(self, rows: slice) -> "_Ratios":
        return _Ratios(*(value[rows] for value in self))


def _weigh(logits: Tensor, w: Tensor, two: Tensor) -> tuple[Tensor, ...]:
    """First pass: w = exp(logits - top), with 0 at the `two` tokens x and k; top, the entries taken out, the sum and the
    greatest of the others.
    """
    top = logits.amax(-1, keepdim=True)
    torch.sub(logits, top, out=w).exp_()
    taken = w.gather(-1, two)
    w.scatter_(-1, two, 0.0)
    return top, taken, w.sum(-1, keepdim=True), w.amax(-1, keepdim=True)


def _sums(w: Tensor, two: Tensor, row: _Ratios, wanted: bool, room: Room) -> tuple[Tensor, ...]:
    """Second pass, over y outside {k, x}: the sums of g(e_y), G_y, (w_y - pivot) G_y and w_y (w_y - pivot) / (1 + e_y)."""
    one_plus_e = torch.mul(w, row.slope, out=room[0])
    e = torch.add(one_plus_e, row.level, out=room[1]).scatter_(-1, two, 0.0)
    one_plus_e.add_(row.level_1).scatter_(-1, two, 1.0)
    total = excess(e, one_plus_e, room[2:]).sum(-1, keepdim=True)
    if not wanted:
        return (total,)
    difference = torch.sub(w, row.pivot, out=room[2])
    big_g = e.div_(one_plus_e)
    sum_g = big_g.sum(-1, keepdim=True)
    weighted = big_g.mul_(difference).sum(-1, keepdim=True)
    return total, sum_g, weighted, difference.div_(one_plus_e).mul_(w).sum(-1, keepdim=True)


def _slopes(w: Tensor, row: _Ratios, shift: Tensor, scale: Tensor, room: Room) -> None:
    """Third pass: w_y (G_y - c + shift) scale, in the place of w."""
    one_plus_e = torch.mul(w, row.slope, out=room[0]).add_(row.level_1)
    w.mul_(torch.sub(w, row.pivot, out=room[1]).div_(one_plus_e).mul_(row.lift * scale).add_(shift * scale))


def _loss_and_gradient(
    logits: Tensor, k: Tensor, x: Tensor, site: Site, mask: int | None, wanted: bool
) -> tuple[Tensor, Tensor]:
    """The loss [N, 1] and, where `wanted`, its gradient. What is a vector over the vocabulary is worked on a block of rows at a
    time.
    """
    alpha, own, stay, clean, mask_mass, rate = site
    counted = (rate > 0) & (own > 0)
    own = torch.where(own > 0, own, 1)
    same, k_clean = k == x, torch.ones_like(counted) if mask is None else k != mask
    k_index = torch.where(k_clean, k, x)
    size = block_rows(logits)
    blocks = [slice(start, start + size) for start in range(0, len(logits), size)]

    w, two = torch.empty_like(logits), torch.cat([x, k_index], -1)
    top, taken, rest, mu_top = _joined([_weigh(logits[at], w[at], two[at]) for at in blocks])
    mu_x, mu_k = taken[:, :1], torch.where(k_clean & ~same, taken[:, 1:], 0)
    total = rest + mu_x + mu_k
    log_mu_x = logits.gather(-1, x) - top - total.log()
    rest, mu_x, mu_top = rest / total, mu_x / total, mu_top / total
    mu_k = torch.where(same, mu_x, mu_k / total)
    off = torch.where(same, rest, rest + mu_x)

    # every candidate outside {k, x}; with m(clean) = 0 there is no ratio to compare with, and h = s
    compared = clean > 0
    m_y = torch.where(compared, clean, 1)
    keep_k = mu_k * own / stay
    slope = torch.where(same, stay / own, 1) * alpha / m_y
    level = torch.where(same, off * alpha / own, -mu_k * alpha / stay)
    level_1 = torch.where(same, 1 + level, off + keep_k)
    # G relative to c, that of the likeliest candidate, or to 0 where that is negative
    e_top, one_plus_top = slope * mu_top + level, slope * mu_top + level_1
    near_top = ~compared | (e_top > 0)
    c = torch.where(compared, torch.where(near_top, e_top / one_plus_top, 0), 1)
    lift = torch.where(compared, torch.where(near_top, slope / one_plus_top, slope), 0)
    pivot = torch.where(near_top, mu_top, -level / slope)
    row = _Ratios(slope / total, level, level_1, pivot * total, lift / total)
    work = None if torch.compiler.is_compiling() else logits.new_empty(7, min(size, len(logits)), logits.shape[-1])

    def room(at: slice) -> Room:
        return (None,) * 7 if work is None else list(work[:, : len(w[at])])

    sums = _joined([_sums(w[at], two[at], row.at(at), wanted, room(at)) for at in blocks])
    bulk = torch.where(compared, clean / torch.where(same, stay, own) * sums[0], alpha / own * rest)

    # the clean token itself, where it is a candidate
    stay_x = alpha + clean
    e_x = torch.where(same, 0, -alpha / stay_x * (rest + mu_k + clean * mu_k / stay))
    numerator = torch.where(compared, alpha * mu_x + clean * (off + keep_k), 1)
    log_1 = torch.where(same, 0, torch.where(compared, torch.log(numerator / stay_x), log_mu_x))
    one_plus_e_x = log_1.exp()
    at_x = stay_x / own * torch.where(e_x > -0.5, excess(e_x, one_plus_e_x), e_x - log_1)
    loss = bulk + torch.where(same, 0, at_x)
    if mask is not None:  # the mask as a candidate: mu_mask = 0
        candidate = k_clean & (mask_mass > 0)
        loss = loss + torch.where(candidate, mask_mass / torch.where(same, stay, own) * excess(level, level_1), 0)
    loss = torch.where(counted, rate * loss, 0)
    if not wanted:
        return loss, w

    # bracket = c + C/D, C = sum_{y != k} m(y) G_y. Where c > 0, f < 1 and k != x it is rearranged into small terms, by 1 = rest
    # + mu_x + mu_k:
    # c + m/D (sum_bulk G + G_x) = alpha/D (sum_bulk (mu_top - mu_y) G_y + mu_top - mu_k - mu_x - (n+1) m/D mu_k) / (1 + e_top)
    # + f/(1+f),
    # n the number in the bulk, 1 + f = (alpha mu_x + m (off + mu_k M/D)) / m
    _, sum_g, weighted, mean_bulk = sums
    weighted, mean_bulk = weighted / total, lift * mean_bulk / total**2
    portion = clean / stay
    others = logits.shape[-1] - torch.where(same | ~k_clean, 1, 2)
    f = alpha * (mu_x / m_y - mu_k / stay)
    small = mu_top - mu_k - mu_x - weighted - (others + 1) * portion * mu_k
    rearranged = alpha / stay * small / one_plus_top + f * m_y / numerator
    plain = c + portion * (sum_g + e_x / torch.where(compared, one_plus_e_x, 1))
    bracket = torch.where(compared & near_top & (f < 1) & ~same, rearranged, plain)
    if mask is not None:
        bracket = bracket + torch.where(candidate, mask_mass / stay * level / level_1, 0)
    ratio_x = stay_x * mu_x / numerator  # mu_x / (1 + e_x)
    mean_x = torch.where(near_top, ratio_x * (e_x - e_top) / one_plus_top, ratio_x * e_x)  # mu_x (G_x - c)
    mean_x = torch.where(same, 0, torch.where(compared, mean_x, e_x - mu_x))
    mean, common = mean_bulk + mean_x, mu_k * bracket
    scale = torch.where(counted, rate * alpha / own, 0)
    for at in blocks:
        _slopes(w[at], row.at(at), (common - mean)[at], (scale / total)[at], room(at))
    # at x, with 1 - mu_x as rest + mu_k
    gradient_x = scale * (mean_x * (rest + mu_k) - mu_x * mean_bulk + mu_x * common)
    gradient_k = -scale * mu_k * (mean + off * bracket)
    w.scatter_(-1, x, torch.where(same, gradient_k, gradient_x))
    w.scatter_(-1, k_index, torch.where(k_clean, gradient_k, gradient_x))
    return loss, w


def _joined(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(column) for column in zip(*parts, strict=True)]


class _BridgedScoreEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: Tensor, x: Tensor, mask: int | None, *site: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        loss, gradient = _loss_and_gradient(logits, k, x, Site(*site), mask, wanted)
        if wanted:
            ctx.save_for_backward(logits, k, x, *site)
            ctx.mask, ctx.gradient = mask, gradient
        return loss.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, ctx.gradient = ctx.gradient, None  # handed over, not copied; a second call (a retained graph) finds it anew
        if gradient is None:
            logits, k, x, *site = ctx.saved_tensors
            _, gradient = _loss_and_gradient(logits, k, x, Site(*site), ctx.mask, True)
        return (gradient.mul_(upstream.unsqueeze(-1)), *(None for _ in range(9)))


def bridged_score_entropy(
    logits: Float[Tensor, "*site K"], x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], site: Site, mask: int | None
) -> Float[Tensor, "*site"]:
    """n(k) sum_{y != k} h(s_y, r_y) for posterior logits over the clean tokens of a rank-one process; nats per site."""
    flat = [value.to(logits.dtype).reshape(-1, 1) for value in site]
    k, x = x_t.reshape(-1, 1).long(), x_0.reshape(-1, 1).long()
    loss = _BridgedScoreEntropy.apply(logits.reshape(-1, logits.shape[-1]), k, x, mask, *flat)
    return loss.reshape(x_0.shape)
