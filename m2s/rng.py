"""Seeds and permutations that are pure functions of integers, so that nothing random has to be stored."""

import hashlib

import numpy as np

ROUNDS = 12
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


def derived_seed(*parts: int | str) -> int:
    """A seed of 63 bits for a purpose of its own."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
