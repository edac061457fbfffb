"""Score entropy of posterior logits in torch, accurate at any vocabulary size and at any time.

`naive.py` has the definition. With current token k, clean token x, M = m(k), D = alpha + m(k) and off = sum_{z != k} mu_z, the
loss is n(k) sum_{y != k} h(s_y, r_y), h(s, r) = r g(e), where e = s/r - 1 and g(e) = e - log(1 + e). Neither e nor 1 + e is
computed as a difference from one:

    k = x:                  r_y = m(y)/D,             e_y = (alpha/M) (off + D mu_y / m(y))
    k != x, y not in {k,x}: r_y = m(y)/M,             e_y = alpha (mu_y / m(y) - mu_k / D)
    k != x, y = x:          r_x = (alpha + m(x))/M,   e_x = -alpha/(alpha + m(x)) (rest + mu_k + m(x) mu_k / D)

where rest sums mu outside {k, x}, so that 1 - mu_x is rest + mu_k. Where m(y) = 0, r_y = 0 and h = s_y. Outside {k, x} both
e_y and 1 + e_y are affine in mu_y. The gradient, with G_y = e_y / (1 + e_y), C = sum_{y != k} m(y) G_y and Gbar =
sum_{y != k} mu_y G_y, is n(k) alpha/M times

    mu_z (G_z - Gbar + mu_k C / D)  at logit z != k,      -mu_k (Gbar + off C / D)  at logit k.

Scalars of a row and sums over its candidates are float64. Only exp(logits) is stored, in the dtype of the logits; the backward
pass overwrites it with the gradient. Passes over the vocabulary work on a block of rows that fits in the cache. Under
torch.compile the same passes are written as expressions without blocks or buffers, so that the compiler can fuse them.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.derivatives import gradient_by_autograd, wants_graph
from m2s.ops.posterior_entropy.cpu_passes import (
    Passes,
    RowGradient,
    backward_pass,
    compiled_backward_pass,
    excess,
    materialize,
)
from m2s.ops.row_blocks import prepare as prepare
from m2s.ops.score_entropy.cpu import differentiable_score_entropy
from m2s.process import SiteCoefficients
from m2s.transforms import is_transformed


class _Case(NamedTuple):
    """Which case of the formulas a row is, `[N, 1]` each."""

    counted: Tensor  # the row has a loss: n(k) > 0 and m(k) > 0
    same: Tensor  # k = x
    k_clean: Tensor  # k is not the mask
    apart: Tensor  # k and x are two different columns


class _Posterior(NamedTuple):
    """The posterior of a row, `[N, 1]` each; `w` are weights relative to the greatest logit."""

    total: Tensor  # sum of all weights
    rest_w: Tensor  # sum of the weights outside {k, x}
    rest: Tensor  # sum of mu outside {k, x}
    mu_x: Tensor
    mu_k: Tensor
    log_mu_x: Tensor
    off: Tensor  # sum of mu outside k, never computed as 1 - mu_k


class _Line(NamedTuple):
    """e = slope w + level and 1 + e = slope w + level_1 outside {k, x}, and sums over these columns, `[N, 1]` each."""

    slope: Tensor
    level: Tensor
    level_1: Tensor
    flow: Tensor  # m(k) sum_z mu_z / P(k|z): the score of y is (m(y) flow + alpha mu_y) / m(k)
    sum_e: Tensor  # over all V columns
    sum_g: Tensor
    sum_big_g: Tensor
    taken_out: Tensor  # columns with w = 0 that are no candidates: k and x


class _AtX(NamedTuple):
    """The clean token as a candidate (k != x), `[N, 1]` each."""

    loss: Tensor
    e: Tensor
    inverse: Tensor  # 1 / (1 + e)
    mu_g: Tensor  # mu_x G_x


def _posterior(logits: Tensor, offset: Tensor, two: Tensor, passes: Passes, case: _Case) -> _Posterior:
    """The posterior from the sum of the weights and the logits of x and k."""
    logit_x, logit_k = (logits.gather(-1, two) - passes.top).split(1, -1)
    w_x, w_k = torch.exp(logit_x + torch.where(case.same, offset, 0)), torch.exp(logit_k + offset)
    total = passes.rest_w + w_x + torch.where(case.apart, w_k, 0)
    rest, mu_x, mu_k = passes.rest_w / total, w_x / total, torch.where(case.k_clean, w_k / total, 0)
    log_mu_x = logit_x - total.log()
    off = torch.where(case.same, rest, rest + mu_x)
    return _Posterior(total, passes.rest_w, rest, mu_x, mu_k, log_mu_x, off)


def _line(mu: _Posterior, site: SiteCoefficients, passes: Passes, case: _Case) -> _Line:
    """The affine form of e outside {k, x}, and its sums."""
    alpha, m_k, p_kk, m_clean, _, _ = site
    compared = m_clean > 0  # otherwise there is no ratio to compare with, and h = s
    slope = torch.where(case.same, p_kk / m_k, 1) * alpha / torch.where(compared, m_clean, 1) / mu.total
    level = torch.where(case.same, mu.off * alpha / m_k, -mu.mu_k * alpha / p_kk)
    flow = mu.off + mu.mu_k * m_k / p_kk
    level_1 = torch.where(case.counted, torch.where(case.same, 1 + level, flow), 1)
    sum_e = slope * mu.rest_w + passes.w.shape[-1] * level
    sum_g, sum_big_g = passes.sums(slope, level, level_1, sum_e)
    taken_out = torch.where(case.apart, 2, 1)
    sum_g = (sum_g - taken_out * excess(level, level_1)).clamp(min=0)
    sum_big_g = sum_big_g - taken_out * level / level_1
    return _Line(slope, level, level_1, flow, sum_e, sum_g, sum_big_g, taken_out)


def _at_x(mu: _Posterior, line: _Line, site: SiteCoefficients, same: Tensor) -> _AtX:
    """Loss and slope at the clean token, where it is a candidate."""
    alpha, m_k, p_kk, m_clean, _, _ = site
    compared = m_clean > 0
    p_xx = alpha + m_clean
    e_x = -alpha / p_xx * (mu.rest + mu.mu_k + m_clean * mu.mu_k / p_kk)
    score_x = alpha * mu.mu_x + m_clean * line.flow  # s_x m(k)
    log_1 = torch.where(compared, torch.log(score_x.where(compared, 1) / p_xx), mu.log_mu_x)  # log(1 + e_x)
    loss = p_xx / m_k * torch.where(e_x > -0.5, excess(e_x, log_1.exp()), e_x - log_1)
    inverse = torch.where(compared, p_xx / score_x.where(compared, 1), 0)
    mu_g = torch.where(same, 0, torch.where(compared, mu.mu_x * e_x * inverse, e_x))
    return _AtX(loss, e_x, inverse, mu_g)


def _loss(mu: _Posterior, line: _Line, at_x: _AtX, site: SiteCoefficients, case: _Case, candidate: Tensor | None) -> Tensor:
    """The loss `[N, 1]`; `candidate` is true where the mask is a candidate (None without a mask)."""
    alpha, m_k, p_kk, m_clean, m_mask, rate = site
    bulk = torch.where(m_clean > 0, m_clean / torch.where(case.same, p_kk, m_k) * line.sum_g, alpha / m_k * mu.rest)
    loss = bulk + torch.where(case.same, 0, at_x.loss)
    if candidate is not None:  # the mask has mu = 0, so its e is the level
        at_mask = m_mask / torch.where(case.same, p_kk, m_k) * excess(line.level, line.level_1)
        loss = loss + torch.where(candidate, at_mask, 0)
    return torch.where(case.counted, rate * loss, 0)


def _gradient(
    mu: _Posterior,
    line: _Line,
    at_x: _AtX,
    site: SiteCoefficients,
    case: _Case,
    candidate: Tensor | None,
    passes: Passes,
) -> RowGradient:
    """The numbers that turn the weights into the gradient."""
    alpha, m_k, p_kk, m_clean, m_mask, rate = site
    slope, level, level_1 = line.slope, line.level, line.level_1
    compared = m_clean > 0
    # sum of w G from e G = e - G
    sum_mu_g = (line.sum_e - line.taken_out * level - level_1 * line.sum_big_g) / (slope * mu.total)
    g_bar = torch.where(compared, sum_mu_g, mu.rest) + at_x.mu_g
    big_c = m_clean * (line.sum_big_g + torch.where(case.same, 0, at_x.e * at_x.inverse))
    if candidate is not None:
        big_c = big_c + torch.where(candidate, m_mask * level / level_1, 0)
    shift = mu.mu_k * big_c / p_kk - g_bar
    scale = torch.where(case.counted, rate * alpha / m_k, 0)
    gradient_k = -scale * mu.mu_k * (g_bar + mu.off * big_c / p_kk)
    gradient_x = scale * (at_x.mu_g + mu.mu_x * shift)
    # G_z + shift = (G_z - c) + (c + shift), with c the greatest G or 0: the difference, which is computed in the dtype of w, is
    # then small where it should be, and its rounding does not matter
    e_top, v_top = slope * passes.top_w + level, slope * passes.top_w + level_1
    by_top = e_top > 0
    lift = torch.where(compared, torch.where(by_top, slope / v_top, slope), 0)
    pivot = torch.where(by_top, passes.top_w, -level / slope)
    c = torch.where(compared, torch.where(by_top, e_top / v_top, 0), 1)
    at_k = torch.where(case.k_clean, gradient_k, gradient_x)
    at_clean = torch.where(case.same, gradient_k, gradient_x)
    return RowGradient(slope, level_1, pivot, lift, c + shift, scale / mu.total, at_clean, at_k, passes.top)


def _forward(
    logits: Tensor, offset: Tensor, k: Tensor, x: Tensor, site: SiteCoefficients, mask: int | None
) -> tuple[Tensor, Tensor, RowGradient]:
    """The loss [N, 1], the weights w, and the numbers that turn them into the gradient."""
    counted = (site.rate > 0) & (site.m_k > 0)
    site = site._replace(m_k=torch.where(site.m_k > 0, site.m_k, 1))
    same, k_clean = k == x, torch.ones_like(counted) if mask is None else k != mask
    case = _Case(counted, same, k_clean, k_clean & ~same)
    two = torch.cat([x, torch.where(k_clean, k, x)], -1)
    passes = Passes(logits, two, site.alpha.dtype)
    mu = _posterior(logits, offset, two, passes, case)
    line = _line(mu, site, passes, case)
    at_x = _at_x(mu, line, site, same)
    candidate = None if mask is None else k_clean & (site.mask > 0)
    loss = _loss(mu, line, at_x, site, case, candidate)
    return loss, passes.w, _gradient(mu, line, at_x, site, case, candidate, passes)


class _PosteriorScoreEntropy(torch.autograd.Function):
    """The loss of each row. The logits may be wider than the vocabulary; their gradient is 0 there."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, offset: Tensor, k: Tensor, x: Tensor, mask: int | None, vocab: int, *site: Tensor
    ) -> Tensor:
        loss, w, row = _forward(logits[:, :vocab], offset, k, x, SiteCoefficients(*site), mask)
        ctx.mask, ctx.vocab = mask, vocab
        if torch.compiler.is_compiling():
            ctx.save_for_backward(logits, k, x, materialize(torch.cat(row, -1)))
        elif ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, offset, k, x, *site)
            ctx.weights = (w, row)
        return loss.squeeze(-1).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if wants_graph():
            return (_gradient_with_graph(ctx, upstream), *(None for _ in range(11)))
        mask, vocab, upstream = ctx.mask, ctx.vocab, upstream.unsqueeze(-1)
        if torch.compiler.is_compiling():
            logits, k, x, row = ctx.saved_tensors
            gradient = compiled_backward_pass(logits, RowGradient(*row.split(1, -1)), k, x, vocab, upstream)
        else:
            logits, offset, k, x, *site = ctx.saved_tensors
            # the gradient overwrites the weights; a second backward (retain_graph) computes them again
            weights, ctx.weights = ctx.weights, None
            w, row = weights or _forward(logits[:, :vocab], offset, k, x, SiteCoefficients(*site), mask)[1:]
            gradient = backward_pass(w, row, k, x, mask, upstream)
            if logits.shape[-1] > vocab:
                gradient = torch.nn.functional.pad(gradient, (0, logits.shape[-1] - vocab))
        return (gradient, *(None for _ in range(11)))


