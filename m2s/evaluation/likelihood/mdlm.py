"""MDLM (Sahoo et al. 2024) as its released code evaluates in continuous time: masked cross entropy, t in [1e-3, 1)."""

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.dtypes import to_float64
from m2s.evaluation.likelihood.any_order import cross_entropy_at_masks
from m2s.evaluation.likelihood.base import Estimator, Options, Term, lacks_ends, needs_masks
from m2s.evaluation.likelihood.levels import Times
from m2s.heads import Head
from m2s.ops.last_layer import Output

LOW = 1e-3  # sampling_eps


def masked_cross_entropy(head: Head, output: Output, x_0: Tensor, x_t: Tensor, t: Tensor) -> Float[Tensor, "*site"]:
    """Return n_t(mask) alpha_t / m_t(mask) (-log mu_{x_0}) at masked positions, 0 elsewhere (Theorem 4.6).

    This is `m2s.masked_cross_entropy`, also for GIDD's process without uniform noise.

    Args:
        head: A head with a posterior, under masking noise.
        output: The network's output at (x_t, t), [*site, V].
        x_0: Clean tokens, [*site].
        x_t: Noisy tokens, [*site].
        t: Times, [*b].

    Returns:
        Nats per position, [*site].
    """
    assert head.process.rank_one is not None
    site = head.process.rank_one.at(x_t, to_float64(t))
    weight = site.rate * site.alpha / site.m_k.where(site.m_k > 0, 1)
    return torch.where(head.process.is_mask(x_t), weight * cross_entropy_at_masks(head, output, x_0, x_t, t), 0)


def _terms(head: Head, options: Options) -> list[Term]:
    """The mean over times in place of the integral, and no other term."""
    return [Term("integral", Times(LOW, 1.0, factor=1.0), masked_cross_entropy)]


MDLM = Estimator(
    title="mean masked cross entropy over t in [1e-3, 1)",
    source="Sahoo et al. 2024, released code, T = 0",
    build=_terms,
    missing=lacks_ends(LOW, 1.0),
    unsupported=needs_masks,
)
