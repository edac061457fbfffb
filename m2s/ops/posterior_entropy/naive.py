"""Score entropy through the rank-one bridge, accurate at any vocabulary and without a K-vector for any candidate.

At a site with current token k and clean token x the loss is n(k) sum_{y != k} h(s_y, r_y), h(s, r) = r g(e), e = s/r - 1,
g(e) = e - log(1 + e). Neither e nor 1 + e is found by subtraction from one. With M = m(k), D = alpha + m(k) and
off = sum_{z != k} mu_z:

    k = x:                  r_y = m(y)/D,             e_y = (alpha/M) (off + D mu_y / m(y))
    k != x, y not in {k,x}: r_y = m(y)/M,             e_y = alpha (mu_y / m(y) - mu_k / D)
    k != x, y = x:          r_x = (alpha + m(x))/M,   e_x = -alpha/(alpha + m(x)) (rest + mu_k + m(x) mu_k / D)

where rest sums mu outside {k, x}, so that 1 - mu_x is rest + mu_k. Where m(y) = 0, r_y = 0 and h = s_y. Outside {k, x} both
e_y and 1 + e_y are straight lines in mu_y. The gradient, with G_y = e_y / (1 + e_y), C = sum_{y != k} m(y) G_y and Gbar =
sum_{y != k} mu_y G_y, is n(k) alpha/M times

    mu_z (G_z - Gbar + mu_k C / D)  at logit z != k,      -mu_k (Gbar + off C / D)  at logit k.

Everything that belongs to a row, and the sums over its candidates, is float64; only exp(logits) is kept, in the dtype of
the logits, and becomes the gradient in the backward pass. What is a vector over the vocabulary is worked on a block of rows
at a time, in cache; a compiler gets the same passes without blocks or buffers, and keeps nothing of that size.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2s.process import SiteCoefficients

CPU_BLOCK = 1 << 18  # logits worked on at once on a CPU, so that the buffers stay in cache
GPU_BLOCK = 1 << 26
SHORT = 1024  # rows too short for a logarithm of eight factors to pay


def block_rows(logits: Tensor) -> int:
    """How many rows to work on at once."""
    return max(1, (CPU_BLOCK if logits.device.type == "cpu" else GPU_BLOCK) // logits.shape[-1])


def excess(e: Tensor, one_plus_e: Tensor) -> Tensor:
    """g(e) = e - log(1 + e). For small e, where that cancels: z = e/(2+e), g = z (e - 2 z^2 (1/3 + z^2/5 + z^4/7 + ...))."""
    z = e / (e + 2)
    square = z * z
    near = z * (e - square * (2 / 3 + square * (2 / 5 + square * (2 / 7))))
    return torch.where(e.abs() < (0.2 if e.dtype == torch.float32 else 0.01), near, e - torch.log(one_plus_e))


class _Row(NamedTuple):
    """One number for each row, [N, 1]: outside {k, x}, for w = exp(logit - top), 1 + e = slope w + level_1 and
    d loss / d logit = scale w (lift (w - pivot) / (1 + e) + shift). At k and x the gradient is given as it is. `top` is the
    greatest logit.
    """

    slope: Tensor
    level_1: Tensor
    pivot: Tensor
    lift: Tensor
    shift: Tensor
    scale: Tensor
    at_x: Tensor
    at_k: Tensor
    top: Tensor


def _weigh(logits: Tensor, w: Tensor, two: Tensor, work: Tensor) -> tuple[Tensor, ...]:
    """First pass: w = exp(logits - top) with 0 at the `two` tokens x and k; top, and the sum and greatest of what is left."""
    top = logits.amax(-1, keepdim=True)
    torch.sub(logits, top, out=w).exp_().scatter_(-1, two, 0.0)
    return top.to(work.dtype), work[0].copy_(w).sum(-1, keepdim=True), w.amax(-1, keepdim=True).to(work.dtype)


def _sums(w: Tensor, slope: Tensor, level: Tensor, level_1: Tensor, sum_e: Tensor, work: Tensor) -> tuple[Tensor, Tensor]:
    """Second pass, e = slope w + level: sums of g(e) and of G = e/(1 + e) over all columns of w.

    float64 has digits to spare for float32 weights: there sum g = sum e - sum log(1 + e), with one logarithm for eight factors.
    float64 weights have g by its series where it is small.
    """
    e, v = work
    torch.mul(e.copy_(w), slope, out=e)
    torch.add(e, level_1, out=v)
    e.add_(level)
    if w.dtype == e.dtype:
        return excess(e, v).sum(-1, keepdim=True), (e / v).sum(-1, keepdim=True)
    sum_big_g = e.div_(v).sum(-1, keepdim=True)
    sum_g = sum_e.clone()
    for _ in range(3):
        half = v.shape[-1] // 2
        if v.shape[-1] % 2:
            sum_g -= torch.log(v[:, -1:])
        v = v[:, :half].mul_(v[:, half : 2 * half])
    return sum_g - v.log_().sum(-1, keepdim=True), sum_big_g


def _compiled_weights(logits: Tensor, top: Tensor, two: Tensor) -> Tensor:
    """What `_weigh` leaves in w, as an expression: a compiler plans its own buffers."""
    return torch.where(_at(two[:, :1], logits) | _at(two[:, 1:], logits), 0.0, torch.exp(logits - top.to(logits.dtype)))


def _compiled_weigh(logits: Tensor, two: Tensor, wide: torch.dtype) -> tuple[Tensor, ...]:
    """w and what `_weigh` returns. For a GPU the weights of the next pass are an expression of their own: no w is kept."""
    top = logits.amax(-1, keepdim=True)
    w = _compiled_weights(logits, top, two)
    found = [top.to(wide), w.to(wide).sum(-1, keepdim=True), w.amax(-1, keepdim=True).to(wide)]
    top, rest_w, top_w = _hold(torch.cat(found, -1)).split(1, -1)
    return _compiled_weights(logits, top, two) if logits.is_cuda else w, top, rest_w, top_w


def _compiled_sums(w: Tensor, slope: Tensor, level: Tensor, level_1: Tensor, sum_e: Tensor) -> tuple[Tensor, Tensor]:
    """What `_sums` returns; eight columns side by side, so that w is read once and nothing is written."""
    if w.dtype == slope.dtype or w.shape[-1] <= SHORT:
        scaled = slope * w.to(slope.dtype)
        e, v = scaled + level, scaled + level_1
        return excess(e, v).sum(-1, keepdim=True), (e / v).sum(-1, keepdim=True)
    sum_g, sum_big_g = sum_e, torch.zeros_like(sum_e)
    width, left = w.shape[-1] // 8, w.shape[-1] % 8
    together = [[w[:, i * width : (i + 1) * width] for i in range(8)]] if width else []
    for columns in [*together, *([w[:, 8 * width + i : 8 * width + i + 1]] for i in range(left))]:
        divisor, dividend = torch.ones_like(slope), torch.zeros_like(slope)  # e/v + e'/v' = (e v' + e' v) / (v v')
        for part in columns:
            scaled = slope * part.to(slope.dtype)
            v = scaled + level_1
            divisor, dividend = divisor * v, dividend * v + divisor * (scaled + level)
        sum_g = sum_g - torch.log(divisor).sum(-1, keepdim=True)
        sum_big_g = sum_big_g + (dividend / divisor).sum(-1, keepdim=True)
    return sum_g, sum_big_g


def _at(index: Tensor, logits: Tensor) -> Tensor:
    """Where the column is `index`: what a compiler can fuse, as a scatter it cannot."""
    return torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device) == index.int()


def _forward(
    logits: Tensor, offset: Tensor, k: Tensor, x: Tensor, site: SiteCoefficients, mask: int | None
) -> tuple[Tensor, Tensor, _Row]:
    """The loss [N, 1], the weights w, and what turns them into the gradient."""
    alpha, own, stay, clean, mask_mass, rate = site
    counted = (rate > 0) & (own > 0)
    own = torch.where(own > 0, own, 1)
    same, k_clean = k == x, torch.ones_like(counted) if mask is None else k != mask
    apart = k_clean & ~same  # k and x are two entries
    two = torch.cat([x, torch.where(k_clean, k, x)], -1)
    compiling = torch.compiler.is_compiling()
    if compiling:
        w, top, rest_w, top_w = _compiled_weigh(logits, two, alpha.dtype)
    else:
        size = block_rows(logits)
        blocks = [slice(start, start + size) for start in range(0, len(logits), size)]
        w = torch.empty_like(logits)
        work = torch.empty(2, min(size, len(logits)), logits.shape[-1], dtype=alpha.dtype, device=logits.device)
        top, rest_w, top_w = _joined([_weigh(logits[at], w[at], two[at], work[:, : len(w[at])]) for at in blocks])
    logit_x, logit_k = (logits.gather(-1, two) - top).split(1, -1)
    w_x, w_k = torch.exp(logit_x + torch.where(same, offset, 0)), torch.exp(logit_k + offset)
    total = rest_w + w_x + torch.where(apart, w_k, 0)
    rest, mu_x, mu_k = rest_w / total, w_x / total, torch.where(k_clean, w_k / total, 0)
    log_mu_x = logit_x - total.log()
    off = torch.where(same, rest, rest + mu_x)

    # every candidate outside {k, x}; with m(clean) = 0 there is no ratio to compare with, and h = s
    compared = clean > 0
    slope = torch.where(same, stay / own, 1) * alpha / torch.where(compared, clean, 1) / total
    level = torch.where(same, off * alpha / own, -mu_k * alpha / stay)
    kept = off + mu_k * own / stay
    level_1 = torch.where(counted, torch.where(same, 1 + level, kept), 1)
    linear = slope * rest_w + logits.shape[-1] * level
    if compiling:
        sum_g, sum_big_g = _compiled_sums(w, slope, level, level_1, linear)
    else:
        sum_g, sum_big_g = _joined(
            [_sums(w[at], slope[at], level[at], level_1[at], linear[at], work[:, : len(w[at])]) for at in blocks]
        )
    taken_out = torch.where(apart, 2, 1)  # columns with w = 0 that are no candidates
    sum_g = (sum_g - taken_out * excess(level, level_1)).clamp(min=0)
    sum_big_g = sum_big_g - taken_out * level / level_1
    bulk = torch.where(compared, clean / torch.where(same, stay, own) * sum_g, alpha / own * rest)

    # the clean token itself, where it is a candidate
    stay_x = alpha + clean
    e_x = -alpha / stay_x * (rest + mu_k + clean * mu_k / stay)
    score_x = alpha * mu_x + clean * kept  # s_x M
    log_1 = torch.where(compared, torch.log(score_x.where(compared, 1) / stay_x), log_mu_x)
    at_x = stay_x / own * torch.where(e_x > -0.5, excess(e_x, log_1.exp()), e_x - log_1)
    loss = bulk + torch.where(same, 0, at_x)
    if mask is not None:  # the mask as a candidate: mu_mask = 0
        candidate = k_clean & (mask_mass > 0)
        loss = loss + torch.where(candidate, mask_mass / torch.where(same, stay, own) * excess(level, level_1), 0)
    loss = torch.where(counted, rate * loss, 0)

    # sum w G from e G = e - G
    sum_mu_g = (linear - taken_out * level - level_1 * sum_big_g) / (slope * total)
    ratio_x = torch.where(compared, stay_x / score_x.where(compared, 1), 0)  # 1 / (1 + e_x)
    mu_g_x = torch.where(same, 0, torch.where(compared, mu_x * e_x * ratio_x, e_x))
    g_bar = torch.where(compared, sum_mu_g, rest) + mu_g_x
    big_c = clean * (sum_big_g + torch.where(same, 0, e_x * ratio_x))
    if mask is not None:
        big_c = big_c + torch.where(candidate, mask_mass * level / level_1, 0)
    shift = mu_k * big_c / stay - g_bar
    scale = torch.where(counted, rate * alpha / own, 0)
    gradient_k = -scale * mu_k * (g_bar + off * big_c / stay)
    gradient_x = scale * (mu_g_x + mu_x * shift)
    # G_z + shift = (G_z - c) + (c + shift), c the greatest G or 0: what is subtracted in the dtype of w is then small where
    # it should be
    e_top, v_top = slope * top_w + level, slope * top_w + level_1
    by_top = e_top > 0
    lift = torch.where(compared, torch.where(by_top, slope / v_top, slope), 0)
    pivot = torch.where(by_top, top_w, -level / slope)
    c = torch.where(compared, torch.where(by_top, e_top / v_top, 0), 1)
    at_k = torch.where(k_clean, gradient_k, gradient_x)
    at_x = torch.where(same, gradient_k, gradient_x)
    return loss, w, _Row(slope, level_1, pivot, lift, c + shift, scale / total, at_x, at_k, top)


def _lines(row: _Row, upstream: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """w (lift (w - pivot) / v + shift) scale upstream, with the factors of the quotient put into its divisor v."""
    slope, level_1, pivot, lift, shift, scale, at_x, at_k, top = row
    lift, shift = lift * scale * upstream, shift * scale * upstream
    level_1 = torch.where(lift == 0, torch.inf, level_1 / lift.where(lift != 0, 1))
    slope = torch.where(lift == 0, 1, slope / lift.where(lift != 0, 1))
    return tuple(value.to(dtype) for value in (slope, level_1, pivot, shift, at_x * upstream, at_k * upstream, top))


def _backward(w: Tensor, row: _Row, k: Tensor, x: Tensor, mask: int | None, upstream: Tensor) -> Tensor:
    """Third pass: the gradient times `upstream` [N, 1], in the place of w."""
    slope, level_1, pivot, shift, at_x, at_k, _ = _lines(row, upstream, w.dtype)
    size = block_rows(w)
    work = w.new_empty(2, min(size, len(w)), w.shape[-1])
    for start in range(0, len(w), size):
        at = slice(start, start + size)
        part = w[at]
        v, difference = work[:, : len(part)]
        torch.mul(part, slope[at], out=v).add_(level_1[at])
        part.mul_(torch.sub(part, pivot[at], out=difference).div_(v).add_(shift[at]))
    w.scatter_(-1, x, at_x)
    return w.scatter_(-1, k if mask is None else torch.where(k == mask, x, k), at_k)


def _compiled_backward(logits: Tensor, row: _Row, k: Tensor, x: Tensor, vocab: int, upstream: Tensor) -> Tensor:
    """The same as an expression of the logits, as wide as they are, with zeros past the vocabulary."""
    slope, level_1, pivot, shift, at_x, at_k, top = _hold(torch.cat(_lines(row, upstream, logits.dtype), -1)).split(1, -1)
    w = torch.exp(logits - top)
    gradient = w * ((w - pivot) / (w * slope + level_1) + shift)
    gradient = torch.where(_at(k, w), at_k, torch.where(_at(x, w), at_x, gradient))
    if logits.shape[-1] == vocab:
        return gradient
    return torch.where(torch.arange(logits.shape[-1], device=logits.device) < vocab, gradient, 0)


def _joined(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(column) for column in zip(*parts, strict=True)]


# A compiler would rather find these few numbers of a row again at every entry of it than keep them; this it must keep.
@torch.library.custom_op("m2s::hold", mutates_args=())
def _hold(row: Tensor) -> Tensor:
    return row.clone()


@_hold.register_fake
def _(row: Tensor) -> Tensor:
    return torch.empty_like(row)


class _BridgedScoreEntropy(torch.autograd.Function):
    """The logits may be wider than the vocabulary; so is their gradient, with zeros there."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, offset: Tensor, k: Tensor, x: Tensor, mask: int | None, vocab: int, *site: Tensor
    ) -> Tensor:
        loss, w, row = _forward(logits[:, :vocab], offset, k, x, SiteCoefficients(*site), mask)
        ctx.mask, ctx.vocab = mask, vocab
        if torch.compiler.is_compiling():
            ctx.save_for_backward(logits, k, x, _hold(torch.cat(row, -1)))
        elif ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, offset, k, x, *site)
            ctx.weights = (w, row)
        return loss.squeeze(-1).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        mask, vocab, upstream = ctx.mask, ctx.vocab, upstream.unsqueeze(-1)
        if torch.compiler.is_compiling():
            logits, k, x, held = ctx.saved_tensors
            gradient = _compiled_backward(logits, _Row(*held.split(1, -1)), k, x, vocab, upstream)
        else:
            logits, offset, k, x, *site = ctx.saved_tensors
            weights, ctx.weights = ctx.weights, None  # used up; a second call (a retained graph) finds them anew
            w, row = weights or _forward(logits[:, :vocab], offset, k, x, SiteCoefficients(*site), mask)[1:]
            gradient = _backward(w, row, k, x, mask, upstream)
            if logits.shape[-1] > vocab:
                gradient = torch.nn.functional.pad(gradient, (0, logits.shape[-1] - vocab))
        return (gradient, *(None for _ in range(11)))