def _gradient_with_graph(ctx: Any, upstream: Tensor) -> Tensor:
    """The gradient of the logits for `create_graph=True`."""
    logits, offset, k, x, *site = (value if at == 0 else value.squeeze(-1) for at, value in enumerate(ctx.saved_tensors))

    def loss(logits: Tensor) -> Tensor:
        """The differentiable form as a function of the logits alone."""
        value = differentiable_posterior_entropy(logits, offset, x, k, SiteCoefficients(*site), ctx.mask, ctx.vocab)
        return value.to(logits.dtype)

    return gradient_by_autograd(loss, logits, upstream)


def differentiable_posterior_entropy(
    logits: Float[Tensor, "*site V"],
    offset: Float[Tensor, "*site"],
    x_0: Int[Tensor, "*site"],
    x_t: Int[Tensor, "*site"],
    site: SiteCoefficients,
    mask: int | None,
    vocab: int,
) -> Float[Tensor, "*site"]:
    """Compute the same as `posterior_score_entropy` in plain torch, which autograd differentiates any number of times.

    The bridge is computed in logarithms, log s_y = log(alpha f_y + m(y) sum_z f_z) with f_z = mu_z / P(k|z), so that no small
    mu_y is rounded to 0. It holds several float64 tensors over the vocabulary.

    Args:
        logits: Posterior logits; the first `vocab` columns count.
        offset: Number added to the logit of x_t, in float64 where the device has it.
        x_0: Clean tokens.
        x_t: Current tokens.
        site: Scalars of the process at every position, in float64 where the device has it.
        mask: The mask token, or None.
        vocab: Number of clean tokens.

    Returns:
        The loss of every position in nats, in the dtype of `site`.
    """
    counted = site.m_k > 0
    site = site._replace(rate=torch.where(counted, site.rate, 0), m_k=torch.where(counted, site.m_k, 1))
    alpha, m_k, m_clean, m_mask = (value.unsqueeze(-1) for value in (site.alpha, site.m_k, site.clean, site.mask))
    at_k = torch.arange(vocab, device=logits.device) == x_t.long().unsqueeze(-1)
    log_mu = torch.log_softmax(logits[..., :vocab].to(m_k.dtype) + torch.where(at_k, offset.unsqueeze(-1), 0), -1)
    log_flow = log_mu - torch.log(torch.where(at_k, alpha + m_k, m_k))
    common, moved = torch.logsumexp(log_flow, -1, keepdim=True), log_flow + torch.log(alpha)

    def mixed(mass: Tensor) -> Tensor:
        """log of mass times the sum over z; the mass 1 where it is 0, so that its gradient is finite."""
        return torch.log(mass.where(mass > 0, 1)) + common

    log_score = torch.where(m_clean > 0, torch.logaddexp(moved, mixed(m_clean)), moved)
    if mask is not None:
        log_score = torch.cat([log_score, torch.where(m_mask > 0, mixed(m_mask), -torch.inf)], -1)
    return differentiable_score_entropy(log_score, x_0, x_t, site, mask)


