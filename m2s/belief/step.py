"""One reverse step from t to s < t as a law over the next token: from a posterior (Bayes) and from a score (SEDD's analytic
form)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import check
from m2s.belief.maps import door, mixing_vector, set_own, times_kernel, wider
from m2s.process import Process, RankOne
from m2s.process.base import pick, wide


def bayes_law(
    posterior: Float[Tensor, "*site S"],
    x_t: Int[Tensor, "*site"],
    s: Float[Tensor, "*b"],
    t: Float[Tensor, "*b"],
    process: Process,
) -> Float[Tensor, "*site S"]:
    """p(y) = sum_z mu_z P_s(y|z) P_{t|s}(k|y) / P_t(k|z) (Eq. 19). It sums to one by itself; at s = 0 it is mu.

    Rank-one, with w_z = mu_z / P_t(k|z) and N = sum(w): p(y) = (A [y = k] + q(k)) (alpha_s w_y + m_s(y) N).
    """
    door("posterior", posterior, x_t, t, process)
    check.times("s", s)
    check.not_after("s", s, "t", t)
    s, t = wide(s), wide(t)
    likelihood = process.columns(x_t, t)
    w = posterior / likelihood.where(likelihood > 0, torch.inf)
    if isinstance(process, RankOne):
        at_s = process.at(x_t, s)
        law = at_s.alpha.unsqueeze(-1) * w + mixing_vector(process, at_s) * w.sum(-1, keepdim=True)
    else:
        law = times_kernel(w, process.kernel(s))
    return (law * arrival(x_t, s, t, process)).to(posterior.dtype)


def arrival(
    x_t: Int[Tensor, "*site"], s: Float[Tensor, "*b"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """P_{t|s}(x_t | y) for every y: how likely each earlier token is to have become the current one."""
    if not isinstance(process, RankOne):
        return pick(process.step_kernel(s, t), x_t, -1)
    keep, mixing = process.step(check.align("s", s, x_t), check.align("t", t, x_t))
    masked = torch.zeros_like(x_t, dtype=torch.bool) if process.mask is None else x_t.long() == process.mask
    into = torch.where(masked, mixing.mask, mixing.clean)
    column = into.unsqueeze(-1).repeat(*(1 for _ in x_t.shape), process.states)
    return column.scatter(-1, x_t.long().unsqueeze(-1), (keep + into).unsqueeze(-1))


def analytic_weights(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], s: Float[Tensor, "*b"], t: Float[Tensor, "*b"], process: RankOne
) -> Float[Tensor, "*site S"]:
    """SEDD's analytic predictor before its positive part is taken: (s P_{t|s}^{-1})_y P_{t|s}(k|y), with s_k = 1. Sums to one.

    Rank-one: (s - q sum(s)) / A. Uniform, D = sigma_t - sigma_s: e^D s - (e^D - 1) mean(s), the mean over all K tokens, k
    included. On a realizable score it is the Bayes law; otherwise entries can be negative: for uniform, where s_y < (1 -
    e^{-D}) mean(s).
    """
    door("score", score, x_t, t, process)
    check.times("s", s)
    check.not_after("s", s, "t", t)
    s, t = wider(s, score), wider(t, score)
    if not isinstance(process, RankOne):
        raise TypeError(f"the analytic predictor is for rank-one processes (Uniform, Absorbing, Hybrid), not {process}")
    score = set_own(score, x_t, 1.0)
    keep, mixing = process.step(check.align("s", s, x_t), check.align("t", t, x_t))
    total = score.sum(-1, keepdim=True)
    q = mixing.clean.unsqueeze(-1).expand(*mixing.clean.shape, process.vocab)
    if process.mask is not None:
        q = torch.cat([q, mixing.mask.unsqueeze(-1)], -1)
    staggered = (score - q.to(score.dtype) * total) / keep.to(score.dtype).unsqueeze(-1)
    return staggered * arrival(x_t, s, t, process).to(score.dtype)
