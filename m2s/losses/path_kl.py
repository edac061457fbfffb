"""The loss of Neural CTMC: the KL divergence of two jump processes, split into exit times and jump destinations."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.dtypes import to_float64
from m2s.errors import UnsupportedError
from m2s.heads import FactorizedRate, Head
from m2s.heads.output import logits
from m2s.losses.score_entropy import check_pair, row_loss_spec
from m2s.ops.last_layer import Output
from m2s.ops.linear_loss import RowLossSpec


def path_kl(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """Compute l - l* + l* log(l*/l) + l* KL(pi* || pi).

    l and pi are the exit rate and the jump distribution of the reverse process. l* and pi* are those of the reverse process
    given x_0, in which a jump to y has the rate Q_t(y -> k) P_t(y|x_0) / P_t(k|x_0). It equals score entropy.

    Args:
        head: `m2s.FactorizedRate`.
        output: Output of the network at (x_t, t), [*site, >= states] or `m2s.Unprojected`.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], where *b is the start of *site.

    Returns:
        Nats per position [*site].

    Raises:
        TypeError: The head is not `m2s.FactorizedRate`.
    """
    process = _factorized(head).process
    check_pair(process, x_0, x_t, t)
    values, index, time = logits(output, x_t, process.states), x_t.long().unsqueeze(-1), to_float64(t)
    into = process.rates_into(x_t, time)
    row = process.rows(x_0, time)
    wanted = (into * row / row.gather(-1, index)).to(values.dtype)  # 0 at k
    leave = wanted.sum(-1)
    log_exit = values.gather(-1, index).squeeze(-1)
    unit = into.sum(-1).to(values.dtype)  # the output is in units of the forward rates into k
    counted = torch.where(unit.unsqueeze(-1) > 0, into > 0, True)
    log_jump = torch.log_softmax(values.where(counted, -torch.inf).scatter(-1, index, -torch.inf), -1)
    log_rate = log_exit + torch.log(unit.where(unit > 0, 1))
    distribution = wanted / leave.where(leave > 0, 1).unsqueeze(-1)
    jumps = torch.where(
        distribution > 0,
        distribution * (torch.log(distribution.where(distribution > 0, 1)) - log_jump.where(distribution > 0, 0)),
        0,
    ).sum(-1)
    log_leave = torch.log(leave.where(leave > 0, 1))
    value = log_rate.exp() - leave + leave * (log_leave - log_rate + jumps)
    return torch.where(unit > 0, value, 0)


def path_kl_rows(head: Head, x_0: Tensor, x_t: Tensor, t: Tensor) -> RowLossSpec | None:
    """Describe the fused form of `path_kl`: that of score entropy, which it equals.

    Args:
        head: The head.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b].

    Returns:
        The operation and the scalars of every row; None for a tabulated process.

    Raises:
        TypeError: The head is not `m2s.FactorizedRate`.
    """
    return row_loss_spec(_factorized(head), x_0, x_t, t)


def _factorized(head: Head) -> FactorizedRate:
    """Return the head, or raise TypeError where the loss is not defined for it."""
    if not isinstance(head, FactorizedRate):
        raise UnsupportedError("the path KL of Neural CTMC", head, FactorizedRate, hint="use score-entropy")
    return head
