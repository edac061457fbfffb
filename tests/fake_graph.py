"""A stand-in for a recorded CUDA graph, so that the control flow around one is tested without a GPU."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from m2s.training.cuda_graph import WARMUP_CALLS


class FakeGraph:
    """The constraints of a graph, without one: from the recording on, weights and gradients stay where they are. A replay
    overwrites the gradients if the recording made them, and adds to them if not.

    Args:
        function: A method of `m2s.training.trainer.Trainer`, perhaps with arguments.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.calls = function, 0
        self.weights = list(getattr(function, "func", function).__self__.model.parameters())

    @property
    def recorded(self) -> bool:
        """Whether the next call is a replay."""
        return self.calls > WARMUP_CALLS

    def __call__(self, *arguments: Any) -> Tensor:
        self.calls += 1
        if self.calls > WARMUP_CALLS + 1:
            assert all(weight.grad is gradient for weight, gradient in zip(self.weights, self.gradients, strict=True))
            assert self.addresses == [weight.data_ptr() for weight in self.weights]
            if self.overwrites:
                for weight in self.weights:
                    weight.grad = None
        elif self.calls == WARMUP_CALLS + 1:
            self.overwrites = self.weights[0].grad is None
        result = self.function(*arguments)
        if self.calls == WARMUP_CALLS + 1:
            self.gradients = [weight.grad for weight in self.weights]
            self.addresses = [weight.data_ptr() for weight in self.weights]
        elif self.calls > WARMUP_CALLS + 1 and self.overwrites:
            for weight, gradient in zip(self.weights, self.gradients, strict=True):
                assert gradient is not None and weight.grad is not None
                weight.grad = gradient.copy_(weight.grad)
        return result
