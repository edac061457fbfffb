"""CUDA graphs of the backward pass: launching thousands of small kernels one by one takes longer than they run."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from m2s.training.optimizer import Optimizer

WARMUP_CALLS = 3  # calls before the recording, in which compilers autotune and libraries allocate their workspaces


def masked_capacity(count: int, positions: int) -> int:
    """Return how many rows a recording reserves for masked positions.

    Args:
        count: The number of masked positions of a call.
        positions: The number of all positions of a call.

    Returns:
        `count` plus four standard deviations of independent masks, rounded up to a sixteenth of all positions.
    """
    part = max(1, positions // 16)
    # The number of masked positions is binomial, with a standard deviation of at most sqrt(positions) / 2.
    return min(positions, math.ceil((count + 2 * math.sqrt(positions)) / part) * part)


class CUDAGraphRunner:
    """A function of tensors that is called a few times and from then on replayed from a recording.

    Everything that it reads besides its arguments, and everything that it changes, must stay at the same address: here the
    weights and their gradients. Its arguments must keep their shapes. The seed that is set before a call is the seed of the
    replay.

    Args:
        function: The function.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.calls = 0
        self.stream = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()

    @property
    def recorded(self) -> bool:
        """Whether the next call is a replay, for which all tensors must be at the same address as in the recording."""
        return self.calls > WARMUP_CALLS

    def __call__(self, *arguments: Tensor | None) -> Tensor:
        """Call, record or replay the function.

        Args:
            *arguments: The arguments of the function. Their shapes, and which of them are None, are the same in every call.

        Returns:
            The result. A replay overwrites that of the replay before.
        """
        self.calls += 1
        if self.calls <= WARMUP_CALLS:
            # On the stream of the recording: cuBLAS's workspaces and cached memory belong to the stream that allocated them.
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = self.function(*arguments)
            torch.cuda.current_stream().wait_stream(self.stream)
            return result
        if self.calls == WARMUP_CALLS + 1:
            # A replay reads the addresses of the recording: copies that stay, into which later arguments are written.
            self.arguments = [None if value is None else value.clone() for value in arguments]
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.result = self.function(*self.arguments)
        for recorded, given in zip(self.arguments, arguments, strict=True):
            if recorded is not None and given is not None:
                recorded.copy_(given)
        self.graph.replay()
        return self.result  # the next replay overwrites it


class DirectBackward:
    """Calls the backward pass of each micro-batch as it is.

    Args:
        backward: The function that adds the gradient of a micro-batch.
    """

    counts_masked = False
    """Whether masked positions must be counted before the backward pass, because a recording reserves a fixed number of
    rows."""

    def __init__(self, backward: Callable[..., Tensor]) -> None:
        self.backward = backward

    def reserve_masked(self, counts: list[float], positions: int) -> None:
        """Reserve rows for the masked positions of the next calls.

        Args:
            counts: The number of masked positions of each call.
            positions: The number of all positions of a call.
        """

    def start_step(self, optimizer: Optimizer, single: bool, soft: bool) -> Callable[..., Tensor]:
        """Clear the gradients of the last step.

        Args:
            optimizer: The optimizer, whose parameters have the gradients.
            single: Whether the step has one micro-batch.
            soft: Whether the network reads softened tokens (a curriculum).

        Returns:
            The function to call for each micro-batch of the step.
        """
        optimizer.zero_grad(set_to_none=True)
        return self.backward


class GraphedBackward(DirectBackward):
    """Replays the backward pass of each micro-batch from a CUDA graph.

    Args:
        backward: The function that adds the gradient of a micro-batch.
        counts_masked: Masked positions are selected before a fused last layer. They are counted first, because a graph reserves
            a fixed number of rows.
        curriculum: The network reads softened tokens in the first part of the run, which is another graph.
    """

    def __init__(self, backward: Callable[..., Tensor], counts_masked: bool, curriculum: bool) -> None:
        super().__init__(backward)
        self.counts_masked = counts_masked
        self.max_masked: int | None = None
        self.plain: Callable[..., Tensor] = backward if counts_masked else CUDAGraphRunner(backward)
        self.soft = CUDAGraphRunner(backward) if curriculum else self.plain

    def reserve_masked(self, counts: list[float], positions: int) -> None:
        """Record a new graph where a call has more masked positions than the current one has rows for.

        Args:
            counts: The number of masked positions of each call.
            positions: The number of all positions of a call.
        """
        count = round(max(counts))
        if self.max_masked is None or count > self.max_masked:
            self.max_masked = masked_capacity(count, positions)
            self.plain = CUDAGraphRunner(functools.partial(self.backward, max_masked=self.max_masked))

    def start_step(self, optimizer: Optimizer, single: bool, soft: bool) -> Callable[..., Tensor]:
        """Clear the gradients of the last step where a replay would not overwrite them, and return the graph."""
        chosen = self.soft if soft else self.plain
        graph = chosen if isinstance(chosen, CUDAGraphRunner) else None
        if not (single and graph and graph.recorded):  # a replay overwrites the gradient that the last one wrote
            optimizer.zero_grad(set_to_none=single or not graph)
        if not soft and self.soft is not self.plain:
            # The curriculum is over, or the recording had too few rows: release that graph and its memory.
            self.soft = self.plain
            torch.cuda.empty_cache()
        return chosen
