"""Score entropy through the rank-one bridge, without cancellation and without a K-vector for any candidate.

At a site with current token k and clean token x the loss is n(k) sum_{y != k} h(s_y, r_y), h(s, r) = r g(e), e = s/r - 1,
g(e) = e - log(1 + e). Written directly this cancels: at K = 50,257 and t = 1e-3 single terms are far larger than their sum. Here e is
never found by subtraction from one. With M = m(k), D = alpha + m(k), off = sum_{z != k} mu_z:

    k = x:                  r_y = m(y)/D,             e_y = (alpha/M) (off + D mu_y / m(y))
    k != x, y not in {k,x}: r_y = m(y)/M,             e_y = alpha (mu_y / m(y) - mu_k / D)
    k != x, y = x:          r_x = (alpha + m(x))/M,   e_x = -alpha/(alpha + m(x)) (rest + mu_k + m(x) mu_k / D)

where rest sums mu outside {k, x}, so that 1 - mu_x is rest + mu_k. Where m(y) = 0, r_y = 0 and h = s_y. The gradient, with
G_y = e_y / (1 + e_y), C = sum_{y != k} m(y) G_y and Gbar = sum_{y != k} mu_y G_y, is n(k) alpha/M times

    mu_z (G_z - Gbar + mu_k C / D)  at logit z != k,      -mu_k (Gbar + off C / D)  at logit k.

It is found together with the value, a block of rows at a time, while the block is in cache; nothing else is kept for the backward pass.
"""

from typing import Any

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


def excess(e: Tensor, one_plus_e: Tensor) -> Tensor:
    """g(e) = e - log(1 + e). For small e, where that cancels: z = e/(2+e), g = z (e - 2 z^2 (1/3 + z^2/5 + z^4/7 + ...))."""
    z = e / (e + 2)
    square = z * z
    series = (square * (2 / 7)).add_(2 / 5).mul_(square).add_(2 / 3).mul_(square)
    near = torch.sub(e, series, out=series).mul_(z)
    far = torch.log(one_plus_e).neg_().add_(e)
    return torch.where(e.abs() < (0.2 if e.dtype == torch.float32 else 0.01), near, far)


