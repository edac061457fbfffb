"""Estimators that mask a number or a share of positions: RADD (Ou et al. 2025), LLaDA (Nie et al. 2025), Dream (Ye et al.).

With n positions masked without replacement, n uniform on 1..L, the mean of L/n times the cross entropy is the NLL of a model
that fills positions one at a time, averaged over orders. It bounds the NLL of random orders by Jensen's inequality.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.evaluation.likelihood.base import Estimator, Options, Term, needs_masks, no_terms_missing
from m2s.evaluation.likelihood.masks import MaskCount, MaskShare
from m2s.heads import Head
from m2s.losses.nll import nll_of_tokens
from m2s.ops.last_layer import Output

DREAM_LOW = 1e-3  # sampling_eps


def cross_entropy_at_masks(head: Head, output: Output, x_0: Tensor, x_t: Tensor, t: Tensor) -> Float[Tensor, "*site"]:
    """Return -log mu_{x_0} at masked positions, 0 elsewhere.

    Args:
        head: A head with a posterior, under masking noise.
        output: The network's output at (x_t, t), [*site, V].
        x_0: Clean tokens, [*site].
        x_t: Noisy tokens, [*site].
        t: Times, [*b].

    Returns:
        Nats per position, [*site].
    """
    return torch.where(head.process.is_mask(x_t), nll_of_tokens(head.posterior_logits(output, x_t, t), x_0), 0)


def _counts(head: Head, options: Options) -> list[Term]:
    """n masks without replacement, n uniform on 1..L."""
    return [Term("integral", MaskCount(), cross_entropy_at_masks)]


def _shares(head: Head, options: Options) -> list[Term]:
    """Every position masked with probability lambda, lambda uniform on [0, 1)."""
    return [Term("integral", MaskShare(), cross_entropy_at_masks)]


def _dream(head: Head, options: Options) -> list[Term]:
    """lambda uniform on [1e-3, 1), and the mean in place of the integral."""
    return [Term("integral", MaskShare(DREAM_LOW, 1.0, factor=1.0), cross_entropy_at_masks)]


def _dream_missing(head: Head, options: Options) -> tuple[str, ...]:
    """Shares of masks below 1e-3."""
    return ("shares of masks below 0.001", "length of the interval")


RADD = Estimator(
    title="cross entropy at a uniform share of masks, over [0, 1)",
    source="Ou et al. 2025, lambda-DCE",
    build=_shares,
    missing=no_terms_missing,
    unsupported=needs_masks,
    reverse="shares",
    note="the network sees the time of its share of masks",
)
RADD_ORDER = Estimator(
    title="any-order: n masks without replacement",
    source="Ou et al. 2025, k-DCE",
    build=_counts,
    missing=no_terms_missing,
    unsupported=needs_masks,
    reverse="any-order",
)
LLADA = Estimator(
    title="Monte Carlo with n masks without replacement",
    source="Nie et al. 2025, released code",
    build=_counts,
    missing=no_terms_missing,
    unsupported=needs_masks,
    reverse="any-order",
    note="released code spreads n evenly over a batch, which changes the variance alone",
)
DREAM = Estimator(
    title="Monte Carlo with a share of masks in [1e-3, 1)",
    source="Ye et al. 2025, released code",
    build=_dream,
    missing=_dream_missing,
    unsupported=needs_masks,
    reverse="shares",
)
