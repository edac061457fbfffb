"""One reverse step from t to s < t as a law over the next token: from a posterior (Bayes) and from a score (SEDD's analytic
form)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import apply_transition, mixing_vector, scatter_at, validate_inputs
from m2s.dtypes import promote_to, to_float64
from m2s.process import Process, RankOne
from m2s.process.base import select_rows


def bayes_probabilities(
    posterior: Float[Tensor, "*site S"],
    x_t: Int[Tensor, "*site"],
    s: Float[Tensor, "*b"],
    t: Float[Tensor, "*b"],
    process: Process,
) -> Float[Tensor, "*site S"]:
    """Return the distribution of the token at s given the posterior at t: the Bayes step (Eq. 19).

        p(y) = sum_z mu_z P_s(y|z) P_{t|s}(k|y) / P_t(k|z),     at s = 0: mu.

    It sums to one by itself. Rank-one, with w_z = mu_z / P_t(k|z) and N = sum(w):
    p(y) = (A [y = k] + q(k)) (alpha_s w_y + m_s(y) N).

    Args:
        posterior: mu, [*site, S].
        x_t: Current tokens, [*site].
        s: End of the step, at most t. At s = 0 all noise is removed, also that of a schedule with sigma(0) > 0.
        t: Time of x_t.
        process: The forward process.

    Returns:
        Probabilities of the next token, [*site, S].
    """
    validate_inputs("posterior", posterior, x_t, t, process)
    validation.times("s", s)
    validation.not_after("s", s, "t", t)
    s, t = to_float64(s), to_float64(t)
    likelihood = process.columns(x_t, t)
    w = posterior / likelihood.where(likelihood > 0, torch.inf)
    if isinstance(process, RankOne):
        at_s = process.at(x_t, s)
        distribution = at_s.alpha.unsqueeze(-1) * w + mixing_vector(process, at_s) * w.sum(-1, keepdim=True)
    else:
        distribution = apply_transition(w, process.kernel(s))
    distribution = (distribution * arrival(x_t, s, t, process)).to(posterior.dtype)
    return torch.where((validation.align("s", s, x_t) > 0).unsqueeze(-1), distribution, posterior)


def arrival(
    x_t: Int[Tensor, "*site"], s: Float[Tensor, "*b"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """P_{t|s}(x_t | y) for every y, and at s = 0 P_t(x_t | y): how likely each earlier token is to have become the current."""
    if not isinstance(process, RankOne):
        return select_rows(process.step_kernel(s, t), x_t, -1)
    keep, mixing = process.removed_noise(validation.align("s", s, x_t), validation.align("t", t, x_t))
    masked = torch.zeros_like(x_t, dtype=torch.bool) if process.mask is None else x_t.long() == process.mask
    into = torch.where(masked, mixing.mask, mixing.clean)
    column = into.unsqueeze(-1).repeat(*(1 for _ in x_t.shape), process.states)
    return column.scatter(-1, x_t.long().unsqueeze(-1), (keep + into).unsqueeze(-1))


def analytic_weights(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], s: Float[Tensor, "*b"], t: Float[Tensor, "*b"], process: RankOne
) -> Float[Tensor, "*site S"]:
    """Return the weights of SEDD's analytic predictor, before the positive part is taken: (s P_{t|s}^{-1})_y P_{t|s}(k|y).

    They sum to one. Rank-one: (score - q sum(score)) / A times P_{t|s}(k|y). Uniform, D = sigma_t - sigma_s: e^D score -
    (e^D - 1) mean(score), the mean over all K tokens, k included. On a realizable score they are the Bayes step; otherwise
    entries can be negative: for uniform, where score_y < (1 - e^{-D}) mean(score). At s = 0 they are SEDD's denoiser, which
    removes all noise: `denoising_weights`.

    Args:
        score: Scores at time t, [*site, S]. The entry at x_t is ignored and counts as 1.
        x_t: Current tokens, [*site].
        s: End of the step, at most t.
        t: Time of x_t, below 1 where alpha_1 = 0.
        process: A rank-one process.

    Returns:
        Signed weights of the next token, [*site, S].

    Raises:
        TypeError: The process is not rank-one.
    """
    validate_inputs("score", score, x_t, t, process)
    validation.times("s", s)
    validation.not_after("s", s, "t", t)
    s, t = promote_to(s, score), promote_to(t, score)
    if not isinstance(process, RankOne):
        raise TypeError(f"the analytic predictor is for rank-one processes (Uniform, Absorbing, Hybrid), not {process}")
    score = scatter_at(score, x_t, 1.0)
    keep, mixing = process.removed_noise(validation.align("s", s, x_t), validation.align("t", t, x_t))
    total = score.sum(-1, keepdim=True)
    q = mixing.clean.unsqueeze(-1).expand(*mixing.clean.shape, process.vocab)
    if process.mask is not None:
        q = torch.cat([q, mixing.mask.unsqueeze(-1)], -1)
    staggered = (score - q.to(score.dtype) * total) / keep.to(score.dtype).unsqueeze(-1)
    return staggered * arrival(x_t, s, t, process).to(score.dtype)


def denoising_weights(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """Return the weights of a step from t to clean data: (s P_t^{-1})_z P_t(k|z), with s_k = 1.

    On a realizable score they are the posterior; otherwise some can be negative. They sum to one.

    Args:
        score: Scores at time t, [*site, S]. The entry at x_t is ignored and counts as 1.
        x_t: Current tokens, [*site].
        t: Times, [B]; below 1 where alpha_1 = 0.
        process: The forward process, rank-one or tabulated.

    Returns:
        Signed weights of the clean tokens, [*site, S].
    """
    if isinstance(process, RankOne):
        return analytic_weights(score, x_t, torch.zeros_like(t), t, process)
    validate_inputs("score", score, x_t, t, process)
    kernel = process.kernel(promote_to(t, score)).to(score.dtype)
    rows = scatter_at(score, x_t, 1.0).reshape(*kernel.shape[:-2], -1, process.states)
    leave_one_out = torch.linalg.solve(kernel, rows, left=False).reshape(score.shape)
    return leave_one_out * select_rows(kernel, x_t, -1)
