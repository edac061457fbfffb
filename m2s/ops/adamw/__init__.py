"""A step of AdamW by a clipped gradient, and of the moving average of the weights."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from m2s.ops.adamw import reference
from m2s.ops.choice import fused

if TYPE_CHECKING:
    from m2s.ops.adamw.triton import Tables

__all__ = ["Step"]


class Step:
    """`reference.step` for one optimizer, fused where that is possible."""

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        self.optimizer = optimizer
        self.tables: Tables | None = None

    def ready(
        self, weights: list[Tensor], averages: list[Tensor], norm: Tensor, clip: float, share: float
    ) -> Callable[[], None]:
        """The step, to be made by a call. What can be done before it is known whether the step shall be made is done here, for
        from the moment when that is known until the call an accelerator has nothing to do."""
        if fused(norm):
            from m2s.ops.adamw import triton

            self.tables = self.tables or triton.Tables(self.optimizer)
            if self.tables.take(averages):
                return self.tables.ready(norm, clip, share)
        return functools.partial(reference.step, self.optimizer, weights, averages, norm, clip, share)
