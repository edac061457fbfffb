"""Steps of the analytic sampler: the kernel against the weights of `m2s.analytic_weights` and of the Bayes step in float64.

Without a GPU the kernel runs in Triton's interpreter.
"""

import importlib
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import m2s
from m2s.ops import use_backend
from m2s.ops.analytic_step import naive
from m2s.samplers import Analytic, CounterNoise, Move, Prediction

pytest.importorskip("triton")

prediction_module = importlib.import_module("m2s.samplers.prediction")
fused = importlib.import_module("m2s.ops.analytic_step.triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROCESSES = {
    "uniform": lambda vocab: m2s.Uniform(vocab, m2s.Linear()),
    "geometric": lambda vocab: m2s.Uniform(vocab, m2s.Geometric(sigma_min=1e-3, sigma_max=8.0)),  # noise is left at t = 0
    "absorbing": lambda vocab: m2s.Absorbing(vocab, m2s.Linear()),
    "hybrid": lambda vocab: m2s.Hybrid(vocab, 0.3),
}
NEAR = 1e-9
SEED = (5 << 32) + 7


def sites(process: m2s.Process, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Current tokens, ends and starts of steps: the first and last token, the mask, a step of length 0 and one to s = 0."""
    x_t = torch.randint(process.states, (count,), device=DEVICE)
    x_t[:3] = torch.tensor([0, process.vocab - 1, process.states - 1])
    t = 0.02 + 0.95 * torch.rand(count, dtype=torch.float64, device=DEVICE)
    s = t * torch.rand(count, dtype=torch.float64, device=DEVICE)
    s[3], s[4] = t[3], 0.0
    return x_t, s, t


def padded(values: Tensor) -> Tensor:
    """The values in float32 with further columns that nothing may read."""
    return torch.nn.functional.pad(values.float(), (0, 5), value=torch.nan)


def check_draws(tokens: Tensor, weights: Tensor, u: Tensor) -> None:
    """A drawn token has a positive weight, and u lies in its interval of the cumulative distribution."""
    positive = weights.clamp(min=0)
    share = positive / positive.sum(-1, keepdim=True)
    here = share.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    above = share.cumsum(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert (here > 0).all() and ((above - here - NEAR <= u) & (u <= above + NEAR)).all()


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize(("vocab", "count"), [(2, 12), (3, 24), (300, 16), (2500, 8)])
def test_draws_from_the_positive_part_of_the_weights(name: str, vocab: int, count: int) -> None:
    """Scores that no posterior has, with a shift: tokens and the negative mass."""
    process = PROCESSES[name](vocab)
    x_t, s, t = sites(process, count)
    log_score = 2 * torch.randn(count, process.states, device=DEVICE)
    shift = torch.randn(count, dtype=torch.float64, device=DEVICE)
    u = torch.rand(count, dtype=torch.float64, device=DEVICE)
    u[-2:] = torch.tensor([0.0, 1 - 2.0**-53])
    weights = m2s.analytic_weights((log_score.double() - shift.unsqueeze(-1)).exp(), x_t, s, t, process)
    tokens, negative = fused.draw_next_token(padded(log_score), x_t, s, t, u, process, False, shift)
    check_draws(tokens, weights, u)
    torch.testing.assert_close(negative, -weights.clamp(max=0).sum(-1), rtol=NEAR, atol=1e-12)
    assert name == "absorbing" or (negative > 0).any()  # otherwise the second assertion says little
    expected, mass = naive.draw_next_token(padded(log_score), x_t, s, t, u, process, False, shift)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(negative, mass, rtol=NEAR, atol=1e-12)


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize(("vocab", "count"), [(2, 12), (300, 16), (2500, 8)])
def test_posteriors_take_the_bayes_step(name: str, vocab: int, count: int) -> None:
    """The weights are those of `m2s.bayes_probabilities`, which sum to one, also where mu has zeros."""
    process = PROCESSES[name](vocab)
    x_t, s, t = sites(process, count)
    posterior = torch.softmax(4 * torch.randn(count, vocab, device=DEVICE), -1)
    posterior = torch.where(posterior < 1e-3 / vocab, 0, posterior)
    posterior[5] = torch.nn.functional.one_hot(x_t[5].clamp(max=vocab - 1), vocab)  # certain of the current token
    posterior = torch.nn.functional.pad(posterior, (0, process.states - vocab))
    if process.mask is not None and name == "absorbing":  # an unmasked token is certainly clean
        known = torch.nn.functional.one_hot(x_t, process.states).float()
        posterior = torch.where((x_t != process.mask).unsqueeze(-1), known, posterior)
    u = torch.rand(count, dtype=torch.float64, device=DEVICE)
    exact = posterior.double() / posterior.double().sum(-1, keepdim=True)
    weights = m2s.bayes_probabilities(exact, x_t, s, t, process)
    tokens, negative = fused.draw_next_token(padded(posterior), x_t, s, t, u, process, True)
    positive = weights / weights.sum(-1, keepdim=True)
    here = positive.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    above = positive.cumsum(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert (here > 0).all() and ((above - here - 1e-6 <= u) & (u <= above + 1e-6)).all()  # the rows are float32
    assert (negative == 0).all()


@pytest.mark.parametrize("name", PROCESSES)
def test_frequencies_are_the_weights(name: str) -> None:
    """Evenly spaced uniform numbers: each token has its share of the positive weights, to one draw."""
    process, count = PROCESSES[name](5), 500
    x_t = torch.full((count,), process.states - 1, device=DEVICE)
    s, t = (torch.full((count,), value, dtype=torch.float64, device=DEVICE) for value in (0.4, 0.6))
    log_score = torch.tensor([0.3, -2.0, 1.0, -4.0, 0.0, 0.5])[: process.states].to(DEVICE).expand(count, -1)
    u = (torch.arange(count, dtype=torch.float64, device=DEVICE) + 0.5) / count
    tokens, _ = fused.draw_next_token(padded(log_score), x_t, s, t, u, process, False)
    weights = m2s.analytic_weights(log_score[:1].double().exp(), x_t[:1], s[:1], t[:1], process)[0].clamp(min=0)
    counts = torch.bincount(tokens, minlength=process.states)
    assert (counts - count * weights / weights.sum()).abs().max() <= 1


HEADS: dict[str, Callable[[m2s.Process], m2s.heads.Head]] = {
    "score": m2s.LogScore,
    "projected": lambda process: m2s.Projected(m2s.LogScore(process)),
}


def cases() -> list[tuple[str, str]]:
    """Pairs of a process and a head. The scale is for masking noise."""
    return [*itertools.product(("uniform", "geometric", "absorbing"), HEADS), ("absorbing", "scaled"), ("absorbing", "both")]


@pytest.mark.parametrize("unprojected", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("last", [False, True], ids=["step", "last step"])
@pytest.mark.parametrize(("name", "head"), cases())
def test_the_sampler_draws_the_same_tokens_with_the_kernel(name: str, head: str, last: bool, unprojected: bool) -> None:
    process = PROCESSES[name](40)
    chosen = HEADS[head](process) if head in HEADS else m2s.LogScore(process, scale="sigma")
    chosen = m2s.Projected(chosen) if head == "both" else chosen
    x_t = torch.randint(process.states, (3, 20), device=DEVICE)
    x_t[0] = process.states - 1
    hidden, weight = torch.randn(3, 20, 6, device=DEVICE), torch.randn(48, 6, device=DEVICE)
    output = m2s.Unprojected(hidden, weight) if unprojected else hidden @ weight.T
    t = torch.tensor([0.999, 0.5, 0.02], dtype=torch.float64, device=DEVICE)
    found = {}
    for backend in ("reference", "fused"):
        prediction = Prediction(chosen, output, x_t, t)
        noise = CounterNoise(SEED, torch.arange(3, device=DEVICE), 20, 2)
        with use_backend(backend):
            tokens = Analytic().last_step(prediction, noise) if last else Analytic().step(prediction, Move(t, 0.9 * t), noise)
        found[backend] = tokens, prediction.notes.get("negative_mass", torch.zeros(3, 20, device=DEVICE))
    assert torch.equal(found["reference"][0], found["fused"][0])
    # The projection is float32 with the kernel. On a projected score the reference has negative weights of rounding alone.
    near = {"rtol": NEAR, "atol": 1e-12} if isinstance(chosen, m2s.LogScore) else {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(*(mass for _, mass in found.values()), **near)


def test_other_samplers_and_heads_do_not_use_the_kernel() -> None:
    """A subclass may have other weights; sharpened and float64 predictions need K-vectors."""
    process = m2s.Uniform(6, m2s.Linear())
    x_t, t = torch.zeros(1, 4, dtype=torch.long, device=DEVICE), torch.tensor([0.5], device=DEVICE)
    output = torch.randn(1, 4, 6, device=DEVICE)

    class Twice(Analytic):
        def unguided_weights(self, part: Prediction, s: Tensor) -> Tensor:
            one = torch.zeros(*part.x_t.shape, 6, device=DEVICE)
            return one.index_fill(-1, torch.tensor([5], device=DEVICE), 1.0)

    noise = CounterNoise(SEED, torch.arange(1, device=DEVICE), 4, 0)
    with use_backend("fused"):
        tokens = Twice().step(Prediction(m2s.LogScore(process), output, x_t, t), Move(t, 0.5 * t), noise)
        assert (tokens == 5).all()
        assert Prediction(m2s.LogScore(process), output, x_t, t).fuses_analytic_step
        assert not Prediction(m2s.LogScore(process), output.double(), x_t, t).fuses_analytic_step
        assert not Prediction(m2s.FactorizedRate(process), output, x_t, t).fuses_analytic_step
        assert not Prediction(m2s.Posterior(process), output, x_t, t).fuses_analytic_step


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("broken", [800.0, torch.inf, torch.nan])
def test_rows_without_valid_weights_are_noticed(name: str, broken: float) -> None:
    """Scores that overflow: the last state, which is the mask where there is one, and a negative mass of NaN."""
    process = PROCESSES[name](300)
    x_t, s, t = (torch.full((4,), value, device=DEVICE) for value in (process.states - 1, 0.2, 0.6))
    log_score = torch.randn(4, process.states, device=DEVICE)
    log_score[::2, 7] = broken
    u = torch.rand(4, dtype=torch.float64, device=DEVICE)
    tokens, negative = fused.draw_next_token(padded(log_score), x_t, s, t, u, process, False)
    expected, mass = naive.draw_next_token(padded(log_score), x_t, s.double(), t.double(), u, process, False)
    assert torch.equal(tokens, expected) and (tokens[::2] == process.states - 1).all()
    assert negative[::2].isnan().all() and torch.equal(negative.isnan(), mass.isnan())


def test_scores_that_overflow_end_the_sampling_of_masks() -> None:
    head = m2s.LogScore(PROCESSES["absorbing"](6))

    def model(x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        return torch.full((*x_t.shape, 7), 800.0, device=DEVICE)

    for backend in ("reference", "fused"):
        with use_backend(backend), pytest.raises(ValueError, match="scores overflow"):
            m2s.sample(model, head, (1, 4), steps=2, sampler="analytic", seed=0, micro_batch=1, device=DEVICE)


@pytest.mark.parametrize("head", ["score", "projected"])
def test_logits_are_drawn_from_in_chunks(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens do not depend on the chunks, and no projection is larger than one."""
    process = PROCESSES["uniform"](40)
    x_t, t = torch.randint(40, (3, 5), device=DEVICE), torch.full((3,), 0.5, dtype=torch.float64, device=DEVICE)
    output = torch.randn(3, 5, 48, device=DEVICE)
    noise = CounterNoise(SEED, torch.arange(3, device=DEVICE), 5, 0)
    sizes: list[int] = []
    draw = prediction_module.draw_next_token

    def count(rows: Tensor, *more: object, **options: object) -> tuple[Tensor, Tensor]:
        sizes.append(len(rows))
        return draw(rows, *more, **options)

    monkeypatch.setattr(prediction_module, "draw_next_token", count)
    found = []
    for chunk in (48 * 15, 48 * 4 + 1):
        monkeypatch.setattr(prediction_module, "CHUNK", chunk)
        with use_backend("fused"):
            found.append(Analytic().step(Prediction(HEADS[head](process), output, x_t, t), Move(t, 0.5 * t), noise))
    assert sizes == [15, 4, 4, 4, 3] and torch.equal(*found)


def test_projected_scores_that_exceed_float32() -> None:
    """e^90 is infinite in float32. The greatest score has all of the posterior, as in float64."""
    process = PROCESSES["uniform"](40)
    x_t, t = torch.randint(40, (2, 5), device=DEVICE), torch.full((2,), 0.5, dtype=torch.float64, device=DEVICE)
    output = torch.randn(2, 5, 40, device=DEVICE)
    output[0, :, 7], output[1, :, 7] = 90.0, 700.0
    noise = CounterNoise(SEED, torch.arange(2, device=DEVICE), 5, 0)
    found = []
    for backend in ("reference", "fused"):
        with use_backend(backend):
            found.append(Analytic().step(Prediction(HEADS["projected"](process), output, x_t, t), Move(t, 0.01 * t), noise))
    assert torch.equal(*found) and (found[1] == 7).any()
