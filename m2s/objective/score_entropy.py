"""Score entropy with its weight and its constant, for every head and every process with rates (Theorem 4.2, Eq. 8)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import check
from m2s.belief import Head, LogScore, Output, Posterior, Unprojected
from m2s.belief.maps import own, safe_log
from m2s.belief.output import full, logits, padded_logits
from m2s.ops import fused, linear_loss
from m2s.ops.bridged import reference as bridged
from m2s.ops.bridged.reference import bridged_score_entropy
from m2s.ops.free import reference as free
from m2s.ops.free.reference import entropy_from_logs, free_score_entropy
from m2s.process import Process, RankOne
from m2s.process.base import wide


def score_entropy(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """sum_{y != k} Q_t(y -> k) h(s_y, r_y), r_y = P_t(y|x_0) / P_t(k|x_0): the integrand of the ELBO, nats per site.

    h(s, r) = s - r log s + r log r - r, h(s, 0) = s. Sites into which no rate leads give exactly 0.
    """
    check.instance("head", head, Head, "a head such as m2s.Posterior(process)")
    process = head.process
    pair(process, x_0, x_t, t)
    if isinstance(output, Unprojected) and fused(output.hidden) and (rows := rows_of(head, x_0, x_t, t)):
        return linear_loss.losses(output, x_t, x_0, rows).to(full(output.hidden[..., :0]).dtype)
    if isinstance(process, RankOne):
        scale = wide(t)
        if isinstance(head, Posterior):
            columns, offset = padded_logits(output, x_t, process.states), head.own_offset(x_t, t)
            return bridged_score_entropy(columns, offset, x_0, x_t, process.at(x_t, scale), process.mask, process.vocab)
        site = process.at(x_t, scale)
        if isinstance(head, LogScore):
            values = logits(output, x_t, process.states)
            return free_score_entropy(values, x_0, x_t, site, process.mask, head.shift(x_t, t))
        return free_score_entropy(head.log_score(output, x_t, t), x_0, x_t, site, process.mask)
    values, t = logits(output, x_t, process.states), wide(t)  # kernel entries reach far below float32's smallest number
    log_score = head.log_score(values.to(t.dtype), x_t, t)
    log_row = safe_log(process.rows(x_0, t))
    log_ratio = log_row - own(log_row, x_t)
    return entropy_from_logs(log_score, log_ratio, process.rates_into(x_t, t)).to(values.dtype)


def rows_of(head: Head, x_0: Tensor, x_t: Tensor, t: Tensor) -> linear_loss.Rows | None:
    """What the operation on rows of logits is called that finds this loss, and what it must be told; None where there is
    none."""
    process = head.process
    if not isinstance(process, RankOne) or not isinstance(head, Posterior | LogScore):
        return None
    site = process.at(x_t, wide(t))
    if isinstance(head, Posterior) and process.only_masks:
        rate = torch.where(torch.eq(x_t, process.vocab), site.rate * site.alpha / site.own, 0)  # Theorem 4.6
        return linear_loss.Rows("masked", rate.reshape(1, -1), process)
    if isinstance(head, Posterior):
        return linear_loss.Rows("bridged", bridged.scalars(head.own_offset(x_t, t), site), process)
    return linear_loss.Rows("free", free.scalars(x_0, x_t, site, head.shift(x_t, t)), process)


def pair(process: Process, x_0: Tensor, x_t: Tensor, t: Tensor) -> None:
    """The clean and the noisy sequence belong together."""
    check.tokens("x_0", x_0, process.vocab)
    check.tokens("x_t", x_t, process.states)
    check.same_shape("x_0", x_0, "x_t", x_t)
    check.times("t", t, open_ends=True)
    check.align("t", t, x_t)
    if check.is_checked():
        reached = process.rows(x_0, wide(t)).gather(-1, x_t.long().unsqueeze(-1)).squeeze(-1)
        if (reached == 0).any():
            at = check.first(reached == 0)
            raise ValueError(
                f"x_t{list(at)} is {int(x_t[at])}, which cannot come from x_0{list(at)} = {int(x_0[at])} "
                f"under {process}: P_t(x_t|x_0) = 0"
            )