def _block(
    logits: Tensor, k: Tensor, x: Tensor, site: Site, mask: int | None, gradient: Tensor | None
) -> Float[Tensor, "N 1"]:
    """The loss of a block of rows; its gradient is written into `gradient` where one is wanted. All scalars are [N, 1]."""
    alpha, own, stay, clean, mask_mass, rate = site
    counted = (rate > 0) & (own > 0)
    own = torch.where(own > 0, own, 1)
    same, k_clean = k == x, torch.ones_like(counted) if mask is None else k != mask
    k_index = torch.where(k_clean, k, x)

    top = logits.amax(-1, keepdim=True)
    mu = (logits - top).exp_()
    total = mu.sum(-1, keepdim=True)
    mu.div_(total)
    mu_x, mu_k = mu.gather(-1, x), torch.where(k_clean, mu.gather(-1, k_index), 0)
    log_mu_x = logits.gather(-1, x) - top - total.log()
    mu.scatter_(-1, k_index, 0.0).scatter_(-1, x, 0.0)
    rest = mu.sum(-1, keepdim=True)
    off = torch.where(same, rest, rest + mu_x)

    # every candidate outside {k, x}; with m(clean) = 0 there is no ratio to compare with, and h = s
    compared = clean > 0
    m_y = torch.where(compared, clean, 1)
    keep_k = mu_k * own / stay
    slope = torch.where(same, stay / own, 1) * alpha / m_y
    level = torch.where(same, off * alpha / own, -mu_k * alpha / stay)
    level_1 = torch.where(same, 1 + level, off + keep_k)
    e = mu * slope
    one_plus_e = e + level_1
    e.add_(level)
    g = excess(e, one_plus_e).scatter_(-1, k_index, 0.0).scatter_(-1, x, 0.0)
    bulk = torch.where(compared, clean / torch.where(same, stay, own) * g.sum(-1, keepdim=True), alpha / own * rest)

    # the clean token itself, where it is a candidate
    stay_x = alpha + clean
    e_x = torch.where(same, 0, -alpha / stay_x * (rest + mu_k + clean * mu_k / stay))
    mixed = clean * (off + keep_k)
    log_1 = torch.where(compared, torch.log((alpha * mu_x + mixed) / stay_x), log_mu_x)
    log_1 = torch.where(same, 0, log_1)
    one_plus_e_x = log_1.exp()
    direct = stay_x / own * excess(e_x, one_plus_e_x)
    certain = stay_x / own * (e_x - log_1)
    at_x = torch.where(same, 0, torch.where(e_x.abs() < 0.5, direct, certain))

    loss = bulk + at_x
    if mask is not None:  # the mask as a candidate: mu_mask = 0
        candidate = k_clean & (mask_mass > 0)
        at_mask = mask_mass / torch.where(same, stay, own) * excess(level, level_1)
        loss = loss + torch.where(candidate, at_mask, 0)
    loss = torch.where(counted, rate * loss, 0)
    if gradient is None:
        return loss

    # G relative to the likeliest candidate's, c: G_z - c = slope (mu_z - mu_top) / ((1 + e_z) (1 + e_top)), exact where all G are near one
    mu_top, index_top = mu.max(-1, keepdim=True)
    e_top, one_plus_top = slope * mu_top + level, slope * mu_top + level_1
    c = torch.where(compared, e_top / one_plus_top, 1)
    big_g = e.div_(one_plus_e).scatter_(-1, k_index, 0.0).scatter_(-1, x, 0.0)
    # c + C/D, C = sum_{y != k} m(y) G_y. Where c and -m(x) G_x / D are both near one: 1 + m(x) G_x / D = (alpha (D mu_x - m mu_k) + m X) / (D X),
    # X = alpha mu_x + m(x) (off + mu_k M/D), for k clean (elsewhere mu_k = 0)
    bracket = clean / stay * big_g.sum(-1, keepdim=True)
    if mask is not None:
        bracket = bracket + torch.where(candidate, mask_mass / stay * level / level_1, 0)
    numerator = torch.where(compared, alpha * mu_x + mixed, 1)
    above = -1 / one_plus_top + (alpha * (stay * mu_x - clean * mu_k) + clean * numerator) / (stay * numerator)
    below = c + clean / stay * e_x / torch.where(compared, one_plus_e_x, 1)
    bracket = bracket + torch.where(compared & (c > 0.5) & ~same, above, below)
    relative = torch.sub(mu, mu_top, out=g).div_(one_plus_e).mul_(torch.where(compared, slope / one_plus_top, 0))
    ratio_x = stay_x * mu_x / numerator  # mu_x / (1 + e_x)
    mean_x = torch.where(compared, ratio_x * (e_x - e_top) / one_plus_top, e_x - mu_x)  # mu_x (G_x - c)
    mean_x = torch.where(same, 0, mean_x)
    mean_bulk = torch.mul(mu, relative, out=one_plus_e).sum(-1, keepdim=True)
    mean = mean_bulk + mean_x
    common = mu_k * bracket
    scale = torch.where(counted, rate * alpha / own, 0)
    torch.mul(relative.add_(common - mean), mu, out=gradient).mul_(scale)
    # at x, with 1 - mu_x as rest + mu_k
    gradient_x = mean_x * (rest + mu_k) - mu_x * mean_bulk + mu_x * common
    gradient_k = -mu_k * (mean + off * bracket)
    gradient.scatter_(-1, x, torch.where(same, 0, scale * gradient_x))
    gradient.scatter_(-1, k_index, torch.where(k_clean, scale * gradient_k, gradient.gather(-1, x)))
    # the gradient sums to zero: the likeliest token's entry, where differences are smallest, is minus all the others
    index_top = torch.where(mu_x > mu_top, x, index_top)
    index_top = torch.where(mu_k > torch.maximum(mu_x, mu_top), k_index, index_top)
    gradient.scatter_(-1, index_top, 0.0)
    gradient.scatter_(-1, index_top, -gradient.sum(-1, keepdim=True))
    return loss


class _BridgedScoreEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, k: Tensor, x: Tensor, mask: int | None, *site: Tensor
    ) -> Tensor:
        rows = len(logits)
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(logits) if wanted else None
        loss = torch.empty(rows, 1, dtype=logits.dtype, device=logits.device)
        k, x, scalars = k.unsqueeze(-1), x.unsqueeze(-1), [value.unsqueeze(-1) for value in site]
        block = block_rows(logits)
        for start in range(0, rows, block):
            at = slice(start, start + block)
            into = None if gradient is None else gradient[at]
            loss[at] = _block(logits[at], k[at], x[at], Site(*(value[at] for value in scalars)), mask, into)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return loss.squeeze(-1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream.unsqueeze(-1), *(None for _ in range(9)))


def bridged_score_entropy(
    logits: Float[Tensor, "*site K"], x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], site: Site, mask: int | None
) -> Float[Tensor, "*site"]:
    """n(k) sum_{y != k} h(s_y, r_y) for posterior logits over the clean tokens of a rank-one process; nats per site."""
    flat = [value.to(logits.dtype).reshape(-1) for value in site]
    loss = _BridgedScoreEntropy.apply(
        logits.reshape(-1, logits.shape[-1]), x_t.reshape(-1).long(), x_0.reshape(-1).long(), mask, *flat
    )
    return loss.reshape(x_0.shape)
