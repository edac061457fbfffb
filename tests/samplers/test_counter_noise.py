"""Philox and the uniforms that samplers use."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2s.ops.counter_noise import PURPOSES
from m2s.ops.philox.naive import LOW, philox, uniform
from m2s.samplers import (
    CounterNoise,
)

pytestmark = pytest.mark.usefixtures("without_shape_hook")


KNOWN_ANSWERS = {  # from Random123's kat_vectors
    "zeros": ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ([LOW] * 4, [LOW] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
}


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as in its paper, with Python integers."""
    for number in range(10):
        left, right = divmod(0xD2511F53 * counter[0], 1 << 32), divmod(0xCD9E8D57 * counter[2], 1 << 32)
        first, second = ((key[0] + number * 0x9E3779B9) % (1 << 32), (key[1] + number * 0xBB67AE85) % (1 << 32))
        counter = [right[0] ^ counter[1] ^ first, right[1], left[0] ^ counter[3] ^ second, left[1]]
    return counter


def number_by_hand(seed: int, sample: int, step: int, site: int, purpose: int, window: int) -> float:
    high, low, *_ = philox_by_hand([sample, step, site, purpose + (window << 16)], [seed % (1 << 32), seed >> 32])
    return ((high >> 5) * (1 << 26) + (low >> 6)) / (1 << 53)


@pytest.mark.parametrize("case", KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(case: str) -> None:
    counter, key, expected = KNOWN_ANSWERS[case]
    words = philox(tuple(torch.tensor([word]) for word in counter), (key[0], key[1]))
    assert " ".join(f"{int(word):08x}" for word in words) == expected
    assert " ".join(f"{word:08x}" for word in philox_by_hand(counter, key)) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, LOW), min_size=4, max_size=4), min_size=1, max_size=5), st.integers(0, (1 << 64) - 1))
def test_philox_agrees_with_python_integers(counters: list[list[int]], seed: int) -> None:
    words = philox(tuple(torch.tensor(counters).unbind(-1)), (seed & LOW, seed >> 32))
    by_hand = [philox_by_hand(counter, [seed & LOW, seed >> 32]) for counter in counters]
    assert torch.stack(words, -1).tolist() == by_hand


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 32) - 5),
    st.integers(0, (1 << 32) - 1),
    st.sampled_from(PURPOSES),
    st.integers(0, 999),
)
def test_uniforms_are_a_function_of_the_counter(seed: int, sample: int, step: int, purpose: str, window: int) -> None:
    noise = CounterNoise(seed, torch.arange(sample, sample + 4), 3, step, window)
    code = 10_000 + PURPOSES.index(purpose)
    expected = [[number_by_hand(seed, sample + i, step, site, code, window) for site in range(3)] for i in range(4)]
    assert noise(purpose).tolist() == expected
    assert noise.once(purpose).tolist() == [number_by_hand(seed, sample + i, step, LOW, code, window) for i in range(4)]
    assert noise(5).tolist()[0][2] == number_by_hand(seed, sample, step, 2, 5, window)


def test_uniforms_lie_in_the_half_open_interval() -> None:
    top, zero = torch.tensor([LOW]), torch.tensor([0])
    assert float(uniform(top, top)) == 1 - 2.0**-53
    assert float(uniform(zero, zero)) == 0.0
    assert float(uniform(zero, top)) < 2.0**-26 < float(uniform(top, zero))


def test_a_million_uniforms_are_uniform() -> None:
    u = CounterNoise(3, torch.arange(1000), 1000, 1)("token")
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    n = u.numel()
    assert abs(u.mean() - 0.5) < 5 / math.sqrt(12 * n)
    assert abs(u.var() - 1 / 12) < 5 / math.sqrt(180 * n)
    counts = torch.histc(u, 256, 0, 1)
    assert abs(((counts - n / 256) ** 2 / (n / 256)).sum() - 255) < 5 * math.sqrt(2 * 255)
    others = {
        "site": u.roll(1, 1),
        "sample": u.roll(1, 0),
        "step": CounterNoise(3, torch.arange(1000), 1000, 2)("token"),
        "purpose": CounterNoise(3, torch.arange(1000), 1000, 1)("route"),
        "window": CounterNoise(3, torch.arange(1000), 1000, 1, 1)("token"),
        "seed": CounterNoise(4, torch.arange(1000), 1000, 1)("token"),
        "high half of the seed": CounterNoise(3 + (1 << 32), torch.arange(1000), 1000, 1)("token"),
    }
    for name, other in others.items():
        correlation = 12 * ((u - 0.5) * (other - 0.5)).mean()
        assert abs(correlation) < 5 / math.sqrt(n), name
    low_bits = (u * (1 << 53)).long() & 1023
    assert abs(low_bits.double().mean() - 511.5) < 5 * 1024 / math.sqrt(12 * n)


def test_different_counters_give_different_numbers() -> None:
    """Over seeds (both halves), samples, steps, sites, purposes and windows."""
    numbers = []
    for seed, step, window in itertools.product((0, 1, 1 << 32, (1 << 32) + 1, (1 << 64) - 1), (0, 1, 2, LOW - 15), (0, 1, 2)):
        noise = CounterNoise(seed, torch.tensor([0, 1, 2, 17, LOW]), 4, step, window)
        numbers += [noise(purpose).flatten() for purpose in (*PURPOSES, 0, 1)]
        numbers += [noise.once(purpose) for purpose in (*PURPOSES, 0, 1)]
    together = torch.cat(numbers)
    assert len(together.unique()) == len(together)