def posterior_score_entropy(
    logits: Float[Tensor, "*site V"],
    offset: Float[Tensor, "*site"],
    x_0: Int[Tensor, "*site"],
    x_t: Int[Tensor, "*site"],
    site: SiteCoefficients,
    mask: int | None,
    vocab: int,
) -> Float[Tensor, "*site"]:
    """Compute n(k) sum_{y != k} h(s_y, r_y) for posterior logits of a rank-one process (Theorem 4.2, Eq. 8).

    Args:
        logits: Posterior logits; the first `vocab` columns count.
        offset: Number added to the logit of x_t, in float64 where the device has it.
        x_0: Clean tokens.
        x_t: Current tokens.
        site: Scalars of the process at every position, in float64 where the device has it.
        mask: The mask token, or None.
        vocab: Number of clean tokens.

    Returns:
        The loss of every position in nats, in the dtype of the logits.
    """
    if is_transformed() or any(value.requires_grad for value in (offset, *site)):
        return differentiable_posterior_entropy(logits, offset, x_0, x_t, site, mask, vocab).to(logits.dtype)
    if not x_0.numel():
        return logits.sum(-1)
    flat = [value.reshape(-1, 1) for value in site]
    k, x = x_t.reshape(-1, 1).long(), x_0.reshape(-1, 1).long()
    rows = logits.reshape(-1, logits.shape[-1])
    loss = _PosteriorScoreEntropy.apply(rows, offset.reshape(-1, 1), k, x, mask, vocab, *flat)
    return loss.reshape(x_0.shape)


