"""The order in which training sees its data: a pure function of the seed and the step, kept nowhere.

Items are taken in one endless stream: epoch 0 in one order, epoch 1 in another, and so on; global batch `step` is the
stream's positions step * global_batch up to (step + 1) * global_batch, so a batch may span two epochs and nothing is dropped.
The order of an epoch is a Feistel permutation of 0..size-1 keyed by (seed, epoch): any position is found by itself, in O(1)
memory, however large the set. Rank r of w takes the r-th of w equal slices, so the global batch does not depend on w.
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
    """The items of global batch `step` that rank `rank` of `world` takes; all ranks' slices in rank order are the batch.

    Every `size` consecutive positions of the stream, counted from its start, hold each item exactly once.
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
            f"global_batch is {global_batch}, but it must be a multiple of world = {world}: each rank takes as many"
        )
    share = global_batch // world
    start = step * global_batch + rank * share
    parts = []
    while share:
        epoch, first = divmod(start, size)
        count = min(share, size - first)
        parts.append(permute(np.arange(first, first + count, dtype=np.uint64), size, seed, epoch))
        start, share = start + count, share - count
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def batches(
    size: int, global_batch: int, seed: int = 0, start: int = 0, rank: int = 0, world: int = 1
) -> Iterator[Int[Tensor, "slice"]]:
    """`batch_indices` of steps start, start + 1, ... without end: what a run that stopped before step `start` goes on with."""
    step = start
    while True:
        yield batch_indices(size, global_batch, step, seed, rank, world)
        step += 1
