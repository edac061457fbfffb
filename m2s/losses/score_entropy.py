"""Score entropy with its weight and its constant, for every head and every process with rates (Theorem 4.2, Eq. 8)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import gather_at, safe_log, scatter_at
from m2s.dtypes import at_least_float32, to_float64
from m2s.heads import FactorizedRate, Head, LogScore, Posterior
from m2s.heads.output import logits, padded_logits
from m2s.losses.matrix_terms import log_leave_one_out, other_tokens, sum_of_terms
from m2s.ops import linear_loss, uses_triton
from m2s.ops.factorized_entropy import row_scalars as factorized_scalars
from m2s.ops.last_layer import Output, Unprojected
from m2s.ops.posterior_entropy import posterior_score_entropy
from m2s.ops.posterior_entropy import row_scalars as posterior_scalars
from m2s.ops.score_entropy import entropy_from_logs, unconstrained_score_entropy
from m2s.ops.score_entropy import row_scalars as score_scalars
from m2s.process import Process, RankOne, SiteCoefficients
from m2s.process.base import select_rows


def score_entropy(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """Compute the score entropy sum_{y != k} Q_t(y -> k) h(s_y, r_y), the integrand of the NELBO.

    k = x_t, r_y = P_t(y|x_0) / P_t(k|x_0), h(s, r) = s - r log s + r log r - r, h(s, 0) = s. Sites that no rate leads into give
    exactly 0. `m2s.Unprojected` outputs use the fused kernel where the backend is "fused".

    Args:
        head: Any head of `m2s`, over a process with rates.
        output: Output of the network at (x_t, t), [*site, >= states] or `m2s.Unprojected`.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], where *b is the start of *site.

    Returns:
        Nats per position [*site]; the mean over t of the sum over positions is the integral term of the NELBO.

    Raises:
        ValueError: Shapes, tokens or times do not fit together.

    Example:
        >>> x_t = head.process.corrupt(x_0, t)
        >>> loss = m2s.score_entropy(head, model(x_t, t), x_0, x_t, t).sum(-1).mean()   # nats per example
    """
    validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
    process = head.process
    check_pair(process, x_0, x_t, t)
    if isinstance(output, Unprojected) and uses_triton(output.hidden) and (rows := row_loss_spec(head, x_0, x_t, t)):
        return linear_loss.per_position(output, x_t, x_0, rows).to(at_least_float32(output.hidden[..., :0]).dtype)
    rank_one = process.rank_one
    if rank_one is not None:
        site = rank_one.at(x_t, to_float64(t))
        if isinstance(head, Posterior):
            columns, offset = padded_logits(output, x_t, process.states), head.offset_at_current_token(x_t, t)
            return posterior_score_entropy(columns, offset, x_0, x_t, site, process.mask, process.vocab)
        if isinstance(head, LogScore):
            values = logits(output, x_t, process.states)
            return unconstrained_score_entropy(values, x_0, x_t, site, process.mask, head.shift(x_t, t))
        return unconstrained_score_entropy(head.log_score(output, x_t, t), x_0, x_t, site, process.mask)
    values, t = logits(output, x_t, process.states), to_float64(t)
    if head.softmax_is_leave_one_out:
        return matrix_score_entropy(head, values, x_0, x_t, t)
    # float64: mu / P_t(k|.), the tails of an ordinal head, and unconstrained scores of unlikely candidates underflow in float32
    log_score = head.log_score(values.to(t.dtype), x_t, t)
    log_row = safe_log(process.rows(x_0, t))
    log_ratio = log_row - gather_at(log_row, x_t)
    return entropy_from_logs(log_score, log_ratio, process.rates_into(x_t, t)).to(values.dtype)


def matrix_score_entropy(
    head: Head, values: Float[Tensor, "*site S"], x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """Compute score entropy from transition matrices, for a head whose softmax is the leave-one-out distribution nu.

    With a_y = P_t(y|x_0) and m_y = (nu P_t)_y, s_y = m_y / m_k and r_y = a_y / a_k. So h(s_y, r_y) = r_y g(e_y) with
    1 + e_y = s_y / r_y: a sum of `m2s.losses.matrix_terms`. In float32 its error is below 2e-5 of the loss plus 1e-8 of the
    rate out of x_t (K = 256, the Gaussian rates of tauLDR). Transition matrices are computed in float64 and then rounded.

    Args:
        head: The head, over a process with rates that is not rank-one.
        values: Output of the network, [*site, S].
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], in float64 where the device has it.

    Returns:
        Nats per position [*site], in the dtype of `values`.
    """
    process = head.process
    transition, rates = (matrix.to(values.dtype) for matrix in (process.transition_matrix(t), process.rates(t)))
    likelihood, clean = select_rows(transition, x_t, -1)[..., : process.vocab], select_rows(transition, x_0, -2)
    log_nu = log_leave_one_out(head, values, likelihood, x_t, t)
    others, log_nu_clean = other_tokens(log_nu, likelihood, x_0, transition)
    rates_into = scatter_at(select_rows(rates, x_t, -1), x_t, 0.0)
    return sum_of_terms(others, gather_at(others, x_t), clean, gather_at(clean, x_t), log_nu_clean, rates_into)


def row_loss_spec(head: Head, x_0: Tensor, x_t: Tensor, t: Tensor) -> linear_loss.RowLossSpec | None:
    """Describe the fused form of the score entropy of a head, which works on rows of logits.

    Args:
        head: The head.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b].

    Returns:
        The operation and the scalars of every row; None where there is no fused form (tabulated processes, other heads).
    """
    process = head.process.rank_one
    return None if process is None else row_loss_at(head, process, x_0, x_t, t, process.at(x_t, to_float64(t)))


def row_loss_at(
    head: Head, process: RankOne, x_0: Tensor, x_t: Tensor, t: Tensor, site: SiteCoefficients
) -> linear_loss.RowLossSpec | None:
    """Describe the fused form of score entropy with given scalars, such as a rate n(k) that differs from the process's.

    Args:
        head: The head.
        process: Its process.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b].
        site: The scalars of every position, as `process.at` returns them in float64.

    Returns:
        As `row_loss_spec`.
    """
    if isinstance(head, FactorizedRate):
        scalars = factorized_scalars(x_0, x_t, site, process.vocab, process.mask)
        return linear_loss.RowLossSpec("factorized_entropy", scalars, process)
    if isinstance(head, LogScore):
        return linear_loss.RowLossSpec("score_entropy", score_scalars(x_0, x_t, site, head.shift(x_t, t)), process)
    if not isinstance(head, Posterior):
        return None
    if process.is_pure_mask:
        rate = torch.where(torch.eq(x_t, process.vocab), site.rate * site.alpha / site.m_k, 0)  # Theorem 4.6
        return linear_loss.RowLossSpec("cross_entropy", rate.reshape(1, -1), process)
    return linear_loss.RowLossSpec("posterior_entropy", posterior_scalars(head.offset_at_current_token(x_t, t), site), process)


def check_pair(process: Process, x_0: Tensor, x_t: Tensor, t: Tensor) -> None:
    """Check that clean tokens, noisy tokens and times fit together.

    Args:
        process: The forward process.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], in (0, 1).

    Raises:
        TypeError: A wrong dtype.
        ValueError: A wrong shape or value; in checked mode also an x_t that x_0 cannot become.
    """
    validation.tokens("x_0", x_0, process.vocab)
    validation.tokens("x_t", x_t, process.states)
    validation.same_shape("x_0", x_0, "x_t", x_t)
    validation.times("t", t, open_ends=True)
    validation.align("t", t, x_t)
    if validation.is_checked():
        reached = process.rows(x_0, to_float64(t)).gather(-1, x_t.long().unsqueeze(-1)).squeeze(-1)
        if (reached == 0).any():
            at = validation.first_index(reached == 0)
            raise ValueError(
                f"x_t{list(at)} is {int(x_t[at])}, which cannot come from x_0{list(at)} = {int(x_0[at])} "
                f"under {process}: P_t(x_t|x_0) = 0"
            )
