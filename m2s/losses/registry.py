"""Training losses by name, as `m2s train --head.loss` takes them.

An entry declares the loss, the loss whose integral over t is the NELBO, and its fused form, if it has one.

    LOSSES.add("my-loss", LossEntry(my_loss, nelbo=score_entropy))
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m2s.heads import Head
from m2s.losses.any_order import any_order
from m2s.losses.ct_elbo import ct_elbo
from m2s.losses.d3pm import chain, chain_kl, d3pm
from m2s.losses.gidd import gidd, gidd_clipped, gidd_clipped_rows, gidd_rows
from m2s.losses.masked_cross_entropy import masked_cross_entropy, masking_schedule
from m2s.losses.next_token import next_token_nll, next_token_rows, zero_integral
from m2s.losses.noised_cross_entropy import noised_cross_entropy, noised_rows
from m2s.losses.path_kl import path_kl, path_kl_rows
from m2s.losses.score_entropy import row_loss_spec, score_entropy
from m2s.losses.udlm import udlm, udlm_rows
from m2s.ops.last_layer import Output
from m2s.ops.linear_loss import RowLossSpec
from m2s.registry import Registry

Loss = Callable[[Head, Output, Tensor, Tensor, Tensor], Tensor]
"""loss(head, output, x_0, x_t, t): nats per position, [B, L]."""

FusedForm = Callable[..., RowLossSpec | None]
"""fused(head, x_0, x_t, t): how an op computes the loss from hidden states; None where it cannot for this head."""


@dataclass(frozen=True)
class LossEntry:
    """A training loss and what the trainer must know about it.

    Args:
        function: The loss. Its arguments after `t` are its options.
        nelbo: The loss whose integral over t is the NELBO, by which a run is validated. None: the loss itself.
            All other estimates integrate `m2s.losses.elbo.nelbo_integrand`.
        fused: Its fused form: the loss with the last layer in one op, without all logits in memory. None: there is none, and
            the trainer says so when a transformer is trained with fused kernels.
        zero_unmasked: Under a process that only masks, the loss of an unmasked position is 0. The fused form then leaves these
            positions out.
        without_time: The loss is an average over times: the network must not see the time.
    """

    function: Callable[..., Tensor]
    nelbo: Loss | None = None
    fused: FusedForm | None = None
    zero_unmasked: bool = False
    without_time: bool = False


LOSSES: Registry[LossEntry] = Registry("loss")


def entry_of(loss: Loss) -> LossEntry | None:
    """Return the registered entry of a loss.

    Args:
        loss: A loss, or a `functools.partial` of one with its options.

    Returns:
        The entry; None for a loss that is not registered.
    """
    function = loss.func if isinstance(loss, functools.partial) else loss
    return next((entry for entry in LOSSES.values() if entry.function is function), None)


def fused_spec(loss: Loss, head: Head, x_0: Tensor, x_t: Tensor, t: Tensor) -> RowLossSpec | None:
    """Return how a fused op computes a loss.

    Args:
        loss: The loss.
        head: The head.
        x_0: Clean tokens, [B, L].
        x_t: Noisy tokens, [B, L].
        t: Times, [B].

    Returns:
        The op and its scalars; None where the loss has no fused form for this head.
    """
    entry = entry_of(loss)
    if entry is None or entry.fused is None:
        return None
    options: dict[str, Any] = loss.keywords if isinstance(loss, functools.partial) else {}
    return entry.fused(head, x_0, x_t, t, **options)


def has_fused_form(loss: Loss, head: Head) -> bool:
    """Return whether a fused op computes this loss for this head.

    Args:
        loss: The loss.
        head: The head.
    """
    token = torch.zeros(1, 1, dtype=torch.long)
    return fused_spec(loss, head, token, token, torch.tensor([0.5])) is not None


def _masked_rows(head: Head, x_0: Tensor, x_t: Tensor, t: Tensor) -> RowLossSpec | None:
    """The fused form of score entropy, which masked cross entropy is under an absorbing mask (Theorem 4.6)."""
    masking_schedule(head)
    return row_loss_spec(head, x_0, x_t, t)


LOSSES.add("score-entropy", LossEntry(score_entropy, fused=row_loss_spec, zero_unmasked=True))
LOSSES.add("masked", LossEntry(masked_cross_entropy, fused=_masked_rows, zero_unmasked=True))
LOSSES.add("any-order", LossEntry(any_order, nelbo=masked_cross_entropy, without_time=True))
LOSSES.add("noised", LossEntry(noised_cross_entropy, nelbo=score_entropy, fused=noised_rows))
LOSSES.add("gidd", LossEntry(gidd, fused=gidd_rows, zero_unmasked=True))
LOSSES.add("gidd-clipped", LossEntry(gidd_clipped, nelbo=score_entropy, fused=gidd_clipped_rows, zero_unmasked=True))
LOSSES.add("udlm", LossEntry(udlm, fused=udlm_rows))
LOSSES.add("path-kl", LossEntry(path_kl, fused=path_kl_rows, zero_unmasked=True))
LOSSES.add("chain", LossEntry(chain, nelbo=chain_kl))
LOSSES.add("d3pm", LossEntry(d3pm, nelbo=chain_kl))
LOSSES.add("ct-elbo", LossEntry(ct_elbo))
LOSSES.add("likelihood", LossEntry(next_token_nll, nelbo=zero_integral, fused=next_token_rows))
