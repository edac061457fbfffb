"""Seeds and permutations that are pure functions of integers, so that no random state has to be stored.

Only `draw_seed` reads a state: that of torch's global generator, for functions that were given no seed.
"""

import hashlib

import numpy as np
import torch

ROUNDS = 12
# The constants of SplitMix64 (Steele et al. 2014): the increment, and the shift and factor of each mixing step.
_GOLDEN = 0x9E3779B97F4A7C15
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_WORD = 2**64 - 1


def draw_seed() -> int:
    """Draw a seed from torch's global CPU generator, for a function that was given none.

    So two calls draw different numbers, and `torch.manual_seed` before the first repeats both.

    Returns:
        An integer in [0, 2^53), which JSON and float64 hold exactly.
    """
    return int(torch.randint(2**53, (), device="cpu"))


def derived_seed(*parts: int | str) -> int:
    """Derive a seed from a root seed and the names of what it is for.

    Different parts give independent seeds: the BLAKE2b hash of the parts, joined by slashes.

    Args:
        *parts: The root seed and any labels or counters, such as `derived_seed(7, "noise", step)`.

    Returns:
        An integer of 63 bits.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Map positions of an epoch to examples by a pseudo-random bijection of 0..size-1.

    Any position can be computed without the others, so that a run resumes at any step and every process of a distributed run
    computes its part. A Feistel network acts on the bits of the next power of two: each half is changed by a keyed hash of the
    other, which is a bijection for any hash. A value that falls outside 0..size-1 goes through the network again until it falls
    inside (cycle walking), which keeps the bijection.

    Args:
        positions: Integers in 0..size-1, [n].
        size: Number of examples.
        seed: Seed of the run.
        epoch: Number of the epoch; each epoch has another permutation.

    Returns:
        The images of `positions`, [n], as uint64.
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


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finalizer to an array of uint64, whose arithmetic wraps."""
    x = x + np.uint64(_GOLDEN)
    for shift, factor in _STEPS:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    """Apply SplitMix64's finalizer to a Python int, which does not wrap by itself."""
    x = (x + _GOLDEN) & _WORD
    for shift, factor in _STEPS:
        x = ((x ^ (x >> shift)) * factor) & _WORD
    return x ^ (x >> 31)
