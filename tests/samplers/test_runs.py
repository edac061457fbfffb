"""What a run of a sampler promises: its noise, its draws, the same bits however it is cut up, and errors at the door."""

import functools
import io
import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import m2s
from m2s.heads import NextToken, Shifted
from m2s.ops.counter_noise import PURPOSES
from m2s.ops.philox.naive import LOW, philox, uniform
from m2s.samplers import (
    GRIDS,
    SAMPLERS,
    Bayes,
    CounterNoise,
    FirstHitting,
    LogitsProcessor,
    Prediction,
    PredictorCorrector,
    SelfCorrecting,
    Trajectory,
    draw_categorical,
)
from m2s.samplers import prediction as belief_module

pytestmark = pytest.mark.usefixtures("without_shape_hook")

K, L, STEPS, CORRECTIONS = 5, 6, 2, 3
FIRST, COUNT = 14, 4  # samples 14..17: they lie in two micro-batches of 16
MASKED = ("ancestral", "first_hitting", "confidence", "remasking")
LEVELS = ("ordinal_tau_leaping",)  # a mask is none
OWN_TIMES = ("first_hitting", "self_correcting")

PROCESSES: dict[str, m2s.Process] = {
    "uniform": m2s.Uniform(K, m2s.Linear()),
    "absorbing": m2s.Absorbing(K, m2s.Linear()),
    "hybrid": m2s.Hybrid(K, p_uniform=0.3),
    "gaussian": m2s.RateMatrix.gaussian(K, m2s.Exponential(4.0), 2.0, 1.5),
    "tabulated-absorbing": m2s.RateMatrix.absorbing(K, m2s.LogLinear(1e-3)),
    "chain": m2s.Chain.uniform(K, torch.full((10,), 0.3)),
    "absorbing-chain": m2s.Chain.absorbing(K, torch.full((10,), 0.4)),
}
RANK_ONE, CHAINS = ("uniform", "absorbing", "hybrid"), ("chain", "absorbing-chain")
HEADS: dict[str, Callable[[m2s.Process], m2s.Head]] = {
    "posterior": m2s.Posterior,
    "offset": lambda process: m2s.Posterior(process, offset="exact"),
    "score": m2s.LogScore,
    "rate": m2s.FactorizedRate,
    "projected": lambda process: m2s.Projected(m2s.LogScore(process)),
}
FREE = ("score", "rate")


def serves(sampler: str, process: str, head: str) -> bool:
    """Who can serve whom, said apart from the library."""
    if process in CHAINS:
        return sampler in ("bayes", "predictor_corrector") and head in ("posterior", "offset")
    if sampler in MASKED:
        return process == "absorbing" and head not in FREE
    if sampler in LEVELS:
        return process in ("uniform", "gaussian")
    if sampler in ("adaptive", "self_correcting"):
        return process in RANK_ONE and head not in FREE and (sampler, process) != ("self_correcting", "absorbing")
    if sampler == "bayes":
        return head not in FREE
    if sampler == "analytic":
        return process in RANK_ONE
    return True


ALL = list(itertools.product(SAMPLERS, PROCESSES, HEADS))
SERVED = [case for case in ALL if serves(*case)]
WITH_MASK = [(name, "absorbing", "posterior") for name in SAMPLERS if serves(name, "absorbing", "posterior")]
EVERY_SAMPLER = WITH_MASK + [(name, "uniform", "posterior") for name in SAMPLERS if name not in MASKED]
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=lambda dtype: str(dtype)[6:])


def cases(chosen: list[tuple[str, str, str]]) -> Any:
    return pytest.mark.parametrize(("sampler", "process", "head"), chosen, ids=["-".join(case) for case in chosen])


class Rounding(torch.nn.Module):
    """A random network that shows every bit of its matrix products: it adds the difference of one product and the same one
    summed in another order, times a million. With `lazy` that product is the last layer, and is left to `m2s.Unprojected`."""

    def __init__(self, states: int, length: int = L, seed: int = 0, lazy: bool = False) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*size, generator=draw) / size[0] ** 0.5)

        width = 96
        self.states, self.lazy = states, lazy
        self.embed, self.label = torch.nn.Parameter(4 * normal(states, 16)), normal(10, 16)
        self.first, self.mean = normal(length * 16 + 18, length * width), normal(width, states)
        self.last = normal(width, states)
        self.order = torch.randperm(width, generator=draw)

    def forward(self, x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
        label = torch.zeros(len(x_t), 16) if condition is None else self.label[condition]
        features = torch.cat([self.embed[x_t].flatten(1), t[:, None], torch.cos(3 * t)[:, None], label], -1)
        hidden = torch.tanh(features @ self.first).unflatten(-1, (x_t.shape[1], -1))
        if self.lazy:
            both = 3e6 * torch.cat([hidden, -hidden[..., self.order]], -1)
            return m2s.Unprojected(both, torch.cat([self.last, self.last[self.order]]).T.contiguous())
        errors = hidden @ self.last - hidden[..., self.order] @ self.last[self.order]
        return 2 * hidden @ self.mean + 3e6 * errors


class Transformer(torch.nn.Module):
    """One block of attention that is told the time, small enough to be trained in a test."""

    def __init__(self, states: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(states, width)
        self.place = torch.nn.Parameter(0.1 * torch.randn(length, width))
        self.time = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.SiLU(), torch.nn.Linear(width, 4 * width))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width))
        self.norm, self.last = torch.nn.LayerNorm(width, elementwise_affine=False), torch.nn.Linear(width, states)

    def forward(self, x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        h = self.embed(x_t) + self.place[: x_t.shape[1]]
        times = torch.stack([t, torch.log(t)], -1)
        shift, scale, shift_mlp, scale_mlp = self.time(times).unsqueeze(1).chunk(4, -1)
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(h) * (1 + scale) + shift).chunk(3, -1)
        )
        h = h + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return self.last(h + self.mlp(self.norm(h) * (1 + scale_mlp) + shift_mlp))


@functools.cache
def trained(process: str, head: str, steps: int = 20) -> torch.nn.Module:
    """A few steps on runs such as 1 2 3 4 0 1."""
    torch.manual_seed(1)
    chosen = build(process, head)
    model = Transformer(chosen.process.states, L)
    objective = m2s.Objective(model, chosen)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(steps):
        x_0 = (torch.randint(K, (32, 1)) + torch.arange(L)) % K
        optimiser.zero_grad()
        objective(x_0, m2s.stratified_times(32, 0.02, 0.98).float()).mean().backward()
        optimiser.step()
    return model.eval()


class Refused(AssertionError):
    """The network was called."""


