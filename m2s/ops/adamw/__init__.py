"""A step of AdamW by a clipped gradient, and of the moving average of the weights."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from m2s.ops.adamw import naive
from m2s.ops.backend import uses_triton

if TYPE_CHECKING:
    from m2s.ops.adamw.triton import Tables

__all__ = ["OptimizerStep"]


def _nothing() -> None:
    pass


class OptimizerStep:
    """`reference.step` for one optimizer, fused where that is possible. A fused one writes weights that are kept `narrow` too,
    by the parameters: contiguous tensors of one dtype, bf16 or float16."""

    def __init__(self, optimizer: torch.optim.AdamW, narrow: dict[Tensor, Tensor] | None = None) -> None:
        self.optimizer, self.narrow = optimizer, narrow or {}
        self.tables: Tables | None = None

    def start(
        self, weights: list[Tensor], averages: list[Tensor], norm: Tensor, clip: float, share: float, numbers: Tensor
    ) -> Callable[[], None]:
        """The step, if the float64 `numbers` [n] are finite; returns what is left to do when that is known on the host.

        That is nothing of a fused step, which looks at them itself: the host may find out while it is at work.
        """
        if uses_triton(norm):
            from m2s.ops.adamw import triton

            self.tables = self.tables or triton.Tables(self.optimizer, self.narrow)
            if self.tables.take(averages):
                self.tables.step(norm, clip, share, numbers)
                return _nothing
        return functools.partial(naive.step, self.optimizer, weights, averages, norm, clip, share)
