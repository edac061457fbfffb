"""The order of training examples: a pure function of the seed and the step, so that no state has to be stored.

Examples are taken from one endless stream: epoch 0 in one order, epoch 1 in another, and so on. Global batch `step` is the
stream's positions step * global_batch to (step + 1) * global_batch - 1. So a batch may span two epochs and nothing is dropped.
The order of an epoch is a Feistel permutation of 0..size-1 keyed by (seed, epoch). Each position is computed by itself, in O(1)
memory for any data set size. Rank r of w takes the r-th of w equal slices, so the global batch does not depend on w.
"""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from m2s import validation
from m2s.rng import permute


def batch_indices(
    size: int, global_batch: int, step: int, seed: int = 0, rank: int = 0, world: int = 1
) -> Int[Tensor, "slice"]:
    """Return the indices of the examples of global batch `step` that one process takes.

    The slices of all processes, in the order of their ranks, are the global batch. Every `size` consecutive positions of the
    stream, counted from its start, contain each example exactly once.

    Args:
        size: The number of examples of the data set.
        global_batch: The number of examples of a batch, over all processes.
        step: The training step, from 0.
        seed: The seed of the order.
        rank: The rank of this process.
        world: The number of processes. It must divide `global_batch`.

    Returns:
        Indices in 0..size-1, [global_batch // world].

    Raises:
        ValueError: An argument is out of range.
    """
    validation.positive_int("size", size)
    validation.positive_int("global_batch", global_batch)
    validation.positive_int("step", step, 0)
    validation.positive_int("seed", seed, 0)
    validation.positive_int("rank", rank, 0)
    validation.positive_int("world", world)
    if rank >= world:
        raise ValueError(f"rank is {rank}, but it must be below world = {world}")
    if global_batch % world:
        raise ValueError(
            f"global_batch is {global_batch}, but it must be a multiple of world = {world}: every rank takes the same number"
        )
    remaining = global_batch // world
    start = step * global_batch + rank * remaining
    slices = []
    while remaining:
        epoch, first = divmod(start, size)
        count = min(remaining, size - first)
        slices.append(permute(np.arange(first, first + count, dtype=np.uint64), size, seed, epoch))
        start, remaining = start + count, remaining - count
    return torch.from_numpy(np.concatenate(slices).astype(np.int64))


def batches(
    size: int, global_batch: int, seed: int = 0, start: int = 0, rank: int = 0, world: int = 1
) -> Iterator[Int[Tensor, "slice"]]:
    """Yield `batch_indices` of steps start, start + 1, ... without end.

    Args:
        size: The number of examples of the data set.
        global_batch: The number of examples of a batch, over all processes.
        seed: The seed of the order.
        start: The first step. A run that stopped before step `start` resumes with it.
        rank: The rank of this process.
        world: The number of processes.

    Yields:
        Indices in 0..size-1, [global_batch // world].
    """
    step = start
    while True:
        yield batch_indices(size, global_batch, step, seed, rank, world)
        step += 1