def never(x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
    raise Refused("the network was called before the error")


def build(process: str, head: str) -> m2s.Head:
    return HEADS[head](PROCESSES[process])


def run(model: Any, head: m2s.Head, count: int = COUNT, start: int = FIRST, length: int = L, **options: Any) -> Any:
    if options.get("sampler") == "self_correcting":
        options["sampler"] = SelfCorrecting(corrections=CORRECTIONS)  # not the hundred and more that are its own
    return m2s.sample(model, head, (count, length), **{"steps": STEPS, "start": start, "seed": 7, **options})


def pieces(head: m2s.Head, model: Any, **options: Any) -> dict[str, Tensor]:
    """The same samples, drawn in every way we can think of."""

    def alone(sample: int) -> Tensor:
        return run(model, head, 1, sample, **options)

    return {
        "one by one": run(model, head, batch_size=1, **options),
        "by threes": run(model, head, batch_size=3, **options),
        "by sixteen": run(model, head, batch_size=16, **options),
        "from the middle": torch.cat([run(model, head, 1, **options), run(model, head, COUNT - 1, FIRST + 1, **options)]),
        "in reverse": torch.cat([alone(i) for i in reversed(range(FIRST, FIRST + COUNT))]).flip(0),
    }


# 1. Noise

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
    """Philox4x32-10 as its paper states it, in Python's own integers."""
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
def test_every_number_is_the_counter_it_stands_for(seed: int, sample: int, step: int, purpose: str, window: int) -> None:
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


def test_a_million_uniforms_look_uniform() -> None:
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


def test_no_two_counters_share_a_number() -> None:
    """Over seeds (both halves), samples, steps, sites, purposes and windows together."""
    numbers = []
    for seed, step, window in itertools.product((0, 1, 1 << 32, (1 << 32) + 1, (1 << 64) - 1), (0, 1, 2, LOW - 15), (0, 1, 2)):
        noise = CounterNoise(seed, torch.tensor([0, 1, 2, 17, LOW]), 4, step, window)
        numbers += [noise(purpose).flatten() for purpose in (*PURPOSES, 0, 1)]
        numbers += [noise.once(purpose) for purpose in (*PURPOSES, 0, 1)]
    together = torch.cat(numbers)
    assert len(together.unique()) == len(together)


# 2. Draws

ENDS = (0.0, 2.0**-53, 0.5, 1 - 2.0**-53)


def exact_sums(weights: Tensor) -> list[int]:
    """Running sums as integers, in units of 2^-1100: no rounding at all."""
    units = [
        int(numerator) * ((1 << 1100) // int(denominator))
        for numerator, denominator in map(float.as_integer_ratio, weights.tolist())
    ]
    return list(itertools.accumulate(units))


def in_units(u: float, total: int) -> int:
    numerator, denominator = float(u).as_integer_ratio()
    return numerator * total // denominator


def tail(dtype: torch.dtype) -> Tensor:
    """50,000 tokens of probability 1e-8 and three large ones, among tokens of weight zero; three blocks hold zeros only."""
    weights = torch.zeros(50_257, dtype=torch.float64)
    order = torch.randperm(50_257, generator=torch.Generator().manual_seed(0))
    order = order[(order // 256 != 3) & (order // 256 != 100) & (order // 256 != 195)]
    empty = 50_257 - len(order)
    assert empty > 500
    weights[order[: 50_000 - empty]] = 1e-8
    weights[torch.tensor([256 * 7, 30_001, 50_256])] = torch.tensor([0.6, 0.2995, 0.1], dtype=torch.float64)
    return weights.to(dtype)


@BOTH
def test_a_long_tail_is_drawn_at_its_rate_and_evenly(dtype: torch.dtype) -> None:
    """Each token is found between its exact boundaries, to 1e-12, in the tail as well as at the large ones."""
    weights = tail(dtype)
    sums = exact_sums(weights)
    positive = weights.nonzero().squeeze(-1).tolist()
    following = dict(itertools.pairwise(positive))
    edges = [i for i in positive if i % 256 in (0, 255) or following.get(i, i) - i > 1]
    some = set(np.random.default_rng(0).choice(positive, 60).tolist())
    large = [i for big in (256 * 7, 30_001) for i in positive[max(0, positive.index(big) - 1) : positive.index(big) + 2]]
    chosen = sorted({*edges[::8], *some, *large, *positive[:2], *positive[-3:]} - {positive[-1]})
    boundaries = torch.tensor([sums[i] / sums[-1] for i in chosen], dtype=torch.float64)
    for start in range(0, len(chosen), 64):
        part, edge = chosen[start : start + 64], boundaries[start : start + 64]
        rows = weights.expand(len(part), -1)
        assert draw_categorical(rows, edge - 1e-12).tolist() == part
        assert draw_categorical(rows, edge + 1e-12).tolist() == [following[i] for i in part]


@BOTH
def test_a_long_tail_has_its_mass(dtype: torch.dtype) -> None:
    """The exact share of u that leads to the tail, over a sweep of u; float32 running sums would give none of it."""
    weights = tail(dtype)
    u = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    drawn = torch.cat([draw_categorical(weights.expand(64, -1), part) for part in u.split(64)])
    share = float((weights[drawn] < 1e-6).double().mean())
    assert abs(share - float(weights[weights < 1e-6].double().sum() / weights.double().sum())) < 4 / 4096


@BOTH
@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 511, 513, 50_257])
def test_a_weight_of_zero_is_never_drawn(size: int, dtype: torch.dtype) -> None:
    """Zeros at the start, at the end, on both sides, every other one, and all blocks but one."""
    u = torch.tensor([*ENDS, 0.25, 0.999999], dtype=torch.float64)
    place = torch.arange(size)
    patterns = {
        "all there": place >= 0,
        "zeros first": place >= size // 2,
        "zeros last": place <= size // 2,
        "last only": place == size - 1,
        "first only": place == 0,
        "every other": place % 2 == 0,
        "one block": place // 256 == (size - 1) // 256 // 2,
        "middle only": place == size // 2,
    }
    for name, pattern in patterns.items():
        weights = torch.where(pattern, 0.1 + torch.rand(size, dtype=dtype), 0)
        drawn = draw_categorical(weights.expand(len(u), -1), u)
        assert pattern[drawn].all(), name
        assert int(drawn[0]) == int(pattern.nonzero()[0]), name
        assert int(drawn[3]) == int(pattern.nonzero()[-1]), name


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 255, 256, 257, 600]),
    st.integers(0, 1 << 20),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([1.0, 1e-30, 1e30]),
    st.sampled_from([1.0, 8.0, 30.0]),
    st.booleans(),
)
def test_a_draw_lies_between_its_exact_boundaries(
    size: int, seed: int, u: float, scale: float, spread: float, narrow: bool
) -> None:
    """Weights over dozens of orders of magnitude, a third of them zero, in any scale."""
    generator = torch.Generator().manual_seed(seed)
    weights = scale * torch.exp(spread * (torch.rand(size, generator=generator, dtype=torch.float64) - 0.5))
    weights = weights * (torch.rand(size, generator=generator) > 1 / 3)
    if not weights.any():
        weights[seed % size] = scale
    weights = weights.float() if narrow else weights
    sums = exact_sums(weights)
    for value in (u, *ENDS):
        index = int(draw_categorical(weights, torch.tensor(value, dtype=torch.float64)))
        assert index < size and weights[index] > 0
        target, slack = in_units(value, sums[-1]), sums[-1] >> 45
        assert (sums[index - 1] if index else 0) - slack <= target <= sums[index] + slack


def test_a_draw_from_nothing_is_still_an_index() -> None:
    """No weight at all (rates out of a state that nothing leads to): the answer does not matter, but it must be a token."""
    assert (draw_categorical(torch.zeros(3, K), torch.tensor([0.0, 0.5, 0.999])) < K).all()


def softmax64(logits: Tensor) -> Tensor:
    return torch.softmax(logits.double(), -1)


def uniform_belief(logits: Tensor, x_t: Tensor, logits_processor: LogitsProcessor = LogitsProcessor()) -> Prediction:  # noqa: B008
    process = m2s.Uniform(logits.shape[-1], m2s.Linear())
    return Prediction(m2s.Posterior(process), logits, x_t, torch.full(x_t.shape[:1], 0.4), logits_processor)


@BOTH
@pytest.mark.parametrize("size", [2, 3, 256, 257, 1000, 50_257])
@pytest.mark.parametrize("other", [False, True], ids=["any", "other"])
def test_a_belief_draws_from_its_softmax(size: int, dtype: torch.dtype, other: bool) -> None:
    """Token, share, own and off against softmax in float64, at every eighth of the unit interval and at its ends."""
    exact = 1e-12 if dtype == torch.float64 else 1e-6
    u = torch.tensor([[*ENDS, *(torch.arange(1, 8) / 8).tolist(), 0.9999]], dtype=torch.float64)
    logits = 2 * torch.randn(1, u.shape[1], size, dtype=dtype)
    x_t = torch.randint(size, u.shape)
    drawn = uniform_belief(logits, x_t).draw(u, other=other)
    mu = softmax64(logits)
    own = mu.gather(-1, x_t.unsqueeze(-1)).squeeze(-1)
    rest = mu.scatter(-1, x_t.unsqueeze(-1), 0.0)
    distribution = rest / rest.sum(-1, keepdim=True) if other else mu
    torch.testing.assert_close(drawn.own, own, rtol=exact, atol=0)
    torch.testing.assert_close(drawn.off, rest.sum(-1), rtol=exact, atol=0)
    token = drawn.token.unsqueeze(-1)
    torch.testing.assert_close(drawn.share, distribution.gather(-1, token).squeeze(-1), rtol=4 * exact, atol=0)
    above = distribution.cumsum(-1).gather(-1, token).squeeze(-1)
    assert ((above - drawn.share - exact <= u) & (u <= above + exact)).all()
    if other:
        assert (drawn.token != x_t).all()


@BOTH
@pytest.mark.parametrize("lead", [60.0, 200.0, 1000.0])
def test_an_own_token_that_dominates_hides_nothing(lead: float, dtype: torch.dtype) -> None:
    """`off` keeps its relative precision, and the other tokens are still drawn by their own law."""
    size = 300
    u = torch.tensor([list(ENDS)], dtype=torch.float64)
    logits = torch.randn(1, len(ENDS), size, dtype=dtype)
    x_t = torch.tensor([[0, 17, 255, 299]])
    logits.scatter_(-1, x_t.unsqueeze(-1), lead)
    prediction = uniform_belief(logits, x_t)
    drawn, other = prediction.draw(u), prediction.draw(u, other=True)
    rest = logits.double().scatter(-1, x_t.unsqueeze(-1), -torch.inf)
    off = torch.sigmoid(torch.logsumexp(rest, -1) - lead)
    assert torch.equal(drawn.token, x_t) and (drawn.share == 1).all() and (drawn.own == 1).all()
    torch.testing.assert_close(drawn.off, off, rtol=1e-12 if dtype == torch.float64 else 1e-6 * (1 + lead / 10), atol=0)
    distribution = torch.softmax(rest, -1)
    above = distribution.cumsum(-1).gather(-1, other.token.unsqueeze(-1)).squeeze(-1)
    assert (other.token != x_t).all() and (other.off == drawn.off).all()
    assert ((above - other.share - 1e-6 <= u) & (u <= above + 1e-6)).all()