def posterior_score_entropy(
    logits: Float[Tensor, "*site V"],
    offset: Float[Tensor, "*site"],
    x_0: Int[Tensor, "*site"],
    x_t: Int[Tensor, "*site"],
    site: SiteCoefficients,
    mask: int | None,
    vocab: int,
) -> Float[Tensor, "*site"]:
    """n(k) sum_{y != k} h(s_y, r_y) for posterior logits of a rank-one process; nats per site. The first `vocab` count.

    `offset` is added to the logit of x_t. It and the scalars of `site` are float64 where the device has it; rows are summed so.
    """
    if not x_0.numel():
        return logits.sum(-1)
    flat = [value.reshape(-1, 1) for value in site]
    k, x = x_t.reshape(-1, 1).long(), x_0.reshape(-1, 1).long()
    rows = logits.reshape(-1, logits.shape[-1])
    loss = _BridgedScoreEntropy.apply(rows, offset.reshape(-1, 1), k, x, mask, vocab, *flat)
    return loss.reshape(x_0.shape)


def scalars(offset: Tensor, site: SiteCoefficients) -> Float[Tensor, "7 N"]:
    """What a row needs besides its logits and tokens, in one tensor."""
    return torch.stack([value.reshape(-1) for value in torch.broadcast_tensors(offset, *site)])


def prepare(*told: Tensor) -> tuple[Tensor, ...]:
    """Tokens and scalars of all rows, before some at a time are asked for: nothing is to be done."""
    return told


def rows(
    logits: Float[Tensor, "N V"],
    k: Int[Tensor, "N"],
    x: Int[Tensor, "N"],
    scalars: Float[Tensor, "7 N"],
    masked: bool,
    vocab: int,
    weight: Float[Tensor, "N"] | None,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N V"] | None]:
    """The loss, and where a weight is given the gradient of weight times loss, in `dtype`."""
    offset, *site = (value.unsqueeze(-1) for value in scalars)
    mask, k, x = vocab if masked else None, k.long().unsqueeze(-1), x.long().unsqueeze(-1)
    loss, w, row = _forward(logits[:, :vocab], offset, k, x, SiteCoefficients(*site), mask)
    if weight is None:
        return loss.squeeze(-1), None
    gradient = _backward(w, row, k, x, mask, weight.to(loss.dtype).unsqueeze(-1)).to(dtype)
    return loss.squeeze(-1), torch.nn.functional.pad(gradient, (0, logits.shape[-1] - vocab))
