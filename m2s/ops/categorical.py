"""Categorical sampling by inverse CDF, exact at any vocabulary size.

A cumulative sum in float32 over 50,257 tokens loses everything below its last digit, such as a tail of 50,000 tokens with
probability 1e-8 each. Here block sums are float64, so the tail is drawn at its exact total rate, and a weight of zero is never
drawn.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.dtypes import float64_dtype
from m2s.ops.reverse_step.cpu import block_width, invert_cdf
from m2s.ops.reverse_step.routes import uniform_integer

__all__ = ["draw_categorical", "uniform_integer"]


def draw_categorical(weights: Float[Tensor, "*#site K"], u: Float[Tensor, "*site"]) -> Int[Tensor, "*site"]:
    """Draw one index per position from unnormalized weights by inverse CDF.

    Args:
        weights: Non-negative weights `[*site, K]`; they need no normalization. A single distribution `[K]` is broadcast over
            all positions without a copy.
        u: One uniform number in [0, 1) per position.

    Returns:
        The first index at which the cumulative sum of the weights exceeds `u` times their total; K - 1 where all weights are
        zero.
    """
    columns = weights.shape[-1]
    width = block_width(columns)
    blocks = torch.nn.functional.pad(weights, (0, -columns % width)).unflatten(-1, (-1, width))
    sums = blocks.sum(-1, dtype=float64_dtype(weights))
    index = invert_cdf(blocks.expand(*u.shape, -1, -1), sums.expand(*u.shape, -1), u)
    return index.clamp(max=columns - 1)  # past the end where all weights are zero
