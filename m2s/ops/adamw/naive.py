"""Clip, AdamW and the moving average as torch has them, one after the other: any device, any kind of tensor."""

import torch
from torch import Tensor


@torch.no_grad()
def step(
    optimizer: torch.optim.AdamW, weights: list[Tensor], averages: list[Tensor], norm: Tensor, clip: float, share: float
) -> None:
    """g <- g min(1, clip / |g|) where clip is not 0, a step of the optimizer, average <- average + share (weight - average).

    `weights` are the optimizer's parameters, of shards those of this process.
    """
    if clip:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grads_with_norm_(group["params"], clip, norm)
    optimizer.step()
    torch._foreach_lerp_(averages, [weight.to(average.dtype) for weight, average in zip(weights, averages, strict=True)], share)
