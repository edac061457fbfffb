"""One optimizer step: gradient clipping, AdamW and the moving average of the weights."""

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


def _do_nothing() -> None:
    """Finish a fused step, which is complete already."""


class OptimizerStep:
    """`naive.step` for one optimizer, as a single Triton kernel where one can run.

    Args:
        optimizer: The optimizer, with one parameter group.
    """

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        self.optimizer = optimizer
        self.tables: Tables | None = None

    def start(
        self, weights: list[Tensor], averages: list[Tensor], norm: Tensor, clip: float, average_weight: float, numbers: Tensor
    ) -> Callable[[], None]:
        """Make the step if all `numbers` are finite.

        A fused step checks the numbers on the device, so the host can read them while the kernel runs. Otherwise the step is
        left to the function that is returned.

        Args:
            weights: The parameters of the optimizer; of sharded ones the local shards.
            averages: Their moving averages.
            norm: Norm of the gradient.
            clip: Greatest norm of the gradient; 0 for no clipping.
            average_weight: Weight of the new parameters in the moving average.
            numbers: Float64 numbers `[n]`, such as loss and gradient norm.

        Returns:
            A function to call once the host knows that the numbers are finite.
        """
        if uses_triton(norm):
            from m2s.ops.adamw import triton  # imports the optional package triton

            self.tables = self.tables or triton.Tables(self.optimizer)
            if self.tables.locate(averages):
                self.tables.step(norm, clip, average_weight, numbers)
                return _do_nothing
        return functools.partial(naive.step, self.optimizer, weights, averages, norm, clip, average_weight)
