"""The moving average of the weights, in float32: what is validated and published."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from m2s.training.parallel import local_shard, reshard


class EMA:
    """ema <- d ema + (1 - d) weight with d = min(decay, (1 + n)/(10 + n)) at update n, so that the start is soon forgotten."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights = dict(model.named_parameters())
        self.values: dict[str, Tensor] = {name: weight.detach().clone().float() for name, weight in self.weights.items()}

    def share(self, step: int) -> float:
        """1 - d, what the weight has of the average after update `step`."""
        return 1 - min(self.decay, (1 + step) / (10 + step))

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """The weights and their averages, of shards those of this process; they share memory."""
        return [local_shard(weight.detach()) for weight in self.weights.values()], [
            local_shard(value) for value in self.values.values()
        ]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the network's weights are the average."""
        raw = {name: weight.detach().clone() for name, weight in self.weights.items()}
        try:
            self._put(self.values)
            yield
        finally:
            self._put(raw)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        reshard(self.model)
        for name, weight in self.weights.items():
            weight.copy_(values[name])
