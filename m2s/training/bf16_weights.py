"""Weights of a network's layers in bf16, kept beside those in float32: an update narrows each once, where it writes it."""

import torch
from torch import Tensor, nn

from m2s.models.dit import Dense


class BF16Weights:
    """What the layers of `model` read as their `narrow` weights. The optimizer's kernel writes them; `refresh` does so where
    torch has changed a weight otherwise: a state that was loaded, the average that was validated, an optimizer of torch's.
    (Not where a weight's `.data` was changed in place: torch does not count that.)"""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, Dense)]
        self.weights: dict[Tensor, Tensor] = {}
        for layer in self.layers:  # some may share a weight
            layer.narrow = self.weights.setdefault(layer.weight, torch.empty_like(layer.weight, dtype=torch.bfloat16))
        self.seen: list[tuple[int, int]] = []
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """A weight that torch changes counts its changes; the kernel does not, for it writes by address."""
        pairs = [(layer.weight, layer.narrow) for layer in self.layers if layer.narrow is not None]
        seen = [(weight._version, weight.data_ptr()) for weight, _ in pairs]
        if pairs and seen != self.seen:
            torch._foreach_copy_([narrow for _, narrow in pairs], [weight for weight, _ in pairs])
            self.seen = seen
