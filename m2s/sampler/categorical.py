"""One categorical draw from one uniform, exact at any vocabulary: sums over blocks in index order, each in float64.

A running sum in float32 over 50,257 tokens forgets what is below its last digit: a tail of 50,000 tokens of probability 1e-8
each. Here a tail is drawn at its right total rate and evenly, and a weight of zero is never drawn.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 256


def draw(weights: Float[Tensor, "*site K"], u: Float[Tensor, "*site"]) -> Int[Tensor, "*site"]:
    """The index at which the sums of non-negative `weights`, which need no normalising, first exceed u times their total."""
    columns = weights.shape[-1]
    padded = torch.nn.functional.pad(weights, (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    return choose(padded, padded.sum(-1, dtype=wide(weights)), u).clamp(max=columns - 1)  # of no weight at all: the last


def choose(
    blocks: Float[Tensor, "*site N 256"],
    sums: Float[Tensor, "*site N"],
    u: Float[Tensor, "*site"],
    at: Int[Tensor, "*site"] | None = None,
    more: Float[Tensor, "*site"] | None = None,
) -> Int[Tensor, "*site"]:
    """`draw` with the weights in blocks and the sum of each block at hand; the weight `more` is added at the index `at`."""
    if at is not None and more is not None:
        sums = sums.scatter_add(-1, (at // BLOCK).unsqueeze(-1), more.unsqueeze(-1))
    cumulative = sums.cumsum(-1)
    target = u.to(sums.dtype) * cumulative[..., -1]
    block = _first_above(cumulative, sums, target)
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1), 0)
    index = block[..., None, None].expand(*block.shape, 1, BLOCK)
    inside = blocks.gather(-2, index).squeeze(-2).to(sums.dtype)
    if at is not None and more is not None:
        here = torch.where(at // BLOCK == block, more, 0)
        inside = inside.scatter_add(-1, (at % BLOCK).unsqueeze(-1), here.unsqueeze(-1))
    return block * BLOCK + _first_above(inside.cumsum(-1), inside, target - before)


def _first_above(cumulative: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """The first index whose cumulative sum exceeds the target; where rounding leaves none, the last of positive weight."""
    found = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(-1)
    return torch.minimum(found, last)


def integer(u: Float[Tensor, "*site"], count: int) -> Int[Tensor, "*site"]:
    """One of 0, ..., count - 1, each with the same probability."""
    return (u * count).long().clamp(max=count - 1)


def wide(x: Tensor) -> torch.dtype:
    return x.dtype if x.device.type == "mps" else torch.float64
