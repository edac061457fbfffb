"""One reverse step from t to s < t: from a posterior (Bayes) and from a score (SEDD's analytic predictor)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import apply_transition, mixing_vector, scatter_at, validate_inputs
from m2s.dtypes import promote_to, to_float64
from m2s.process import Process
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

    It sums to one without normalization. For a rank-one process, with w_z = mu_z / P_t(k|z) and N = sum(w), it is
    p(y) = (A [y = k] + q(k)) (alpha_s w_y + m_s(y) N).

    Args:
        posterior: mu, [*site, S].
        x_t: Current tokens k, [*site].
        s: End of the step, [*b], at most t. At s = 0 all noise is removed, also that of a schedule with sigma(0) > 0.
        t: Time of x_t, [*b].
        process: The forward process.

    Returns:
        Probabilities of the next token, [*site, S].

    Example:
        >>> mu = head.posterior(model(x_t, t), x_t, t)
        >>> probabilities = m2s.bayes_probabilities(mu, x_t, s, t, head.process)
    """
    validate_inputs("posterior", posterior, x_t, t, process)
    validation.times("s", s)
    validation.not_after("s", s, "t", t)
    s, t = to_float64(s), to_float64(t)  # mu / P_t(k|.) exceeds the range of float32 for tokens that hardly become k
    likelihood = process.columns(x_t, t)
    w = posterior / likelihood.where(likelihood > 0, torch.inf)  # x / inf = 0: unreachable tokens have no weight
    rank_one = process.rank_one
    if rank_one is not None:
        at_s = rank_one.at(x_t, s)
        noised = at_s.alpha.unsqueeze(-1) * w + mixing_vector(rank_one, at_s) * w.sum(-1, keepdim=True)
    else:
        noised = apply_transition(w, process.transition_matrix(s))
    probabilities = (noised * process.step_columns(x_t, s, t)).to(posterior.dtype)
    # At s = 0 the result is mu exactly, also where sigma(0) > 0 and P_s is not the identity.
    return torch.where((validation.align("s", s, x_t) > 0).unsqueeze(-1), probabilities, posterior)


def analytic_weights(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], s: Float[Tensor, "*b"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """Return the weights of SEDD's analytic predictor, before the positive part is taken.

        w_y = (score P_{t|s}^{-1})_y P_{t|s}(k|y),     rank-one: (score - q sum(score))_y / A  P_{t|s}(k|y)

    They sum to one. For uniform noise, with D = sigma_t - sigma_s, the first factor is e^D score - (e^D - 1) mean(score), the
    mean over all K tokens including k. On a realizable score the weights are the Bayes step. Otherwise entries can be negative:
    for uniform noise where score_y < (1 - e^{-D}) mean(score). At s = 0 they are SEDD's denoiser, which removes all noise
    (`denoising_weights`).

    Args:
        score: Scores at time t, [*site, S]. The entry at x_t is ignored and counts as 1.
        x_t: Current tokens k, [*site].
        s: End of the step, [*b], at most t.
        t: Time of x_t, [*b], below 1 where alpha_1 = 0.
        process: A rank-one process.

    Returns:
        Signed weights of the next token, [*site, S].

    Raises:
        TypeError: The process is not rank-one.

    Example:
        >>> score = head.log_score(model(x_t, t), x_t, t).exp()
        >>> weights = m2s.analytic_weights(score, x_t, s, t, head.process)
        >>> negative_mass = -weights.clamp(max=0).sum(-1)
    """
    validate_inputs("score", score, x_t, t, process)
    validation.times("s", s)
    validation.not_after("s", s, "t", t)
    s, t = promote_to(s, score), promote_to(t, score)
    rank_one = process.rank_one
    if rank_one is None:
        raise TypeError(f"the analytic predictor is for rank-one processes (Uniform, Absorbing, Hybrid), not {process}")
    score = scatter_at(score, x_t, 1.0)
    survival, mixing = rank_one.removed_noise(validation.align("s", s, x_t), validation.align("t", t, x_t))
    total = score.sum(-1, keepdim=True)
    staggered = (score - mixing_vector(rank_one, mixing).to(score.dtype) * total) / survival.to(score.dtype).unsqueeze(-1)
    return staggered * rank_one.step_columns(x_t, s, t).to(score.dtype)


def denoising_weights(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """Return the weights of a step from t to clean data: w_z = (score P_t^{-1})_z P_t(k|z), with score_k = 1.

    On a realizable score they are the posterior; otherwise some can be negative. They sum to one.

    Args:
        score: Scores at time t, [*site, S]. The entry at x_t is ignored and counts as 1.
        x_t: Current tokens k, [*site].
        t: Times, [*b]; below 1 where alpha_1 = 0.
        process: The forward process, rank-one or tabulated.

    Returns:
        Signed weights of the clean tokens, [*site, S].
    """
    if process.rank_one is not None:
        return analytic_weights(score, x_t, torch.zeros_like(t), t, process)
    validate_inputs("score", score, x_t, t, process)
    transition = process.transition_matrix(promote_to(t, score)).to(score.dtype)
    rows = scatter_at(score, x_t, 1.0).reshape(*transition.shape[:-2], -1, process.states)
    leave_one_out = torch.linalg.solve(transition, rows, left=False).reshape(score.shape)
    return leave_one_out * select_rows(transition, x_t, -1)
