"""A CUDA graph of a step: launching thousands of small kernels one by one costs more than running them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

WARMUP_CALLS = 3  # calls before the recording: compilers tune themselves, libraries allocate


def masked_capacity(count: int, sites: int) -> int:
    """Rows of which a recording makes room where `count` of `sites` sites were masked: four standard deviations more, if each
    was drawn by itself, and a whole number of sixteenths."""
    part = max(1, sites // 16)
    return min(sites, math.ceil((count + 2 * math.sqrt(sites)) / part) * part)


class CUDAGraphRunner:
    """`function` of tensors, called as it is a few times and from then on replayed from a recording.

    All that it reads besides its arguments must stay where it is in memory, and so must what it changes: here the weights and
    their gradients. Its arguments must keep their shapes. The seed that is set before a call is the seed of the replay.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.calls = 0
        self.stream = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()

    @property
    def recorded(self) -> bool:
        """Whether the next call is a replay: what it changes must be where it was."""
        return self.calls > WARMUP_CALLS

    def __call__(self, *arguments: Tensor | None) -> Tensor:
        self.calls += 1
        if self.calls <= WARMUP_CALLS:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = self.function(*arguments)
            torch.cuda.current_stream().wait_stream(self.stream)
            return result
        if self.calls == WARMUP_CALLS + 1:
            self.arguments = [None if value is None else value.clone() for value in arguments]
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.result = self.function(*self.arguments)
        for mine, given in zip(self.arguments, arguments, strict=True):
            if mine is not None and given is not None:
                mine.copy_(given)
        self.graph.replay()
        return self.result