def row_scalars(offset: Tensor, site: SiteCoefficients) -> Float[Tensor, "7 N"]:
    """Stack the row scalars of this loss.

    Args:
        offset: Number added to the logit of x_t.
        site: Scalars of the process at every position.

    Returns:
        `[7, N]`: offset, alpha, m(k), P(k|k), m(clean), m(mask), n(k).
    """
    return torch.stack([value.reshape(-1) for value in torch.broadcast_tensors(offset, *site)])


def row_losses(
    logits: Float[Tensor, "N V"],
    x_t: Int[Tensor, "N"],
    x_0: Int[Tensor, "N"],
    row_scalars: Float[Tensor, "7 N"],
    has_mask: bool,
    vocab: int,
    weight: Float[Tensor, "N"] | None,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N V"] | None]:
    """Compute the loss of rows of logits and, given weights, its gradient.

    Args:
        logits: Posterior logits; the first `vocab` columns count.
        x_t: Current tokens.
        x_0: Clean tokens.
        row_scalars: As `row_scalars` stacks them.
        has_mask: Whether the process has a mask, the state `vocab`.
        vocab: Number of clean tokens.
        weight: Weight of each row, or None for the loss alone.
        dtype: Dtype of the gradient.

    Returns:
        The loss, and the gradient of weight times loss in `dtype`, or None without a weight.
    """
    offset, *site = (value.unsqueeze(-1) for value in row_scalars)
    mask, k, x = vocab if has_mask else None, x_t.long().unsqueeze(-1), x_0.long().unsqueeze(-1)
    loss, w, row = _forward(logits[:, :vocab], offset, k, x, SiteCoefficients(*site), mask)
    if weight is None:
        return loss.squeeze(-1), None
    gradient = backward_pass(w, row, k, x, mask, weight.to(loss.dtype).unsqueeze(-1)).to(dtype)
    return loss.squeeze(-1), torch.nn.functional.pad(gradient, (0, logits.shape[-1] - vocab))
