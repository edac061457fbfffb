"""Categorical draws and draws from a prediction, also from long tails and at extreme logits."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import m2s
from m2s.samplers import (
    LogitsProcessor,
    Prediction,
    draw_categorical,
)
from m2s.samplers import prediction as prediction_module
from run_cases import BOTH, PROCESSES, K

pytestmark = pytest.mark.usefixtures("without_shape_hook")


ENDS = (0.0, 2.0**-53, 0.5, 1 - 2.0**-53)


def exact_sums(weights: Tensor) -> list[int]:
    """Cumulative sums as integers, in units of 2^-1100, without rounding."""
    units = [
        int(numerator) * ((1 << 1100) // int(denominator))
        for numerator, denominator in map(float.as_integer_ratio, weights.tolist())
    ]
    return list(itertools.accumulate(units))


def in_units(u: float, total: int) -> int:
    numerator, denominator = float(u).as_integer_ratio()
    return numerator * total // denominator


def tail(dtype: torch.dtype) -> Tensor:
    """50,000 tokens of probability 1e-8 and three large ones, between tokens of weight zero. Three blocks are all zeros."""
    weights = torch.zeros(50_257, dtype=torch.float64)
    order = torch.randperm(50_257, generator=torch.Generator().manual_seed(0))
    order = order[(order // 256 != 3) & (order // 256 != 100) & (order // 256 != 195)]
    empty = 50_257 - len(order)
    assert empty > 500
    weights[order[: 50_000 - empty]] = 1e-8
    weights[torch.tensor([256 * 7, 30_001, 50_256])] = torch.tensor([0.6, 0.2995, 0.1], dtype=torch.float64)
    return weights.to(dtype)


@BOTH
def test_a_long_tail_is_drawn_uniformly_at_its_rate(dtype: torch.dtype) -> None:
    """Each token is drawn between its exact boundaries, to 1e-12, in the tail and at the large ones."""
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
    """The exact fraction of u gives a token of the tail. With cumulative sums in float32 none would."""
    weights = tail(dtype)
    u = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    drawn = torch.cat([draw_categorical(weights.expand(64, -1), part) for part in u.split(64)])
    share = float((weights[drawn] < 1e-6).double().mean())
    assert abs(share - float(weights[weights < 1e-6].double().sum() / weights.double().sum())) < 4 / 4096


@BOTH
@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 128, 129, 255, 256, 257, 511, 513, 50_257])
def test_a_weight_of_zero_is_never_drawn(size: int, dtype: torch.dtype) -> None:
    """Zeros at the start, at the end, on both sides, at every other token, and in all blocks but one."""
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
    st.sampled_from([1, 2, 3, 32, 33, 64, 65, 128, 129, 255, 256, 257, 600]),
    st.integers(0, 1 << 20),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([1.0, 1e-30, 1e30]),
    st.sampled_from([1.0, 8.0, 30.0]),
    st.booleans(),
)
def test_a_draw_lies_between_its_exact_boundaries(
    size: int, seed: int, u: float, scale: float, spread: float, narrow: bool
) -> None:
    """Weights over dozens of orders of magnitude, a third of them zero."""
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


def test_a_draw_from_zero_weights_is_an_index() -> None:
    """All weights are zero (rates of a state without incoming rates): the result does not matter, but must be a token."""
    assert (draw_categorical(torch.zeros(3, K), torch.tensor([0.0, 0.5, 0.999])) < K).all()


def softmax64(logits: Tensor) -> Tensor:
    return torch.softmax(logits.double(), -1)


def uniform_prediction(logits: Tensor, x_t: Tensor, logits_processor: LogitsProcessor = LogitsProcessor()) -> Prediction:  # noqa: B008
    process = m2s.Uniform(logits.shape[-1], m2s.Linear())
    return Prediction(m2s.Posterior(process), logits, x_t, torch.full(x_t.shape[:1], 0.4), logits_processor)


@BOTH
@pytest.mark.parametrize("size", [2, 3, 33, 256, 257, 1000, 50_257])
@pytest.mark.parametrize("other", [False, True], ids=["any", "other"])
def test_a_prediction_draws_from_its_softmax(size: int, dtype: torch.dtype, other: bool) -> None:
    """All fields of `TokenDraw` against softmax in float64, at every eighth of the unit interval and at its ends."""
    exact = 1e-12 if dtype == torch.float64 else 1e-6
    u = torch.tensor([[*ENDS, *(torch.arange(1, 8) / 8).tolist(), 0.9999]], dtype=torch.float64)
    logits = 2 * torch.randn(1, u.shape[1], size, dtype=dtype)
    x_t = torch.randint(size, u.shape)
    drawn = uniform_prediction(logits, x_t).draw_token(u, other=other)
    mu = softmax64(logits)
    mu_k = mu.gather(-1, x_t.unsqueeze(-1)).squeeze(-1)
    rest = mu.scatter(-1, x_t.unsqueeze(-1), 0.0)
    distribution = rest / rest.sum(-1, keepdim=True) if other else mu
    torch.testing.assert_close(drawn.mu_k, mu_k, rtol=exact, atol=0)
    torch.testing.assert_close(drawn.off, rest.sum(-1), rtol=exact, atol=0)
    token = drawn.token.unsqueeze(-1)
    torch.testing.assert_close(drawn.probability, distribution.gather(-1, token).squeeze(-1), rtol=4 * exact, atol=0)
    above = distribution.cumsum(-1).gather(-1, token).squeeze(-1)
    assert ((above - drawn.probability - exact <= u) & (u <= above + exact)).all()
    if other:
        assert (drawn.token != x_t).all()


@BOTH
@pytest.mark.parametrize("lead", [60.0, 200.0, 1000.0])
def test_a_dominant_current_token_hides_no_other(lead: float, dtype: torch.dtype) -> None:
    """`off` has full relative precision, and the other tokens are drawn from their distribution."""
    size = 300
    u = torch.tensor([list(ENDS)], dtype=torch.float64)
    logits = torch.randn(1, len(ENDS), size, dtype=dtype)
    x_t = torch.tensor([[0, 17, 255, 299]])
    logits.scatter_(-1, x_t.unsqueeze(-1), lead)
    prediction = uniform_prediction(logits, x_t)
    drawn, other = prediction.draw_token(u), prediction.draw_token(u, other=True)
    rest = logits.double().scatter(-1, x_t.unsqueeze(-1), -torch.inf)
    off = torch.sigmoid(torch.logsumexp(rest, -1) - lead)
    assert torch.equal(drawn.token, x_t) and (drawn.probability == 1).all() and (drawn.mu_k == 1).all()
    torch.testing.assert_close(drawn.off, off, rtol=1e-12 if dtype == torch.float64 else 1e-6 * (1 + lead / 10), atol=0)
    distribution = torch.softmax(rest, -1)
    above = distribution.cumsum(-1).gather(-1, other.token.unsqueeze(-1)).squeeze(-1)
    assert (other.token != x_t).all() and (other.off == drawn.off).all()
    assert ((above - other.probability - 1e-6 <= u) & (u <= above + 1e-6)).all()


@pytest.mark.parametrize("level", [0.0, 500.0, -500.0, -700.0, -900.0, -2000.0])
def test_a_single_possible_token_is_drawn_at_any_logit(level: float) -> None:
    """With all others at -inf, a token with the logit -900 is certain, whether it is the current token or not."""
    u = torch.tensor([list(ENDS)], dtype=torch.float64)
    for place, current, dtype in itertools.product(range(K), range(K), (torch.float32, torch.float64)):
        logits = torch.full((1, len(ENDS), K), -torch.inf, dtype=dtype)
        logits[..., place] = level
        drawn = uniform_prediction(logits, torch.full(u.shape, current)).draw_token(u)
        assert (drawn.token == place).all(), f"token {place} under the current token {current}"
        assert (drawn.probability == 1).all()
        assert (drawn.mu_k == float(current == place)).all() and (drawn.off == float(current != place)).all()


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.005, 1e-4])
def test_top_1_is_the_most_likely_token_at_any_temperature(temperature: float) -> None:
    """top_k = 1 is the argmax, for any current token; also of log-probabilities."""
    logits = torch.log_softmax(3 * torch.randn(1, 40, K), -1) - 3
    best = logits.argmax(-1)
    for current in (best, (best + 1) % K):
        drawn = uniform_prediction(logits, current, LogitsProcessor(temperature=temperature, top_k=1)).draw_token(
            torch.rand(1, 40, dtype=torch.float64)
        )
        assert torch.equal(drawn.token, best)


@pytest.mark.parametrize("process", ["absorbing", "hybrid"])
def test_masks_are_never_drawn_and_revealed_tokens_are_known(process: str) -> None:
    chosen = PROCESSES[process]
    u = torch.tensor([list(ENDS) * 2], dtype=torch.float64)
    x_t = torch.tensor([[K, K, K, K, 0, 1, 3, K - 1]])
    logits = torch.randn(1, 8, K + 1)
    logits[..., K] = 50.0  # the logit of the mask has no meaning
    drawn = Prediction(m2s.Posterior(chosen), logits, x_t, torch.tensor([0.4])).draw_token(u)
    mu = softmax64(logits[..., :K])
    assert (drawn.token < K).all()
    assert (drawn.mu_k[0, :4] == 0).all() and (drawn.off[0, :4] == 1).all()
    torch.testing.assert_close(drawn.probability[0, :4], mu[0, torch.arange(4), drawn.token[0, :4]], rtol=1e-6, atol=0)
    if process == "absorbing":
        assert torch.equal(drawn.token[0, 4:], x_t[0, 4:])
        assert (drawn.mu_k[0, 4:] == 1).all() and (drawn.off[0, 4:] == 0).all() and (drawn.probability[0, 4:] == 1).all()
    else:
        torch.testing.assert_close(drawn.mu_k[0, 4:], mu[0, torch.arange(4, 8), x_t[0, 4:]], rtol=1e-6, atol=0)


def test_masked_sites_have_no_current_token_to_exclude() -> None:
    """With `other` a masked site is drawn from its full posterior, including the last clean token."""
    u = ((torch.arange(400, dtype=torch.float64) + 0.5) / 400).unsqueeze(0)
    x_t, logits = torch.full((1, 400), K), torch.zeros(1, 400, K + 1)
    drawn = Prediction(m2s.Posterior(PROCESSES["absorbing"]), logits, x_t, torch.tensor([0.4])).draw_token(u, other=True)
    assert drawn.token.flatten().bincount(minlength=K).tolist() == [80] * 5


@pytest.mark.parametrize("size", [300, 20_000])
def test_hidden_states_are_projected_in_chunks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unprojected and projected outputs give the same bits where the matrix product is over the same rows."""
    monkeypatch.setattr(prediction_module, "CPU_CHUNK", 16 * size)
    hidden, weight, bias = torch.randn(2, 24, 32), torch.randn(size + 5, 32), torch.randn(size + 5)
    x_t, u = torch.randint(size, (2, 24)), torch.rand(2, 24, dtype=torch.float64)
    by_rows = torch.cat(
        [torch.nn.functional.linear(part, weight[:size], bias[:size]) for part in hidden.reshape(-1, 32).split(16)]
    )
    process = m2s.Uniform(size, m2s.Linear())
    for head in (m2s.Posterior(process), m2s.Posterior(process, offset="exact")):
        lazy, eager = (
            Prediction(head, output, x_t, torch.tensor([0.3, 0.8])).draw_token(u)
            for output in (m2s.Unprojected(hidden, weight, bias), by_rows.unflatten(0, (2, 24)))
        )
        assert all(torch.equal(a, b) for a, b in zip(lazy, eager, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 600), st.integers(0, 1 << 20), st.floats(0.1, 30), st.booleans(), st.booleans())
def test_a_prediction_and_a_categorical_draw_agree(size: int, seed: int, spread: float, other: bool, cut: bool) -> None:
    """`Prediction.draw` treats the current token separately; the result is that of a draw from the posterior vector."""
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
    drawn = uniform_prediction(logits, x_t).draw_token(u, other=other)
    possible = distribution.sum(-1) > 1e-290
    distribution = distribution / distribution.sum(-1, keepdim=True)
    above = distribution.cumsum(-1).gather(-1, drawn.token.unsqueeze(-1)).squeeze(-1)
    inside = (above - drawn.probability - 1e-9 <= u) & (u <= above + 1e-9) & (drawn.probability > 0)
    assert inside[possible].all()
