"""Definition of the optimizer step: clip, AdamW and moving average with torch's functions, on any device."""

import torch
from torch import Tensor


@torch.no_grad()
def step(
    optimizer: torch.optim.Optimizer,
    weights: list[Tensor],
    averages: list[Tensor],
    norm: Tensor,
    clip: float,
    average_weight: float,
) -> None:
    """Make one step: g <- g min(1, clip / |g|), the optimizer, average <- average + average_weight (weight - average).

    Args:
        optimizer: The optimizer.
        weights: Its parameters; of sharded ones the local shards.
        averages: Moving averages of the weights, updated in place.
        norm: Norm of the gradient |g|.
        clip: Greatest norm of the gradient; 0 for no clipping.
        average_weight: Weight of the new parameters in the moving average.
    """
    if clip:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grads_with_norm_(group["params"], clip, norm)
    optimizer.step()
    torch._foreach_lerp_(
        averages, [weight.to(average.dtype) for weight, average in zip(weights, averages, strict=True)], average_weight
    )
