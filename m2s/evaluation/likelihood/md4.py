"""MD4 (Shi et al. 2024): the masked cross entropy over all of [0, 1], and a last step that draws uniform tokens."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.evaluation.likelihood.base import Estimator, Options, Term, needs_masks, needs_prior
from m2s.evaluation.likelihood.levels import Point, Times
from m2s.heads import Head
from m2s.losses.masked_cross_entropy import masked_cross_entropy
from m2s.ops.last_layer import Output


def _uniform_draw(head: Head, output: Output, x_0: Tensor, x_t: Tensor, t: Tensor) -> Float[Tensor, "*site"]:
    """log K at every position that is still masked at t = 0: the last step draws a uniform token."""
    return torch.where(head.process.is_mask(x_t), math.log(head.process.vocab), 0.0).double()


def _terms(head: Head, options: Options) -> list[Term]:
    """The integral over [0, 1], and the last step where the schedule masks at t = 0 (`m2s.Rescaled`)."""
    return [Term("integral", Times(0.0, 1.0), masked_cross_entropy), Term("reconstruction", Point(0.0), _uniform_draw)]


def _missing(head: Head, options: Options) -> tuple[str, ...]:
    """The prior, where tokens remain at t = 1."""
    return ("prior",) if needs_prior(head, 1.0) else ()


MD4 = Estimator(
    title="masked cross entropy over [0, 1], uniform last step",
    source="Shi et al. 2024, released code",
    build=_terms,
    missing=_missing,
    unsupported=needs_masks,
    reverse="uniform-last",
    note="its prior is 0 by definition, also where alpha_1 > 0",
)
