"""The exponential moving average of the weights, in float32, used for validation and saved in the checkpoint."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from m2s.training.parallel import local_shard, reshard


class EMA:
    """The average ema <- d ema + (1 - d) weight with d = min(decay, (1 + n)/(10 + n)) at step n.

    The smaller decay of the first steps lets the average forget the initial weights.

    Args:
        model: The network.
        decay: The largest decay.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights = dict(model.named_parameters())
        self.values: dict[str, Tensor] = {name: weight.detach().clone().float() for name, weight in self.weights.items()}

    def new_weight_fraction(self, step: int) -> float:
        """Return 1 - d, the fraction of the new weight in the average, at a step.

        Args:
            step: The training step n, counted from 0.
        """
        return 1 - min(self.decay, (1 + step) / (10 + step))

    def weights_and_averages(self, names: list[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Return weights and their averages, or this process's shards of them. They share memory with the originals.

        Args:
            names: The names of the parameters.
        """
        weights = [local_shard(self.weights[name].detach()) for name in names]
        return weights, [local_shard(self.values[name]) for name in names]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the network's weights by their average inside the context."""
        raw = {name: weight.detach().clone() for name, weight in self.weights.items()}
        try:
            self._copy_into_weights(self.values)
            yield
        finally:
            self._copy_into_weights(raw)

    @torch.no_grad()
    def _copy_into_weights(self, values: dict[str, Tensor]) -> None:
        """Copy values into the weights."""
        reshard(self.model)
        for name, weight in self.weights.items():
            weight.copy_(values[name])