@pytest.mark.parametrize("level", [0.0, 500.0, -500.0, -700.0, -900.0, -2000.0])
def test_a_lone_token_is_drawn_at_any_height_of_its_logit(level: float) -> None:
    """Logits have no zero: with every other at -inf, one of -900 is as certain as one of 0, be it the current token or not."""
    u = torch.tensor([list(ENDS)], dtype=torch.float64)
    for place, own, dtype in itertools.product(range(K), range(K), (torch.float32, torch.float64)):
        logits = torch.full((1, len(ENDS), K), -torch.inf, dtype=dtype)
        logits[..., place] = level
        drawn = uniform_belief(logits, torch.full(u.shape, own)).draw(u)
        assert (drawn.token == place).all(), f"token {place} under the current token {own}"
        assert (drawn.share == 1).all()
        assert (drawn.own == float(own == place)).all() and (drawn.off == float(own != place)).all()


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.005, 1e-4])
def test_the_likeliest_token_at_any_temperature(temperature: float) -> None:
    """top_k = 1 is the argmax, whichever token is current; log-probabilities are logits too."""
    logits = torch.log_softmax(3 * torch.randn(1, 40, K), -1) - 3
    best = logits.argmax(-1)
    for own in (best, (best + 1) % K):
        drawn = uniform_belief(logits, own, LogitsProcessor(temperature=temperature, top_k=1)).draw(
            torch.rand(1, 40, dtype=torch.float64)
        )
        assert torch.equal(drawn.token, best)


@pytest.mark.parametrize("process", ["absorbing", "hybrid"])
def test_masks_are_never_drawn_and_revealed_tokens_are_known(process: str) -> None:
    chosen = PROCESSES[process]
    u = torch.tensor([list(ENDS) * 2], dtype=torch.float64)
    x_t = torch.tensor([[K, K, K, K, 0, 1, 3, K - 1]])
    logits = torch.randn(1, 8, K + 1)
    logits[..., K] = 50.0  # what the network says of the mask has no meaning
    drawn = Prediction(m2s.Posterior(chosen), logits, x_t, torch.tensor([0.4])).draw(u)
    mu = softmax64(logits[..., :K])
    assert (drawn.token < K).all()
    assert (drawn.own[0, :4] == 0).all() and (drawn.off[0, :4] == 1).all()
    torch.testing.assert_close(drawn.share[0, :4], mu[0, torch.arange(4), drawn.token[0, :4]], rtol=1e-6, atol=0)
    if process == "absorbing":
        assert torch.equal(drawn.token[0, 4:], x_t[0, 4:])
        assert (drawn.own[0, 4:] == 1).all() and (drawn.off[0, 4:] == 0).all() and (drawn.share[0, 4:] == 1).all()
    else:
        torch.testing.assert_close(drawn.own[0, 4:], mu[0, torch.arange(4, 8), x_t[0, 4:]], rtol=1e-6, atol=0)


def test_masked_sites_have_no_own_token_to_leave_out() -> None:
    """With `other` a masked site is drawn from its whole posterior, the last clean token too."""
    u = ((torch.arange(400, dtype=torch.float64) + 0.5) / 400).unsqueeze(0)
    x_t, logits = torch.full((1, 400), K), torch.zeros(1, 400, K + 1)
    drawn = Prediction(m2s.Posterior(PROCESSES["absorbing"]), logits, x_t, torch.tensor([0.4])).draw(u, other=True)
    assert drawn.token.flatten().bincount(minlength=K).tolist() == [80] * 5


@pytest.mark.parametrize("size", [300, 20_000])
def test_hidden_states_are_multiplied_out_as_their_rows_are(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unprojected outputs equal projected ones, bit for bit, where the product is taken over the same rows."""
    monkeypatch.setattr(belief_module, "CPU_CHUNK", 16 * size)
    hidden, weight, bias = torch.randn(2, 24, 32), torch.randn(size + 5, 32), torch.randn(size + 5)
    x_t, u = torch.randint(size, (2, 24)), torch.rand(2, 24, dtype=torch.float64)
    by_rows = torch.cat(
        [torch.nn.functional.linear(part, weight[:size], bias[:size]) for part in hidden.reshape(-1, 32).split(16)]
    )
    process = m2s.Uniform(size, m2s.Linear())
    for head in (m2s.Posterior(process), m2s.Posterior(process, offset="exact")):
        lazy, eager = (
            Prediction(head, output, x_t, torch.tensor([0.3, 0.8])).draw(u)
            for output in (m2s.Unprojected(hidden, weight, bias), by_rows.unflatten(0, (2, 24)))
        )
        assert all(torch.equal(a, b) for a, b in zip(lazy, eager, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 600), st.integers(0, 1 << 20), st.floats(0.1, 30), st.booleans(), st.booleans())
def test_a_belief_and_a_plain_draw_agree(size: int, seed: int, spread: float, other: bool, cut: bool) -> None:
    """`Belief.draw` holds the current token apart; the law is the same as `draw` from the posterior as a vector."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(1, 16, size, generator=generator, dtype=torch.float64)
    if cut:
        logits = logits.where((torch.rand(1, 16, size, generator=generator) > 0.5), -torch.inf)
        logits[..., seed % size] = 0.0
        logits[..., (seed + 1) % size] = -1.0
    x_t = torch.randint(size, (1, 16), generator=generator)
    u = torch.rand(1, 16, generator=generator, dtype=torch.float64)
    distribution = softmax64(logits)
    if other:
        distribution = distribution.scatter(-1, x_t.unsqueeze(-1), 0.0)
    drawn = uniform_belief(logits, x_t).draw(u, other=other)
    possible = distribution.sum(-1) > 1e-290
    distribution = distribution / distribution.sum(-1, keepdim=True)
    above = distribution.cumsum(-1).gather(-1, drawn.token.unsqueeze(-1)).squeeze(-1)
    inside = (above - drawn.share - 1e-9 <= u) & (u <= above + 1e-9) & (drawn.share > 0)
    assert inside[possible].all()


# 3. The same bits, however a run is cut up


@cases(ALL)
def test_who_serves_whom(sampler: str, process: str, head: str) -> None:
    """A sampler that cannot serve a head says so before the network is called; all others call it."""
    if serves(sampler, process, head):
        with pytest.raises(Refused):
            run(never, build(process, head), sampler=sampler)
        return
    with pytest.raises(TypeError, match=r"sampler|head|chain|Projected") as caught:
        run(never, build(process, head), sampler=sampler)
    assert re.search("use |it needs", str(caught.value)), caught.value
    for advice in re.findall(r"use (?:sampler=)?('\w+'(?:(?:, | or )'\w+')*)", str(caught.value)):
        for name in re.findall(r"\w+(?=')", advice):
            assert serves(name, process, head), f"another refusal: {caught.value}"


def test_the_network_of_these_tests_shows_its_batch() -> None:
    """Called with fewer rows it answers otherwise: if `m2s.sample` let the batch through, tokens would change."""
    model, x_t, t = Rounding(K), torch.randint(K, (16, L)), torch.full((16,), 0.3)
    with torch.no_grad():
        whole = model(x_t, t)
        assert (model(x_t[:1], t[:1]) - whole[:1]).abs().max() > 0.05
        assert torch.equal(model(x_t, t), whole)
        x_t[1:] = 0
        assert torch.equal(model(x_t, t)[0], whole[0])


@cases(SERVED)
def test_samples_depend_neither_on_the_batch_nor_on_padding(sampler: str, process: str, head: str) -> None:
    """Alone, with others, or with more columns than states, whatever these hold: the same tokens, all in the vocabulary."""
    chosen = build(process, head)
    model = Rounding(chosen.process.states)

    def padded(x_t: Tensor, t: Tensor) -> Tensor:
        return torch.cat([model(x_t, t), torch.tensor([60.0, torch.inf, -3.0]).expand(*x_t.shape, 3)], -1)

    whole = run(model, chosen, sampler=sampler)
    assert whole.dtype == torch.int64 and whole.shape == (COUNT, L)
    assert (whole >= 0).all() and (whole < K).all()
    assert torch.equal(run(model, chosen, 1, FIRST + 1, sampler=sampler), whole[1:2])
    assert torch.equal(run(padded, chosen, 2, FIRST + 2, sampler=sampler), whole[2:])


@cases(EVERY_SAMPLER + [case for case in SERVED if case[1] in ("uniform", "absorbing") and case[2] == "score"])
def test_every_way_to_cut_up_a_run(sampler: str, process: str, head: str) -> None:
    chosen = build(process, head)
    model = Rounding(chosen.process.states)
    whole = run(model, chosen, sampler=sampler)
    for how, tokens in pieces(chosen, model, sampler=sampler).items():
        assert torch.equal(tokens, whole), how


@cases(EVERY_SAMPLER)
def test_hidden_states_do_not_show_the_batch(sampler: str, process: str, head: str) -> None:
    """The last layer is multiplied out by the sampler: over the same rows, whatever the batch."""
    chosen = build(process, head)
    model = Rounding(chosen.process.states, lazy=True)
    whole = run(model, chosen, 16, 0, sampler=sampler, steps=4)
    for size in (1, 5):
        assert torch.equal(run(model, chosen, 10, 0, sampler=sampler, steps=4, batch_size=size), whole[:10]), size


@pytest.mark.parametrize("process", RANK_ONE)
@BOTH
def test_a_projection_does_not_show_the_batch(process: str, dtype: torch.dtype) -> None:
    """The nearest posterior of a score is the same, bit for bit, whatever other scores are worked on beside it."""
    chosen = PROCESSES[process]
    score = (1.5 * torch.randn(150, chosen.states, dtype=dtype)).exp()
    x_t, t = torch.randint(chosen.states, (150,)), torch.full((150,), 0.6, dtype=torch.float64)
    together = m2s.project(score, x_t, t, chosen)
    alone = torch.cat([m2s.project(score[i : i + 1], x_t[i : i + 1], t[i : i + 1], chosen) for i in range(150)])
    torch.testing.assert_close(alone.sum(-1), torch.ones(150, dtype=dtype), rtol=0, atol=1e-5)
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)
    assert torch.equal(alone, together)


