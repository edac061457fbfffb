"""The NELBO of GIDD and its training loss (von Rutte et al. 2025), in the form of the authors."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.conversions.bridge import mixing_vector, site_coefficients
from m2s.dtypes import to_float64
from m2s.errors import UnsupportedError
from m2s.heads import Head, Posterior, leave_one_out_from_posterior
from m2s.losses.score_entropy import check_pair, row_loss_at, row_loss_spec
from m2s.ops.last_layer import Output
from m2s.ops.linear_loss import RowLossSpec
from m2s.process import RankOne


def gidd(
    head: Head, output: Output, x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
) -> Float[Tensor, "*site"]:
    """Compute w (KL(q_x || q_nu) + D(q_x(k), q_nu(k))), w = n_t(k) / q_x(k), D(a, b) = a/b - log(a/b) - 1.

    q_x = P_t(.|x_0) and q_nu = alpha nu + m, with nu the leave-one-out distribution. It equals score entropy through the bridge
    (`tests/losses/test_equivalences.py`).

    Args:
        head: A head with a posterior, over a rank-one process.
        output: Output of the network at (x_t, t), [*site, >= states] or `m2s.Unprojected`.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b], where *b is the start of *site.

    Returns:
        Nats per position [*site].
    """
    weight, divergence = _parts(head, output, x_0, x_t, t)
    return weight.to(divergence.dtype) * divergence


def gidd_clipped(
    head: Head,
    output: Output,
    x_0: Int[Tensor, "*site"],
    x_t: Int[Tensor, "*site"],
    t: Float[Tensor, "*b"],
    max_weight: float = 1.0,
) -> Float[Tensor, "*site"]:
    """`gidd` with the weight clipped to [0, max_weight]: a training loss, not an upper bound on the NLL.

    Args:
        head: A `m2s.Posterior` over a rank-one process.
        output: The network's output at (x_t, t), [*site, >= states].
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b].
        max_weight: The largest weight: w_max = 1 in the paper, `max_loss_weight` in the authors' code.

    Returns:
        min(w, max_weight) (KL(q_x || q_nu) + D(q_x(k), q_nu(k))) in nats per position [*site].
    """
    weight, divergence = _parts(head, output, x_0, x_t, t)
    return weight.clamp(max=max_weight).to(divergence.dtype) * divergence


def gidd_rows(head: Head, x_0: Tensor, x_t: Tensor, t: Tensor) -> RowLossSpec | None:
    """Describe the fused form of `gidd`: that of score entropy, which it equals.

    Args:
        head: The head.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b].

    Returns:
        The operation and the scalars of every row; None for a head without a fused form.

    Raises:
        TypeError: The head has no posterior over a rank-one process.
    """
    _rank_one(head)
    return row_loss_spec(head, x_0, x_t, t)


def gidd_clipped_rows(head: Head, x_0: Tensor, x_t: Tensor, t: Tensor, max_weight: float = 1.0) -> RowLossSpec | None:
    """Describe the fused form of `gidd_clipped`: score entropy with the rate min(n_t(k), max_weight P_t(k|x_0)).

    Args:
        head: The head.
        x_0: Clean tokens [*site].
        x_t: Noisy tokens [*site].
        t: Times [*b].
        max_weight: The largest weight.

    Returns:
        The operation and the scalars of every row; None for a head without a fused form.

    Raises:
        TypeError: The head has no posterior over a rank-one process.
    """
    process = _rank_one(head)
    site = process.at(x_t, to_float64(t))
    at_k = torch.where(torch.eq(x_0, x_t), site.stay, site.m_k)  # P_t(k|x_0)
    rate = torch.where(at_k > 0, torch.minimum(site.rate, max_weight * at_k.where(at_k > 0, 1)), 0)
    return row_loss_at(head, process, x_0, x_t, t, site._replace(rate=rate))


def _rank_one(head: Head) -> RankOne:
    """Return the process of a head for which the losses are defined."""
    process = head.process.rank_one
    if process is None or not head.has_posterior:
        raise UnsupportedError("GIDD's loss", head, Posterior, "a rank-one process")
    return process


def _parts(head: Head, output: Output, x_0: Tensor, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight w and the divergence of GIDD's loss, each [*site]."""
    process = _rank_one(head)
    check_pair(process, x_0, x_t, t)
    time, index = to_float64(t), x_t.long().unsqueeze(-1)
    nu = leave_one_out_from_posterior(head.posterior(output, x_t, t), x_t, t, process)
    site = site_coefficients(process, x_t, t, nu.dtype)
    model = site.alpha.unsqueeze(-1) * nu + mixing_vector(process, site)
    truth = process.rows(x_0, time).to(nu.dtype)
    ratio = torch.where(truth > 0, truth / model.where(model > 0, 1), 1)
    at_current = ratio.gather(-1, index).squeeze(-1)
    divergence = (truth * torch.log(ratio)).sum(-1) + at_current - torch.log(at_current) - 1
    at_k = process.rows(x_0, time).gather(-1, index).squeeze(-1)
    rate = process.at(x_t, time).rate
    return torch.where(rate > 0, rate / at_k, 0), torch.where(rate > 0, divergence, 0)
