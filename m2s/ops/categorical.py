"""One categorical draw from one uniform, exact at any vocabulary: sums over blocks in index order, each in float64.

A running sum in float32 over 50,257 tokens forgets what is below its last digit: a tail of 50,000 tokens of probability 1e-8
each. Here a tail is drawn at its right total rate and evenly, and a weight of zero is never drawn.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.dtypes import float64_dtype
from m2s.ops.reverse_step.naive import BLOCK, invert_cdf, uniform_integer

__all__ = ["draw_categorical", "uniform_integer"]


def draw_categorical(weights: Float[Tensor, "*#site K"], u: Float[Tensor, "*site"]) -> Int[Tensor, "*site"]:
    """The index at which the sums of non-negative `weights`, which need no normalising, first exceed u times their total. One
    law [K] serves every site and is not copied for each."""
    columns = weights.shape[-1]
    blocks = torch.nn.functional.pad(weights, (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1, dtype=float64_dtype(weights))
    index = invert_cdf(blocks.expand(*u.shape, -1, -1), sums.expand(*u.shape, -1), u)
    return index.clamp(max=columns - 1)  # of no weight at all: the last