def test_a_projection_is_a_law() -> None:
    """A score whose threshold passes from one branch to the other while its support stays: K = 7, t = 0.6, k = 6."""
    score = torch.tensor(
        [[1.5982136665, 0.0360112501, 0.0584593194, 2.6188091171, 5.7119593778, 0.1611257464, 1.0]], dtype=torch.float64
    )
    mu = m2s.project(score, torch.tensor([6]), torch.tensor([0.6], dtype=torch.float64), m2s.Uniform(7, m2s.Linear()))
    expected = torch.tensor([[0, 0, 0, 0.1685910435, 0.8314089565, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(mu.sum(-1), torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(mu, expected, rtol=0, atol=1e-9)


@cases([*EVERY_SAMPLER, ("euler", "uniform", "score"), ("analytic", "absorbing", "score"), ("bayes", "uniform", "projected")])
def test_samples_of_a_trained_transformer_do_not_depend_on_the_batch(sampler: str, process: str, head: str) -> None:
    chosen = build(process, head)
    model = trained(process, "score" if head == "projected" else head)
    whole = run(model, chosen, 12, 0, sampler=sampler, steps=4)
    assert torch.equal(run(model, chosen, 5, 5, sampler=sampler, steps=4), whole[5:10])
    assert torch.equal(run(model, chosen, 12, 0, sampler=sampler, steps=4, batch_size=5), whole)
    assert torch.equal(run(model, chosen, 1, 11, sampler=sampler, steps=4), whole[11:])


def test_a_transformer_learns_and_is_sampled() -> None:
    """The runs 0 1 2 3 4 0 are what comes out, so that the tests above look at more than noise."""
    head = build("absorbing", "posterior")
    x = run(trained("absorbing", "posterior", 250), head, 64, 0, sampler="first_hitting", steps=L)
    assert float(((x[:, 1:] - x[:, :-1]) % K == 1).double().mean()) > 0.5  # 0.2 by chance


SPLIT = [("bayes", "uniform", "posterior"), ("euler", "hybrid", "score"), ("predictor_corrector", "absorbing", "posterior")]


def test_two_processes_share_out_one_run() -> None:
    """A second process draws samples 8 to 14; they are those of the run that has them all."""
    program = (
        "import sys, torch; torch.set_num_threads(1); sys.path[:0] = sys.argv[1:3]\n"
        "import numpy as np, test_runs as tests\n"
        "parts = [tests.split_run(*case, 7, 8).numpy() for case in tests.SPLIT]\n"
        "np.save(sys.stdout.buffer, np.stack(parts))"
    )
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", program, str(here), str(here.parent)], capture_output=True, check=True)
    theirs = torch.from_numpy(np.load(io.BytesIO(done.stdout)))
    for case, part in zip(SPLIT, theirs, strict=True):
        whole = split_run(*case, 15, 0)
        assert torch.equal(torch.cat([split_run(*case, 8, 0), part]), whole), case


def split_run(sampler: str, process: str, head: str, count: int, start: int) -> Tensor:
    chosen = build(process, head)
    return run(Rounding(chosen.process.states), chosen, count, start, sampler=sampler)


@cases(EVERY_SAMPLER)
def test_a_killed_run_resumes(sampler: str, process: str, head: str) -> None:
    """Killed in the second batch, taken up where the first ended."""
    chosen = build(process, head)
    model, done = Rounding(chosen.process.states), Trajectory()

    class Killed(Exception):
        pass

    def callback(step: m2s.samplers.StepEvent) -> None:
        if 4 in step.samples and step.number == 1:
            raise Killed
        done(step)

    whole = run(model, chosen, 10, 0, sampler=sampler)
    with pytest.raises(Killed):
        run(model, chosen, 10, 0, sampler=sampler, batch_size=4, callback=callback)
    last = done.states[-1][:4]
    assert torch.equal(last[last < K], whole[:4][last < K])
    assert torch.equal(run(model, chosen, 6, 4, sampler=sampler, batch_size=4), whole[4:])


@cases(EVERY_SAMPLER)
def test_the_seed_changes_every_sample(sampler: str, process: str, head: str) -> None:
    chosen = build(process, head)
    model = Rounding(chosen.process.states, 24)
    seeds = (0, 1, 2, 1 << 32, (1 << 32) + 1, (1 << 64) - 1)
    results = [run(model, chosen, 4, 0, 24, sampler=sampler, seed=seed) for seed in seeds]
    for one, two in itertools.combinations(results, 2):
        assert (one != two).any(-1).all()
    assert torch.equal(results[0], run(model, chosen, 4, 0, 24, sampler=sampler, seed=0))
    assert len(results[0].unique(dim=0)) == 4


def test_guidance_and_clamps_do_not_show_the_batch() -> None:
    """A condition, a clamp and a sharpened belief belong to their sample."""
    head = build("absorbing", "posterior")
    model, condition = Rounding(K + 1), torch.arange(COUNT)
    clamp = torch.where(torch.rand(COUNT, L) < 0.4, torch.randint(K, (COUNT, L)), -1)
    for sampler in (name for name in SAMPLERS if serves(name, "absorbing", "posterior")):
        options = {"sampler": sampler, "guidance": 2.0, "temperature": 0.7, "top_p": 0.9, "on": "leave_one_out"}
        whole = run(model, head, condition=condition, clamp=clamp, **options)
        parts = [
            run(model, head, 1, FIRST + i, condition=condition[i : i + 1], clamp=clamp[i : i + 1], **options)
            for i in range(COUNT)
        ]
        assert torch.equal(torch.cat(parts), whole), sampler
        assert torch.equal(run(model, head, condition=condition, clamp=clamp, batch_size=3, **options), whole), sampler


@pytest.mark.parametrize("process", PROCESSES)
def test_two_heads_start_from_one_state(process: str) -> None:
    """The start belongs to the process and the noise: heads, samplers and networks do not touch it."""
    starts = []
    for sampler, _, head in [case for case in SERVED if case[1] == process and case[2] in ("posterior", "score")]:
        trajectory = Trajectory()
        run(
            Rounding(PROCESSES[process].states, seed=len(starts)),
            build(process, head),
            sampler=sampler,
            steps=1,
            callback=trajectory,
        )
        starts.append(trajectory.states[0])
    assert len(starts) > 1 and all(torch.equal(start, starts[0]) for start in starts)


@pytest.mark.parametrize("process", RANK_ONE)
@pytest.mark.parametrize("grid", GRIDS)
def test_a_posterior_and_its_own_score_projected_give_one_sample(process: str, grid: str) -> None:
    """Two heads on the same noise: Posterior on log mu, and the projection of the exact score of that mu; float64, Bayes."""
    chosen = PROCESSES[process]
    posterior, model, t_min = m2s.Posterior(chosen), Rounding(chosen.states).double(), 1e-7

    def logits(x_t: Tensor, t: Tensor) -> Tensor:
        return model(x_t, t.double()) / 4

    def log_score(x_t: Tensor, t: Tensor) -> Tensor:
        return posterior.log_score(logits(x_t, t), x_t, t.double())

    torch.set_default_dtype(torch.float64)  # the dtype in which networks are told the time
    try:
        options = {"steps": 12, "grid": grid, "t_min": t_min}
        one = run(logits, posterior, 24, 0, **options)
        two = run(log_score, m2s.Projected(m2s.LogScore(chosen)), 24, 0, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(one, two)


@pytest.mark.parametrize("process", ["gaussian", "chain"])
def test_a_kernel_is_worked_out_for_a_sample_and_not_for_every_site(process: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sites of a sample share a time: K x K matrices for each of them would make grey levels of an image impossible."""
    kind, most = type(PROCESSES[process]), [0]
    kernel, step_kernel = kind.kernel, kind.step_kernel

    def seen(self: Any, t: Tensor) -> Tensor:
        most.append(t.numel())
        return kernel(self, t)

    def step_seen(self: Any, s: Tensor, t: Tensor) -> Tensor:
        most.append(t.numel())
        return step_kernel(self, s, t)

    monkeypatch.setattr(kind, "kernel", seen)
    monkeypatch.setattr(kind, "step_kernel", step_seen)
    run(Rounding(K), build(process, "posterior"))
    assert max(most) <= 16


# 4. Clamps and windows


@cases([case for case in SERVED if case[2] in ("posterior", "score")])
def test_clamped_sites_never_move(sampler: str, process: str, head: str) -> None:
    """At no step, for the network neither; the free sites are filled."""
    chosen = build(process, head)
    generator = torch.Generator().manual_seed(5)
    clamp = torch.randint(K, (COUNT, L), generator=generator)
    clamp[torch.rand(COUNT, L, generator=generator) < 0.5] = -1
    clamp[0], clamp[1] = -1, torch.arange(L) % K  # all free, all clamped
    fixed, seen = clamp >= 0, []

    def callback(step: m2s.samplers.StepEvent) -> None:
        rows = step.samples - FIRST
        for state in (step.x_t, step.x_s):
            assert torch.equal(state[fixed[rows]], clamp[rows][fixed[rows]])
            assert (state >= 0).all() and (state < chosen.process.states).all()
        seen.append(step.number)

    out = run(Rounding(chosen.process.states), chosen, sampler=sampler, clamp=clamp, callback=callback)
    assert seen
    assert torch.equal(out[fixed], clamp[fixed])
    assert (out >= 0).all() and (out < K).all()


@cases(EVERY_SAMPLER)
def test_everything_clamped_comes_back(sampler: str, process: str, head: str) -> None:
    chosen = build(process, head)
    clamp = torch.randint(K, (COUNT, L))
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert torch.equal(run(Rounding(chosen.process.states), chosen, sampler=sampler, clamp=clamp.to(dtype)), clamp)


@cases(EVERY_SAMPLER)
def test_nothing_clamped_is_no_clamp(sampler: str, process: str, head: str) -> None:
    chosen = build(process, head)
    model = Rounding(chosen.process.states)
    free = torch.full((COUNT, L), -1, dtype=torch.int16)
    assert torch.equal(run(model, chosen, sampler=sampler, clamp=free), run(model, chosen, sampler=sampler))


@cases(EVERY_SAMPLER)
def test_a_prompt_is_continued(sampler: str, process: str, head: str) -> None:
    """The prompt stays, the network sees it from the first call on, and the rest starts from the same noise as without it."""
    chosen = build(process, head)
    prompt = torch.full((COUNT, L), -1)
    prompt[:, :2] = torch.tensor([3, 1])
    calls, with_prompt, without = [], Trajectory(), Trajectory()
    inner = Rounding(chosen.process.states)

    def model(x_t: Tensor, t: Tensor) -> Tensor:
        calls.append(x_t.clone())
        return inner(x_t, t)

    out = run(model, chosen, sampler=sampler, clamp=prompt, callback=with_prompt)
    assert all((x[FIRST:, :2] == prompt[0, :2]).all() or (x[:2, :2] == prompt[0, :2]).all() for x in calls)
    assert (out[:, :2] == torch.tensor([3, 1])).all() and (out < K).all()
    run(inner, chosen, sampler=sampler, callback=without)
    assert torch.equal(with_prompt.states[0][:, 2:], without.states[0][:, 2:])


def test_the_network_sees_full_batches_at_times_it_knows() -> None:
    """Always `micro_batch` rows, each sample in the row of its number, times inside [t_min, 1 - t_min]."""
    head = build("hybrid", "posterior")
    rows: list[tuple[int, ...]] = []
    inner = Rounding(K + 1)

    def model(x_t: Tensor, t: Tensor) -> Tensor:
        assert x_t.dtype == torch.int64 and t.dtype == torch.float32 and t.shape == x_t.shape[:1]
        assert (t >= 0.02 - 1e-7).all() and (t <= 0.98 + 1e-7).all()
        rows.append(tuple(x_t.shape))
        return inner(x_t, t)

    for sampler in SAMPLERS:
        if serves(sampler, "hybrid", "posterior"):
            run(model, head, sampler=sampler, batch_size=5, t_min=0.02)
    assert set(rows) == {(16, L)}
    rows.clear()
    run(model, head, micro_batch=4, t_min=0.02)
    assert set(rows) == {(4, L)}


@pytest.mark.parametrize(("length", "window", "overlap"), [(20, 8, None), (17, 8, 3), (12, 4, 0), (10, 8, 7), (5, 8, None)])
@pytest.mark.parametrize("sampler", ["bayes", "predictor_corrector", "first_hitting"])
def test_windows_follow_one_another(sampler: str, length: int, window: int, overlap: int | None) -> None:
    """No network call is longer than the window, and each window begins with the last tokens of the one before."""
    process = m2s.Absorbing(64, m2s.Linear())
    head, inner = m2s.Posterior(process), Rounding(65, window)
    shared = window // 2 if overlap is None else overlap
    states: list[list[Tensor]] = []

    def model(x_t: Tensor, t: Tensor) -> Tensor:
        assert x_t.shape[1] <= window
        padded = torch.nn.functional.pad(x_t, (0, window - x_t.shape[1]))
        return inner(padded, t)[:, : x_t.shape[1]]

    def callback(step: m2s.samplers.StepEvent) -> None:
        if step.number == 0:
            states.append([step.x_t])
        states[-1].append(step.x_s)

    out = run(model, head, 3, 0, length, sampler=sampler, window=window, overlap=overlap, callback=callback)
    assert (out < 64).all() and (out >= 0).all()
    begin = 0
    for number, walk in enumerate(states):
        size = walk[0].shape[1]
        if number:
            assert all(torch.equal(state[:, :shared], out[:, begin : begin + shared]) for state in walk)
            assert (walk[0][:, shared:] == process.mask).all()
        assert torch.equal(walk[-1], out[:, begin : begin + size])
        begin += window - shared
    assert begin - (window - shared) + states[-1][0].shape[1] == length
    assert len(states) == max(1, math.ceil((length - shared) / (window - shared)))
    again = run(model, head, 3, 0, length, sampler=sampler, window=window, overlap=overlap, batch_size=1)
    assert torch.equal(again, out)


def test_windows_have_noise_of_their_own() -> None:
    head, model = m2s.Posterior(m2s.Uniform(997, m2s.Linear())), Rounding(997, 8)
    starts: list[Tensor] = []
    run(model, head, 2, 0, 24, window=8, overlap=0, callback=lambda step: starts.append(step.x_t) if step.number == 0 else None)
    assert len(starts) == 3
    for one, two in itertools.combinations(starts, 2):
        assert float((one == two).double().mean()) < 0.2


def test_clamps_hold_across_windows() -> None:
    head, model = m2s.Posterior(PROCESSES["absorbing"]), Rounding(K + 1, 8)
    clamp = torch.where(torch.rand(3, 20) < 0.3, torch.randint(K, (3, 20)), -1)
    out = run(model, head, 3, 0, 20, window=8, overlap=4, clamp=clamp)
    assert torch.equal(out[clamp >= 0], clamp[clamp >= 0]) and (out >= 0).all() and (out < K).all()


# 5. Callbacks, trajectories, diagnostics


def expected_steps(sampler: str, steps: int) -> int:
    others = {"analytic": steps + 1, "predictor_corrector": 2 * steps - 1, "self_correcting": steps + CORRECTIONS}
    return (others | {"first_hitting": min(steps, L)}).get(sampler, steps)


@cases(EVERY_SAMPLER)
@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_callback_sees_every_step_of_every_sample(sampler: str, process: str, head: str, batch_size: int | None) -> None:
    chosen = build(process, head)
    model, steps = Rounding(chosen.process.states), 4
    seen: dict[int, list[m2s.samplers.StepEvent]] = {}
    rows: dict[int, list[int]] = {}

    def callback(step: m2s.samplers.StepEvent) -> None:
        assert step.x_t.shape == step.x_s.shape == (len(step.samples), L)
        assert step.t.shape == step.s.shape == step.samples.shape
        for row, sample in enumerate(step.samples.tolist()):
            seen.setdefault(sample, []).append(step)
            rows.setdefault(sample, []).append(row)

    trajectory = Trajectory()
    out = run(model, chosen, sampler=sampler, steps=steps, batch_size=batch_size, callback=callback)
    run(model, chosen, sampler=sampler, steps=steps, batch_size=batch_size, callback=trajectory)
    assert sorted(seen) == list(range(FIRST, FIRST + COUNT))
    for sample, walk in seen.items():
        at = rows[sample]
        number = expected_steps(sampler, steps)
        assert [step.number for step in walk] == list(range(number))
        assert all(step.steps == number for step in walk)
        for m, step in enumerate(walk):
            assert torch.equal(step.x_t[at[m]], trajectory.states[m][sample - FIRST])
            assert torch.equal(step.x_s[at[m]], trajectory.states[m + 1][sample - FIRST])
            assert step.t[at[m]] >= step.s[at[m]]
            if m + 1 < number:
                assert torch.equal(step.x_s[at[m]], walk[m + 1].x_t[at[m + 1]])
                assert sampler in OWN_TIMES or step.s[at[m]] == walk[m + 1].t[at[m + 1]]
        if sampler not in OWN_TIMES:
            assert walk[0].t[at[0]] == 1 and walk[-1].s[at[-1]] == 0
    assert trajectory.states.shape == (number + 1, COUNT, L)
    last = trajectory.states[-1]
    assert torch.equal(last[last < K], out[last < K])


@pytest.mark.parametrize("grid", GRIDS)
def test_the_grid_is_the_papers(grid: str) -> None:
    times: list[float] = []
    run(
        Rounding(K),
        build("uniform", "posterior"),
        1,
        0,
        steps=8,
        grid=grid,
        callback=lambda step: times.append(float(step.t[0])),
    )
    formula = {"linear": lambda m: 1 - m / 8, "cosine": lambda m: math.cos(math.pi * m / 16)}[grid]
    assert times == pytest.approx([formula(m) for m in range(8)], abs=1e-15)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("asked", "steps"), [(1, 10), (3, 10), (9, 10), (10, 10), (30, 10), (25, 1000), (100, 101)])
def test_a_chain_is_walked_in_its_own_steps(grid: str, asked: int, steps: int) -> None:
    """As many calls as were asked for and no more than there are steps, each from one n/T to a lower one, near the grid."""
    head, moves = m2s.Posterior(m2s.Chain.uniform(K, torch.full((steps,), 0.3))), []
    run(
        Rounding(K),
        head,
        1,
        0,
        steps=asked,
        grid=grid,
        callback=lambda step: moves.append((float(step.t[0]), float(step.s[0]))),
    )
    taken = [round(t * steps) for t, _ in moves] + [round(moves[-1][1] * steps)]
    assert [t for t, _ in moves] + [moves[-1][1]] == pytest.approx([n / steps for n in taken], abs=1e-15)
    assert [s for _, s in moves[:-1]] == [t for t, _ in moves[1:]]
    assert len(moves) == min(asked, steps) and (taken[0], taken[-1]) == (steps, 0)
    assert all(before > after for before, after in itertools.pairwise(taken))
    formula = {"linear": lambda m: 1 - m / asked, "cosine": lambda m: math.cos(math.pi * m / (2 * asked))}[grid]
    if asked * 8 < steps:
        assert taken == [round(formula(m) * steps) for m in range(asked)] + [0]


def test_first_hitting_takes_as_many_calls_as_there_are_sites() -> None:
    head, calls = build("absorbing", "posterior"), []
    clamp = torch.full((3, L), -1)
    clamp[1, :4], clamp[2] = 2, 1
    trajectory = Trajectory()
    inner = Rounding(K + 1)

    def model(x_t: Tensor, t: Tensor) -> Tensor:
        calls.append(1)
        return inner(x_t, t)

    out = run(model, head, 3, 0, steps=100, sampler="first_hitting", clamp=clamp, callback=trajectory)
    assert len(calls) == L and trajectory.states.shape == (L + 1, 3, L)
    masks = (trajectory.states == K).sum(-1)
    assert masks[:, 0].tolist() == [6, 5, 4, 3, 2, 1, 0]
    assert masks[:, 1].tolist() == [2, 1, 0, 0, 0, 0, 0]
    assert torch.equal(out, trajectory.states[-1])


@pytest.mark.parametrize(
    ("sampler", "length"), [("bayes", 14), ("first_hitting", 14)], ids=["bayes", "a last window of fewer steps"]
)
def test_a_trajectory_of_windows_ends_in_the_result(sampler: str, length: int) -> None:
    """`trajectory.states` is [steps + 1, n, L], for a length beyond the window too."""
    trajectory = Trajectory()
    model = Rounding(K + 1, 8)

    def short(x_t: Tensor, t: Tensor) -> Tensor:
        return model(torch.nn.functional.pad(x_t, (0, 8 - x_t.shape[1])), t)[:, : x_t.shape[1]]

    out = run(short, build("absorbing", "posterior"), 3, 0, length, sampler=sampler, steps=8, window=8, callback=trajectory)
    assert trajectory.states.shape[1:] == (3, length)
    assert torch.equal(trajectory.states[-1], out)


COUNTED = [case for case in SERVED if case[1] not in CHAINS and case[2] not in ("offset", "rate")]


@cases([case for case in COUNTED if case[1] in RANK_ONE or case[2] != "projected"])
def test_diagnostics_count_what_happened(sampler: str, process: str, head: str) -> None:
    """Sites, jumps, classes and masks left, against the trajectory; a clamp and an odd batch change nothing."""
    chosen = build(process, head)
    model, trajectory = Rounding(chosen.process.states), Trajectory()
    clamp = torch.full((COUNT, L), -1)
    clamp[:, 0], clamp[3] = 1, 2
    free = int((clamp < 0).sum())
    options = {"sampler": sampler, "clamp": clamp, "diagnostics": True}
    out, log = run(model, chosen, callback=trajectory, **options)
    states = trajectory.states
    assert len(log.steps) == len(states) - 1
    assert [moment.sites for moment in log.steps] == [free] * len(log.steps)
    assert [moment.jumps for moment in log.steps] == (states[1:] != states[:-1]).sum((1, 2)).tolist()
    assert log.total("jumps") == sum(moment.jumps for moment in log.steps)
    assert log.masks_left == int((states[-1] == chosen.process.mask).sum() if chosen.process.mask is not None else 0)
    assert (out < K).all()
    for moment in log.steps:
        inside = moment.t < 1 or chosen.open_start or SAMPLERS[sampler].open_start
        assert sum(moment.classes) == (free if inside else 0)
    if process not in RANK_ONE or head != "posterior":
        return  # once for each sampler is enough
    again, apart = run(model, chosen, batch_size=3, **options)
    assert torch.equal(again, out)
    for one, two in zip(log.steps, apart.steps, strict=True):
        assert one.t == pytest.approx(two.t) or sampler == "first_hitting"
        assert (one.sites, one.jumps, one.classes, one.exit_above_one, one.several_jumps, one.negative_sites) == (
            two.sites,
            two.jumps,
            two.classes,
            two.exit_above_one,
            two.several_jumps,
            two.negative_sites,
        )
        assert one.negative_mass == pytest.approx(two.negative_mass, abs=1e-9)


@cases([case for case in SERVED if case[0] in ("euler", "analytic") and case[2] not in ("offset", "rate")])
def test_what_a_sampler_notes_is_so(sampler: str, process: str, head: str) -> None:
    """Exit masses above one and negative weights, worked out directly from each step's score."""
    chosen = build(process, head)
    direct: list[dict[str, float]] = []

    def callback(step: m2s.samplers.StepEvent) -> None:
        x_t, t = step.prediction.x_t, step.prediction.t
        score = step.prediction.score()
        assert torch.equal(x_t, step.x_t)
        while len(direct) <= step.number:
            direct.append({"above": 0, "not below": 0, "negative_mass": 0.0})
        here = direct[step.number]
        if sampler == "analytic":
            earlier = torch.minimum(step.s, t)
            weights = m2s.analytic_weights(score.double(), x_t, earlier, t, chosen.process)
            here["negative_mass"] += float(-weights.clamp(max=0).sum())
            return
        if bool((step.s <= 0).all()):
            return  # the last step is a draw, no leap
        rates = m2s.rate_from_score(score.double(), x_t, t, chosen.process)
        exit_mass = (step.t - step.s)[:, None] * rates.sum(-1)
        here["above"] += int((exit_mass > 1 + 1e-5).sum())
        here["not below"] += int((exit_mass > 1 - 1e-5).sum())  # under absorbing the last step's mass is one, to rounding
        if sampler == "euler":
            assert (step.x_s != step.x_t)[exit_mass > 1 + 1e-5].all()

    _, log = run(Rounding(chosen.process.states), chosen, steps=2, sampler=sampler, callback=callback, diagnostics=True)
    for moment, found in zip(log.steps, direct, strict=True):
        if sampler == "euler":
            assert found["above"] <= moment.exit_above_one <= found["not below"]
        if sampler == "analytic":
            assert moment.negative_mass == pytest.approx(found["negative_mass"], rel=1e-4, abs=1e-4)


def test_euler_is_seen_to_leave_too_fast() -> None:
    """The counts above are of something: a free score with large exit rates, and two steps."""
    _, log = run(Rounding(K), build("uniform", "score"), sampler="euler", steps=2, diagnostics=True)
    assert log.total("exit_above_one") > 0
    _, log = run(Rounding(K), build("uniform", "score"), sampler="analytic", steps=2, diagnostics=True)
    assert log.total("negative_mass") > 0 and log.total("negative_sites") > 0
    _, log = run(Rounding(K), build("uniform", "score"), sampler="tau_leaping", steps=2, diagnostics=True)
    assert log.total("several_jumps") > 0


class Stops(m2s.samplers.Ancestral):
    """A sampler whose plan ends before t = 0."""

    name = "stops"

    def plan(self, *asked: Any) -> m2s.samplers.Plan:
        return m2s.samplers.Plan(*(part[:-1] for part in super().plan(*asked)[:2]))


def test_masks_left_are_drawn_and_counted() -> None:
    """A plan that ends early leaves masks; the result has none."""
    head, trajectory = m2s.Posterior(m2s.Absorbing(K, m2s.Geometric(0.5, 8.0))), Trajectory()
    out, log = run(Rounding(K + 1), head, 24, 0, sampler=Stops(), callback=trajectory, diagnostics=True)
    left = trajectory.states[-1] == K
    assert log.masks_left == int(left.sum()) > 0
    assert (out < K).all() and torch.equal(out[~left], trajectory.states[-1][~left])


@pytest.mark.parametrize("sampler", ["euler", "tau_leaping", "remasking"])
def test_no_masks_are_left_where_alpha_0_is_below_one(sampler: str) -> None:
    head, trajectory = m2s.Posterior(m2s.Absorbing(K, m2s.Geometric(0.5, 8.0))), Trajectory()
    out, log = run(Rounding(K + 1), head, 24, 0, sampler=sampler, callback=trajectory, diagnostics=True)
    assert log.masks_left == 0 and (trajectory.states[-2] == K).any()
    assert torch.equal(out, trajectory.states[-1])


@pytest.mark.parametrize("process", CHAINS)
def test_diagnostics_of_a_chain(process: str) -> None:
    """A chain has no rates and so no classes; what can be counted is."""
    model = Rounding(PROCESSES[process].states)
    out, log = run(model, build(process, "posterior"), diagnostics=True)
    assert log.total("sites") == COUNT * L * STEPS
    assert torch.equal(out, run(model, build(process, "posterior")))


@pytest.mark.parametrize(("vocab", "offset"), [(3, "none"), (5, "exact"), (64, "none")])
def test_a_posterior_head_is_realizable_at_every_step(vocab: int, offset: str) -> None:
    """Nothing outside, nothing material, near t = 1 neither; the network's logits are float32."""
    head = m2s.Posterior(m2s.Uniform(vocab, m2s.Linear()), offset=offset)
    table = 3 * torch.randn(vocab, vocab)
    _, log = run(lambda x_t, t: table[x_t], head, 16, 0, 16, steps=96, diagnostics=True)
    assert [moment.t for moment in log.steps if moment.classes[0] or moment.classes[1]] == []


# 6. Bad input

head = m2s.Posterior(PROCESSES["uniform"])
masked = m2s.Posterior(PROCESSES["absorbing"])
free_score = m2s.LogScore(PROCESSES["uniform"])
two = torch.zeros(2, dtype=torch.long)


def call(head: Any = head, shape: Any = (2, 3), model: Any = never, **options: Any) -> Callable[[], object]:
    return lambda: m2s.sample(model, head, shape, **options)


BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no steps": (call(steps=0), ValueError, r"steps is 0.*at least 1"),
    "negative steps": (call(steps=-3), ValueError, r"steps is -3"),
    "fractional steps": (call(steps=2.0), TypeError, r"steps must be an int, not float"),
    "steps is a bool": (call(steps=True), TypeError, r"steps must be an int, not bool"),
    "unknown sampler": (call(sampler="nearest"), ValueError, r"no sampler 'nearest'.*bayes, euler, analytic, tau_leaping"),
    "misspelt sampler": (call(sampler="bayess"), ValueError, r"did you mean 'bayes'\?.*bayes, euler"),
    "misspelt longer sampler": (call(sampler="tau-leaping"), ValueError, r"did you mean 'tau_leaping'\?"),
    "sampler is no name": (call(sampler=None), ValueError, r"no sampler None.*bayes, euler"),
    "sampler is a list": (call(sampler=["bayes"]), (ValueError, TypeError), r"sampler"),
    "sampler is a class": (call(sampler=Bayes), ValueError, r"no sampler <class"),
    "unknown grid": (call(grid="quadratic"), ValueError, r"no grid 'quadratic': choose from linear, cosine"),
    "grid is a list": (call(grid=[1.0, 0.5, 0.0]), (ValueError, TypeError), r"grid"),
    "head is a process": (call(PROCESSES["uniform"]), TypeError, r"head must be a head such as m2s.Posterior"),
    "model is nothing": (call(model=None), TypeError, r"model"),
    "bayes from a free score": (
        call(free_score, sampler="bayes"),
        TypeError,
        r"'bayes' draws from a posterior.*LogScore is a free score.*'analytic', 'euler' or 'tau_leaping', or m2s.Projected",
    ),
    "ancestral from uniform": (call(sampler="ancestral"), TypeError, r"'ancestral' is for masks alone.*Uniform.*m2s.Absorbing"),
    "first hitting from a free score": (
        call(m2s.LogScore(PROCESSES["absorbing"]), sampler="first_hitting"),
        TypeError,
        r"'first_hitting' draws from a posterior.*m2s.Projected\(head\)",
    ),
    "confidence of a hybrid": (call(m2s.Posterior(PROCESSES["hybrid"]), sampler="confidence"), TypeError, r"for masks alone"),
    "remasking of a rate matrix": (
        call(m2s.Posterior(PROCESSES["tabulated-absorbing"]), sampler="remasking"),
        TypeError,
        r"'remasking' is for masks alone.*RateMatrix",
    ),
    "analytic of a rate matrix": (
        call(m2s.Posterior(PROCESSES["gaussian"]), sampler="analytic"),
        TypeError,
        r"'analytic' is for rank-one processes.*use 'euler'",
    ),
    "euler of a chain": (
        call(m2s.Posterior(PROCESSES["chain"]), sampler="euler"),
        TypeError,
        r"'euler' does not draw from a finite chain, Chain\(.*use sampler='bayes'",
    ),
    "confidence of a chain": (
        call(m2s.Posterior(PROCESSES["chain"]), sampler="confidence"),
        TypeError,
        r"'confidence' does not draw from a finite chain, Chain\(.*use sampler='bayes'",
    ),
    "projection over a chain": (
        call(m2s.Projected(m2s.LogScore(PROCESSES["chain"]))),
        (TypeError, ValueError),
        r"chain",
    ),
    "ordinal masks": (
        call(masked, sampler=m2s.samplers.TauLeaping(ordinal=True)),
        TypeError,
        r"a mask has no place in an order",
    ),
    "a corrector after first hitting": (
        call(masked, sampler=PredictorCorrector(FirstHitting())),
        TypeError,
        r"'first_hitting' reveals sites one after another and takes no corrector",
    ),
    "predictor by name": (lambda: PredictorCorrector("bayes"), TypeError, r"predictor must be a sampler such as"),
    "no corrections": (lambda: PredictorCorrector(corrections=0), ValueError, r"corrections is 0"),
    "strength": (lambda: m2s.samplers.Remasking(strength=1.5), ValueError, r"strength is 1\.5"),
    "clamp of another shape": (call(clamp=torch.zeros(3, 2).long()), ValueError, r"clamp has shape \[3, 2\].*\[2, 3\]"),
    "clamp of one row": (call(clamp=torch.zeros(3).long()), ValueError, r"clamp has shape \[3\].*\[2, 3\]"),
    "clamp of floats": (call(clamp=torch.zeros(2, 3)), TypeError, r"clamp must be a torch.Tensor of integers"),
    "clamp of bools": (call(clamp=torch.zeros(2, 3).bool()), TypeError, r"clamp must be a torch.Tensor of integers"),
    "clamp is a list": (call(clamp=[[0, 0, 0], [0, 0, 0]]), TypeError, r"clamp must be a torch.Tensor of integers"),
    "clamp above the vocabulary": (
        call(clamp=torch.tensor([[0, 0, 0], [0, 5, 0]])),
        ValueError,
        r"clamp\[1, 1\] is 5.*0\.\.4, or -1",
    ),
    "clamp below -1": (call(clamp=torch.tensor([[0, 0, -2], [0, 0, 0]])), ValueError, r"clamp\[0, 2\] is -2"),
    "clamp to the mask": (call(masked, clamp=torch.full((2, 3), K)), ValueError, r"clamp\[0, 0\] is 5.*0\.\.4"),
    "narrow clamp above the vocabulary": (
        call(clamp=torch.tensor([[0, 255, 0], [0, 0, 0]], dtype=torch.uint8)),
        ValueError,
        r"clamp\[0, 1\] is 255",
    ),
    "condition of another length": (call(condition=torch.zeros(3)), ValueError, r"condition has 3 rows, but 2 samples"),
    "condition is a list": (call(condition=[1, 2]), (TypeError, ValueError), r"condition"),
    "condition is one number": (call(condition=torch.tensor(1)), (TypeError, ValueError), r"condition"),
    "guidance without a condition": (call(guidance=2.0), ValueError, r"guidance is 2\.0, but there is no condition"),
    "guidance is no number": (call(guidance=math.nan, condition=two), ValueError, r"guidance is nan"),
    "guidance without bound": (call(guidance=math.inf, condition=two), ValueError, r"guidance is inf"),
    "guidance on rates for bayes": (
        call(guidance=2.0, guide="rates", condition=two, sampler="bayes"),
        TypeError,
        r"guidance on rates.*sampler 'bayes' draws from a posterior",
    ),
    "guidance on rates for a corrector after bayes": (
        call(guidance=2.0, guide="rates", condition=two, sampler=m2s.samplers.PredictorCorrector(m2s.samplers.Bayes())),
        TypeError,
        r"guidance on rates",
    ),
    "guide": (call(guide="scores"), ValueError, r"guide is 'scores'.*'posterior', 'rates', 'step'"),
    "on": (call(on="score"), ValueError, r"on is 'score'.*'posterior', 'leave_one_out'"),
    "temperature of zero": (call(temperature=0.0), ValueError, r"temperature is 0\.0.*positive.*top_k=1"),
    "negative temperature": (call(temperature=-1.0), ValueError, r"temperature is -1\.0"),
    "temperature is no number": (call(temperature=math.nan), ValueError, r"temperature is nan"),
    "temperature of a free score": (
        call(free_score, sampler="euler", temperature=0.5),
        TypeError,
        r"temperature, top_k and top_p sharpen a posterior.*m2s.Projected\(head\)",
    ),
    "top_k of zero": (call(top_k=0), ValueError, r"top_k is 0"),
    "top_k is a float": (call(top_k=2.0), TypeError, r"top_k must be an int, not float"),
    "top_p of zero": (call(top_p=0.0), ValueError, r"top_p is 0\.0.*\(0, 1\]"),
    "top_p above one": (call(top_p=1.5), ValueError, r"top_p is 1\.5"),
    "shape of one number": (call(shape=(3,)), ValueError, r"shape is \(3,\).*\(number of samples, length\)"),
    "shape is a number": (call(shape=3), ValueError, r"shape is 3"),
    "shape of three": (call(shape=(1, 2, 3)), ValueError, r"shape is \(1, 2, 3\)"),
    "no samples": (call(shape=(0, 3)), ValueError, r"shape\[0\] is 0"),
    "no length": (call(shape=(2, 0)), ValueError, r"shape\[1\] is 0"),
    "shape of floats": (call(shape=(2.0, 3)), TypeError, r"shape\[0\] must be an int"),
    "negative seed": (call(seed=-1), ValueError, r"seed is -1.*2\^64"),
    "seed too large": (call(seed=1 << 64), ValueError, r"seed is 18446744073709551616"),
    "seed is a bool": (call(seed=True), ValueError, r"seed is True"),
    "seed is a float": (call(seed=0.5), ValueError, r"seed is 0\.5"),
    "negative start": (call(start=-1), ValueError, r"start is -1.*at least 0"),
    "start is a float": (call(start=1.0), TypeError, r"start must be an int"),
    "too many samples": (call(start=(1 << 32) - 1), ValueError, r"start \+ n is 4294967297.*2\^32"),
    "batch of none": (call(batch_size=0), ValueError, r"batch_size is 0"),
    "micro-batch of none": (call(micro_batch=0), ValueError, r"micro_batch is 0"),
    "window of one": (call(window=1), ValueError, r"window is 1.*at least 2"),
    "window is a float": (call(window=2.5), TypeError, r"window must be an int"),
    "overlap of a whole window": (call(window=2, overlap=2), ValueError, r"overlap is 2.*0\.\.1"),
    "negative overlap": (call(window=2, overlap=-1), ValueError, r"overlap is -1"),
    "overlap is a float": (call(window=2, overlap=0.5), (TypeError, ValueError), r"overlap"),
    "overlap without a window": (call(overlap=1), ValueError, r"give window too"),
    "t_min of zero": (call(t_min=0.0), ValueError, r"t_min is 0\.0"),
    "t_min of a half": (call(t_min=0.5), ValueError, r"t_min is 0\.5"),
    "t_min is no number": (call(t_min=math.nan), ValueError, r"t_min is nan"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_is_met_before_the_network_is_called(case: str) -> None:
    wrong, error, pattern = BAD[case]
    with pytest.raises(Exception) as caught:  # noqa: PT011  the type is looked at below, where the message is at hand
        wrong()
    assert isinstance(caught.value, error), repr(caught.value)
    assert re.search(pattern, str(caught.value)), repr(caught.value)


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "too few columns": (lambda x: torch.zeros(*x.shape, K - 1), ValueError, r"output has 4 columns, but the process has 5"),
    "too few sites": (lambda x: torch.zeros(len(x), L - 1, K), ValueError, r"output has shape"),
    "too many sites": (lambda x: torch.zeros(len(x), L + 1, K), ValueError, r"output has shape"),
    "too few samples": (lambda x: torch.zeros(len(x) - 1, L, K), ValueError, r"output has shape"),
    "no sites": (lambda x: torch.zeros(len(x), K), ValueError, r"output has shape"),
    "integers": (lambda x: torch.zeros(*x.shape, K).long(), TypeError, r"output must hold floats"),
    "a tuple": (lambda x: (torch.zeros(*x.shape, K),), TypeError, r"output"),
    "last layer too small": (lambda x: m2s.Unprojected(torch.zeros(*x.shape, 8), torch.zeros(4, 8)), ValueError, r"4 rows"),
    "too many hidden sites": (
        lambda x: m2s.Unprojected(torch.zeros(len(x), L + 1, 8), torch.zeros(K, 8)),
        ValueError,
        r"output has shape|hidden has shape",
    ),
}


@pytest.mark.parametrize("rows", [1 << 20, 16, 1], ids=["in one piece", "in pieces", "site by site"])
@pytest.mark.parametrize("case", OUTPUTS, ids=str)
def test_an_output_that_does_not_fit_is_an_error(case: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a large vocabulary is worked on some rows at a time: rows must not slip to other sites unseen."""
    monkeypatch.setattr(belief_module, "CPU_CHUNK", rows * K)
    output, error, pattern = OUTPUTS[case]
    for sampler in ("bayes", "euler"):
        with pytest.raises(error, match=pattern):
            run(lambda x_t, t: output(x_t), head, sampler=sampler)


@pytest.mark.parametrize("lazy", [False, True], ids=["logits", "hidden states"])
def test_a_network_that_says_nan_is_caught_in_checked_mode(lazy: bool) -> None:
    def model(x_t: Tensor, t: Tensor) -> Any:
        output = torch.zeros(*x_t.shape, K)
        output[3, 1, 2] = torch.nan
        return m2s.Unprojected(output, torch.eye(K)) if lazy else output

    with m2s.checked(), pytest.raises(ValueError, match=r"output\[3, 1, 2\] is NaN"):
        run(model, head)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (m2s.Posterior(m2s.Uniform(5, m2s.Linear())), "bayes"),
        (m2s.LogScore(m2s.Uniform(5, m2s.Linear())), "analytic"),
        (m2s.FactorizedRate(m2s.RateMatrix.gaussian(5, m2s.Linear())), "tau_leaping"),
        (m2s.Projected(m2s.LogScore(m2s.Uniform(5, m2s.Linear()))), "bayes"),
        (NextToken(Shifted(5)), "autoregressive"),
    ],
    ids=str,
)
def test_what_is_not_said_is_chosen_by_the_head(head, name):
    """And the samples are those of that name."""

    def network(x_t, t, condition=None):
        return torch.sin(torch.arange(head.process.states) + x_t.unsqueeze(-1))

    drawn, named = (m2s.sample(network, head, (3, 4), steps=5, **given) for given in ({}, {"sampler": name}))
    assert torch.equal(drawn, named)
    if name == "bayes" and type(head) is m2s.Posterior:
        guided = {"condition": torch.zeros(3), "guidance": 2.0, "guide": "rates", "steps": 5}
        drawn, named = (m2s.sample(network, head, (3, 4), **guided, **given) for given in ({}, {"sampler": "analytic"}))
        assert torch.equal(drawn, named)
