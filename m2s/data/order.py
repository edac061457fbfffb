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

from m2s import check

ROUNDS = 12
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


def batch_indices(
    size: int, global_batch: int, step: int, seed: int = 0, rank: int = 0, world: int = 1
) -> Int[Tensor, "slice"]:
    """The items of global batch `step` that rank `rank` of `world` takes; all ranks' slices in rank order are the batch.

    Every `size` consecutive positions of the stream, counted from its start, hold each item exactly once.
    """
    check.positive_int("size", size)
    check.positive_int("global_batch", global_batch)
    check.positive_int("step", step, 0)
    check.positive_int("seed", seed, 0)
    check.positive_int("rank", rank, 0)
    check.positive_int("world", world)
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


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where each position of the epoch leads: a bijection of 0..size-1.

    A Feistel network on the bits of the next power of two, in which each half is changed by a keyed hash of the other, is a
    bijection whatever the hash; a value that falls outside 0..size-1 is sent through again until it falls inside.
    """
    bits = max(2, (size - 1).bit_length())
    low = np.uint64(bits // 2)
    masks = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
    keys = [np.uint64(_mix_int(_mix_int(_mix_int(seed) ^ epoch) + round_)) for round_ in range(ROUNDS)]
    x = positions.astype(np.uint64)
    outside = np.ones(len(x), dtype=bool)
    while outside.any():
        right, left = x[outside] & masks[0], x[outside] >> low
        for round_, key in enumerate(keys):
            if round_ % 2:
                right ^= _mix(left ^ key) & masks[0]
            else:
                left ^= _mix(right ^ key) & masks[1]
        x[outside] = (left << low) | right
        outside = x >= size
    return x


_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, on arrays of uint64 (which wrap)."""
    x = x + np.uint64(_GOLDEN)
    for shift, factor in _STEPS:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    """The same on an int."""
    x = (x + _GOLDEN) & _WORD
    for shift, factor in _STEPS:
        x = ((x ^ (x >> shift)) * factor) & _WORD
    return x ^ (x >> 31)
