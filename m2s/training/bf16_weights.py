"""Copies of a network's weights in bf16, so that a training step rounds each weight once, where the optimizer writes it."""

import torch
from torch import Tensor, nn

from m2s.models.dit import Dense


class BF16Weights:
    """The bf16 copies that the dense layers of a network read, as their attribute `bf16_weight`.

    The kernel of the optimizer writes the copies. `refresh` does so after torch changed a weight in another way: a state was
    loaded, the averaged weights were validated, or torch's own optimizer made the step. A change of a weight's `.data` in place
    is not seen: torch does not count it.

    Args:
        model: The network.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, Dense)]
        self.weights: dict[Tensor, Tensor] = {}
        for layer in self.layers:  # layers may have a weight in common
            layer.bf16_weight = self.weights.setdefault(layer.weight, torch.empty_like(layer.weight, dtype=torch.bfloat16))
        self.seen: list[tuple[int, int]] = []
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights where torch has changed one since the last call."""
        pairs = [(layer.weight, layer.bf16_weight) for layer in self.layers if layer.bf16_weight is not None]
        # torch counts its changes of a tensor; the optimizer's kernel writes by address and is not counted.
        seen = [(weight._version, weight.data_ptr()) for weight, _ in pairs]
        if pairs and seen != self.seen:
            torch._foreach_copy_([copy for _, copy in pairs], [weight for weight, _ in pairs])
            self.seen = seen

    def close(self) -> None:
        """Remove the copies from the layers."""
        for layer in self.layers:
            layer.bf16_weight = None
