"""The NELBO of UDLM (Schiff et al. 2025), which DUO uses too, in the form of the authors."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.errors import UnsupportedError
from m2s.heads import Head, Posterior, leave_one_out_from_posterior
from m2s.losses.score_entropy import check_pair, row_loss_spec
from m2s.ops.last_layer import Output
from m2s.ops.linear_loss import RowLossSpec
from m2s.process import Uniform


def udlm(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """Compute alpha'/(K alpha) [K/a_k - K/b_k - sum_j (a_j/a_k) log(b_k a_j / (b_j a_k))].

    a = K alpha e_{x_0} + 1 - alpha and b = K alpha nu + 1 - alpha, with nu the leave-one-out distribution. It equals score
    entropy (`tests/losses/test_equivalences.py`).

    Args:
        head: A head with a posterior, over `m2s.Uniform`.
        output: Output of the network at (x_t, t), [*site, >= states] or `m2s.Unprojected`.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], where *b is the start of *site.

    Returns:
        Nats per position [*site].

    Raises:
        TypeError: The head has no posterior over `m2s.Uniform`.
    """
    process = _uniform(head)
    check_pair(process, x_0, x_t, t)
    count, schedule = process.vocab, process.schedule
    nu = leave_one_out_from_posterior(head.posterior(output, x_t, t), x_t, t, process)
    time = validation.align("t", to_float64(t), x_t)
    alpha, rest = (value.to(nu.dtype).unsqueeze(-1) for value in (schedule.alpha(time), schedule.beta(time)))
    clean = torch.zeros_like(nu).scatter(-1, x_0.long().unsqueeze(-1), 1.0)
    a, b = (count * alpha * distribution + rest for distribution in (clean, nu))
    a_k, b_k = (value.gather(-1, x_t.long().unsqueeze(-1)) for value in (a, b))
    terms = a / a_k * torch.log(b_k * a / (b * a_k))
    bracket = (count / a_k - count / b_k).squeeze(-1) - terms.sum(-1)
    return (schedule.alpha_prime(time) / (count * schedule.alpha(time))).to(nu.dtype) * bracket


def udlm_rows(head: Head, x_0: Tensor, x_t: Tensor, t: Tensor) -> RowLossSpec | None:
    """Describe the fused form of `udlm`: that of score entropy, which it equals.

    Args:
        head: The head.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b].

    Returns:
        The operation and the scalars of every row; None for a head without a fused form.

    Raises:
        TypeError: The head has no posterior over `m2s.Uniform`.
    """
    _uniform(head)
    return row_loss_spec(head, x_0, x_t, t)


def _uniform(head: Head) -> Uniform:
    """Return the process of a head for which the loss is defined."""
    if not (isinstance(head.process, Uniform) and head.has_posterior):
        raise UnsupportedError("UDLM's loss", head, Posterior, Uniform)
    return head.process
