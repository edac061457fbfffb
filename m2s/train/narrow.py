"""Weights of a network's layers in bf16, kept beside those in float32: an update narrows each once, where it writes it."""

import torch
from torch import Tensor, nn

from m2s.model.dit import Dense


class Narrow:
    """What the layers of `model` read as their `narrow` weights. The optimizer's kernel writes them; `refresh` does so where
    something else has changed a weight: a state that was loaded, the average that was validated, an optimizer of torch's."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, Dense)]
        self.seen: list[tuple[int, int]] = []
        for layer in self.layers:
            layer.narrow = torch.empty_like(layer.weight, dtype=torch.bfloat16)
        self.weights: dict[Tensor, Tensor] = {layer.weight: _narrow(layer) for layer in self.layers}

    @torch.no_grad()
    def refresh(self) -> None:
        """A weight that torch changes counts its changes; the kernel does not, for it writes by address."""
        seen = [(weight._version, weight.data_ptr()) for weight in self.weights]
        if self.layers and seen != self.seen:
            torch._foreach_copy_(list(self.weights.values()), list(self.weights))
            self.seen = seen


def _narrow(layer: Dense) -> Tensor:
    assert layer.narrow is not None
    return layer.narrow
