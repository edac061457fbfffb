"""Draws and sampling steps: the kernel against torch, and both against the definition in float64.

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
from m2s.ops.reverse_step import cpu, naive
from m2s.samplers import Bayes, CounterNoise, Euler, LogitsProcessor, Move, Prediction, bayes, euler

pytest.importorskip("triton")
import triton
import triton.language as tl

fused = importlib.import_module("m2s.ops.reverse_step.triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = 1e-6  # weights are float32, their sums float64
PROCESSES = {
    "uniform": lambda vocab: m2s.Uniform(vocab, m2s.Linear()),
    "absorbing": lambda vocab: m2s.Absorbing(vocab, m2s.Linear()),
    "hybrid": lambda vocab: m2s.Hybrid(vocab, 0.3),
}
LAST = 1 - 2.0**-53
SEED, STEP, WINDOW = (5 << 32) + 7, 3, 2


def softmax_of(rows: Tensor, k: Tensor, offset: Tensor, vocab: int, other: bool) -> tuple[Tensor, Tensor, Tensor]:
    """mu_k, off and the distribution of the draw, by softmax in float64."""
    logits = rows[:, :vocab].double()
    clean = k < vocab
    at = k.clamp(max=vocab - 1).unsqueeze(-1)
    shift = torch.where(clean & offset.isfinite(), offset, 0).unsqueeze(-1)
    logits = logits.scatter_add(-1, at, shift)
    known = (offset == torch.inf).unsqueeze(-1)
    one = torch.zeros_like(logits).scatter(-1, at, 1.0)
    rest = logits.scatter(-1, at, torch.where(clean.unsqueeze(-1), -torch.inf, logits.gather(-1, at)))
    odds = torch.logsumexp(rest, -1) - torch.where(clean, logits.gather(-1, at).squeeze(-1), -torch.inf)
    off = torch.where(known.squeeze(-1), 0.0, torch.sigmoid(odds))
    mu_k = torch.where(known.squeeze(-1), 1.0, torch.sigmoid(-odds))
    return mu_k, off, torch.where(known, one, torch.softmax(rest if other else logits, -1))


def padded(vocab: int, count: int, spread: float = 4.0, junk: float = torch.nan) -> Tensor:
    """Rows of logits with additional columns of junk."""
    rows = spread * torch.randn(count, vocab + 7)
    rows[:, vocab:] = junk
    return rows.to(DEVICE)


@pytest.mark.parametrize("other", [False, True], ids=["any", "other"])
@pytest.mark.parametrize(("vocab", "count"), [(2, 7), (3, 11), (257, 13), (1001, 9), (2049, 5), (4100, 1), (50_257, 5)])
def test_draws_follow_the_softmax(vocab: int, count: int, other: bool) -> None:
    """Token, probability, mu_k and off, with offsets, a mask, a certain token, and a current token that is almost certain."""
    rows = padded(vocab, count, junk=torch.inf if count % 2 else torch.nan)
    k = torch.randint(vocab + 1, (count,), device=DEVICE)
    offset = 8 * torch.rand(count, dtype=torch.float64, device=DEVICE)
    u = torch.rand(count, dtype=torch.float64, device=DEVICE)
    k[-1] = vocab - 1
    if count > 4:
        k[:4] = torch.tensor([vocab, 1, 0, vocab - 1], device=DEVICE)
        offset[0], offset[1] = 0, torch.inf
        offset[2] = 30 + rows[2, :vocab].max() - rows[2, 0]  # off is some 1e-12
        u[2], u[3] = LAST, 0.0
    mu_k, off, distribution = softmax_of(rows, k, offset, vocab, other)
    drawn = fused.draw_token(rows, k, offset, u, vocab, other)
    torch.testing.assert_close(drawn.mu_k, mu_k, rtol=NEAR, atol=0)
    torch.testing.assert_close(drawn.off, off, rtol=NEAR, atol=0)
    token = drawn.token.unsqueeze(-1)
    above, share = distribution.cumsum(-1).gather(-1, token).squeeze(-1), distribution.gather(-1, token).squeeze(-1)
    known = offset == torch.inf
    torch.testing.assert_close(drawn.probability, torch.where(known & other, 0, share), rtol=NEAR, atol=0)
    assert ((above - share - NEAR <= u) & (u <= above + NEAR))[~known].all() and (share > 0).all()
    near = ((distribution.cumsum(-1) - u.unsqueeze(-1)).abs() < NEAR).any(-1)
    wanted = cpu.draw_token(rows, k, offset, u, vocab, other)
    assert torch.equal(drawn.token[~near], wanted.token[~near])
    for a, b in zip(drawn[1:], wanted[1:], strict=True):
        torch.testing.assert_close(a[~near], b[~near], rtol=4 * NEAR, atol=0)


@pytest.mark.parametrize("lines", [1, 2, 8])
def test_tile_sizes(lines: int) -> None:
    """Blocks whose greatest logits differ by hundreds, empty blocks, and both ends of the unit interval."""
    vocab, count = 1500, 8
    rows = padded(vocab, count)
    rows[:, 256:512] -= 300
    rows[:, 512:768] = -torch.inf
    rows[4:, 1024:vocab] = -torch.inf
    k = torch.tensor([0, 300, 600, 1499, 0, 300, 600, 1499], device=DEVICE)
    u = torch.tensor([0.0, LAST, 0.5, 0.9] * 2, dtype=torch.float64, device=DEVICE)
    offset = torch.zeros_like(u)
    for other in (False, True):
        mu_k, off, distribution = softmax_of(rows, k, offset, vocab, other)
        drawn = fused.draw_token(rows, k, offset, u, vocab, other, lines=lines)
        wanted = cpu.draw_token(rows, k, offset, u, vocab, other)
        assert torch.equal(drawn.token, wanted.token)
        assert (distribution.gather(-1, drawn.token.unsqueeze(-1)) > 0).all()
        torch.testing.assert_close(drawn.mu_k, mu_k, rtol=NEAR, atol=0)
        torch.testing.assert_close(drawn.off, off, rtol=NEAR, atol=0)


@pytest.mark.parametrize("level", [0.0, -900.0])
def test_only_possible_token_is_drawn(level: float) -> None:
    """All other logits are -inf, and the token is the current one or another. Without it, nothing is left to draw."""
    vocab = 300
    places = torch.tensor([0, 7, 7, 299], device=DEVICE)
    k = torch.tensor([0, 7, 8, 300], device=DEVICE)
    rows = torch.full((4, vocab + 7), -torch.inf, device=DEVICE).scatter_(1, places.unsqueeze(-1), level)
    rows[:, vocab:] = 50
    u = torch.tensor([0.0, LAST, 0.0, LAST], dtype=torch.float64, device=DEVICE)
    drawn = fused.draw_token(rows, k, torch.zeros_like(u), u, vocab, False)
    assert torch.equal(drawn.token, places) and (drawn.probability == 1).all()
    assert torch.equal(drawn.mu_k, (k == places).double()) and torch.equal(drawn.off, (k != places).double())
    left = fused.draw_token(rows, k, torch.zeros_like(u), u, vocab, True)
    assert (left.probability == (k != places)).all() and (left.token[2:] == places[2:]).all() and (left.token < vocab).all()


def test_dominant_current_token() -> None:
    """off at e^-30, e^-60 and e^-400, to its last digits; beyond the range of float64 it is zero."""
    vocab, lead = 300, torch.tensor([30.0, 60.0, 400.0, 1000.0], dtype=torch.float64, device=DEVICE)
    rows, k = padded(vocab, 4, spread=1.0), torch.arange(4, device=DEVICE)
    u = torch.full_like(lead, 0.3)
    _, off, distribution = softmax_of(rows, k, lead, vocab, True)
    drawn, other = (fused.draw_token(rows, k, lead, u, vocab, without) for without in (False, True))
    torch.testing.assert_close(drawn.off, off, rtol=NEAR, atol=0)
    assert torch.equal(other.off, drawn.off) and torch.equal(drawn.token, k)
    torch.testing.assert_close(drawn.mu_k, 1 - off, rtol=1e-15, atol=0)
    above = distribution.cumsum(-1).gather(-1, other.token.unsqueeze(-1)).squeeze(-1)
    assert ((above - other.probability - NEAR <= u) & (u <= above + NEAR)).all()


@triton.jit
def _uniforms(out, samples, length, low_key, high_key, step, word):
    """Write the numbers that a step kernel would draw."""
    row = tl.program_id(0)
    sample = tl.load(samples + row // length).to(tl.uint64)
    site = (row % length).to(tl.uint64)
    u = fused._uniform(sample, step.to(tl.uint64), site, word.to(tl.uint64), low_key.to(tl.uint64), high_key.to(tl.uint64))
    tl.store(out + row, u)


@pytest.mark.parametrize(("seed", "step", "window"), [(0, 2, 0), (SEED, 0xFFFFFFF0, 5), ((1 << 64) - 1, 77, 40_000)])
def test_uniforms_of_the_kernel(seed: int, step: int, window: int) -> None:
    """Every bit, at both ends of the sample numbers and with words above 2^31."""
    noise = CounterNoise(seed, torch.tensor([0, 1, 0xFFFFFFFF], device=DEVICE), 3, step, window)
    counter = noise.counter("token", "jump", "route")
    assert counter is not None
    for word, purpose in zip(counter.words, ("token", "jump", "route"), strict=True):
        out = torch.empty(9, dtype=torch.float64, device=DEVICE)
        _uniforms[(9,)](out, counter.samples, 3, *counter.key, counter.step, word)
        assert torch.equal(out.reshape(3, 3), noise(purpose))


TIMES = [(0.999, 0.5), (0.6, 0.55), (0.5, 0.1), (0.3, 0.0), (2e-3, 1e-3), (1e-3, 0.0)]


def problem(name: str, offset: str, vocab: int = 300, length: int = 3) -> tuple[m2s.Head, Tensor, Tensor, Tensor, Tensor]:
    """A head, logits, current tokens, and times t and s."""
    process = PROCESSES[name](vocab)
    t, s = torch.tensor(TIMES, dtype=torch.float64, device=DEVICE).unbind(-1)
    x_t = torch.randint(vocab, (len(TIMES), length), device=DEVICE)
    if process.mask is not None:
        x_t[:, 0] = process.mask
    return m2s.Posterior(process, offset=offset), 2 * torch.randn(*x_t.shape, vocab + 9, device=DEVICE), x_t, t, s


@pytest.mark.parametrize("sampler", [Bayes(), Euler()], ids=lambda sampler: sampler.name)
@pytest.mark.parametrize("offset", ["none", "exact"])
@pytest.mark.parametrize("name", PROCESSES)
def test_steps_equal_torch(name: str, offset: str, sampler: m2s.samplers.Sampler) -> None:
    """Token by token, at all times and at s = 0, and where the exit mass of Euler exceeds one."""
    head, logits, x_t, t, s = problem(name, offset)
    noise = CounterNoise(SEED, torch.arange(3, 3 + len(t), device=DEVICE), x_t.shape[1], STEP, WINDOW)
    after, notes = {}, {}
    for backend in ("reference", "fused"):
        prediction = Prediction(head, logits, x_t, t)
        with use_backend(backend):
            assert prediction.fuses == (backend == "fused")
            after[backend], notes[backend] = sampler.step(prediction, Move(t, s), noise), prediction.notes
    assert torch.equal(after["fused"], after["reference"])
    assert (after["fused"] != x_t).any()
    assert notes["fused"].keys() == notes["reference"].keys()
    assert all(torch.equal(notes["fused"][key], notes["reference"][key]) for key in notes["fused"])


@pytest.mark.parametrize("sampler", [Bayes(), Euler()], ids=lambda sampler: sampler.name)
@pytest.mark.parametrize("name", PROCESSES)
def test_every_route_is_taken(name: str, sampler: m2s.samplers.Sampler) -> None:
    """A vocabulary of four and many positions: both masses matter, every route is taken, with the results of torch."""
    head, logits, _, _, _ = problem(name, "exact", vocab=4, length=24)
    t, s = (torch.full((1,), value, dtype=torch.float64, device=DEVICE) for value in (0.7, 0.4))
    x_t = torch.arange(24, device=DEVICE).unsqueeze(0) % head.process.states
    noise = CounterNoise(SEED, torch.tensor([1], device=DEVICE), 24, STEP)
    with use_backend("reference"):
        wanted = sampler.step(Prediction(head, logits[:1], x_t, t), Move(t, s), noise)
    with use_backend("fused"):
        found = sampler.step(Prediction(head, logits[:1], x_t, t), Move(t, s), noise)
    assert torch.equal(found, wanted)
    assert (found == x_t).any() and (found != x_t).any()


@pytest.mark.parametrize("sampler", [Bayes(), Euler()], ids=lambda sampler: sampler.name)
@pytest.mark.parametrize("name", PROCESSES)
def test_rows_that_stay_are_not_read(name: str, sampler: m2s.samplers.Sampler) -> None:
    """A position that stays whether the posterior is sure of k or of the others: its row may hold anything."""
    head, logits, x_t, t, s = problem(name, "none")
    noise = CounterNoise(SEED, torch.arange(len(t), device=DEVICE), x_t.shape[1], STEP)
    stays = torch.ones_like(x_t, dtype=torch.bool)
    k = x_t.clamp(max=head.process.vocab - 1).unsqueeze(-1)
    for sure in (60.0, -60.0):  # of k, and of the others
        prediction = Prediction(head, logits.scatter(-1, k, sure), x_t, t)
        routes = bayes.routes(prediction, s) if isinstance(sampler, Bayes) else euler.routes(prediction, (t - s).unsqueeze(-1))
        with use_backend("reference"):
            stays &= noise("route") >= prediction.step(routes, noise)[1] * (1 + 1e-8)
    junk = torch.where(stays.unsqueeze(-1), torch.nan, logits)
    with use_backend("fused"):
        after = sampler.step(Prediction(head, junk, x_t, t), Move(t, s), noise)
    assert (after[stays] == x_t[stays]).all() and (after < head.process.states).all()
    assert stays.any()


def model(states: int, unprojected: bool) -> Callable[..., Tensor | m2s.Unprojected]:
    """A fixed random network with different outputs at every position: there are no ties."""
    generator = torch.Generator().manual_seed(4)
    sizes = (states, 8), (states + 3, 8), (states + 3,)
    embed, weight, bias = (2 * torch.randn(*size, generator=generator).to(DEVICE) for size in sizes)

    def network(x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor | m2s.Unprojected:
        place = torch.arange(x_t.shape[1], device=DEVICE)[:, None] / 3
        hidden = torch.tanh(embed[x_t] + embed[x_t].mean(1, keepdim=True) + t[:, None, None] + place)
        output = m2s.Unprojected(hidden, weight, bias)
        return output if unprojected else output.project()

    return network


def run(backend: str, name: str, sampler: str, unprojected: bool, count: int = 2, start: int = 4, **options: object) -> Tensor:
    """Samples of that network on one backend."""
    process = PROCESSES[name](6)
    head = m2s.Posterior(process, offset="exact")
    given = {"steps": 2, "seed": SEED, "micro_batch": 2, "device": DEVICE, "sampler": sampler, "start": start, **options}
    with use_backend(backend):
        return m2s.sample(model(process.states, unprojected), head, (count, 3), **given)


@pytest.mark.parametrize(
    ("name", "sampler", "unprojected"),
    [*itertools.product(PROCESSES, ["bayes", "euler"], [True]), ("hybrid", "bayes", False), ("absorbing", "confidence", True)],
)
def test_samples_are_the_same_on_both_backends(name: str, sampler: str, unprojected: bool) -> None:
    """Through `m2s.sample`: every intermediate state, and every note of an exit mass above one.

    Of three steps the last is a draw from the posterior, which has no exit mass.
    """
    seen: dict[str, list[Tensor]] = {"reference": [], "fused": []}
    for backend, states in seen.items():
        out = run(
            backend,
            name,
            sampler,
            unprojected,
            steps=3,
            callback=lambda step, seen=states: seen.extend([step.x_s, *step.prediction.notes.values()]),
        )
        states.append(out)
    # three states and the result; Euler notes the exit mass of its first two steps
    assert len(seen["fused"]) == (6 if sampler == "euler" else 4)
    assert all(torch.equal(a, b) for a, b in zip(*seen.values(), strict=True))


def test_samples_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples 5 to 7 together, each alone, and with the logits of three rows at a time."""
    together = run("fused", "hybrid", "bayes", True, count=3, start=5)
    assert torch.equal(together[1:2], run("fused", "hybrid", "bayes", True, count=1, start=6))
    monkeypatch.setattr("m2s.ops.last_layer_chunks.CHUNK", 3 * 10)
    assert torch.equal(together, run("fused", "hybrid", "bayes", True, count=3, start=5))


def test_which_predictions_use_the_kernel() -> None:
    """Logits of a posterior over a rank-one process in float32 use the kernel; everything else uses torch."""
    process = m2s.Uniform(5, m2s.Linear())
    x_t, t = torch.zeros(1, 2, dtype=torch.long, device=DEVICE), torch.full((1,), 0.5, device=DEVICE)
    logits, weight = torch.zeros(1, 2, 5, device=DEVICE), torch.zeros(5, 3, device=DEVICE)
    plain, tabulated = m2s.Posterior(process), m2s.Posterior(m2s.RateMatrix.uniform(5, m2s.Linear()))
    hidden = torch.zeros(1, 2, 3, device=DEVICE)
    cases = [
        (Prediction(plain, logits, x_t, t), True),
        (Prediction(plain, m2s.Unprojected(hidden, weight), x_t, t), True),
        (Prediction(plain, m2s.Unprojected(hidden.bfloat16(), weight.bfloat16()), x_t, t), True),
        (Prediction(plain, m2s.Unprojected(hidden.double(), weight.double()), x_t, t), False),
        (Prediction(plain, logits.double(), x_t, t), False),
        (Prediction(plain, logits, x_t, t, LogitsProcessor(temperature=0.5)), False),
        (Prediction(plain, logits, x_t, t, LogitsProcessor(guidance=2.0), logits), False),
        (Prediction(m2s.Projected(m2s.LogScore(process)), logits, x_t, t), False),
        (Prediction(tabulated, logits, x_t, t), False),
    ]
    with use_backend("fused"):
        assert [prediction.fuses for prediction, _ in cases] == [wanted for _, wanted in cases]
    with use_backend("reference"):
        assert not any(prediction.fuses for prediction, _ in cases)


def test_too_few_columns_raise() -> None:
    """Before a kernel reads past the end of a row."""
    u = torch.zeros(1, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match="needs 5 or more adjacent float32"):
        fused.draw_token(torch.zeros(1, 4, device=DEVICE), u.long(), u, u, 5, False)
    x_t, t = torch.zeros(1, 1, dtype=torch.long, device=DEVICE), torch.full((1,), 0.5, device=DEVICE)
    output = m2s.Unprojected(torch.zeros(1, 1, 3, device=DEVICE), torch.zeros(4, 3, device=DEVICE))
    with use_backend("fused"), pytest.raises(ValueError, match="4 columns, but the process has 5 states"):
        Prediction(m2s.Posterior(m2s.Uniform(5, m2s.Linear())), output, x_t, t).draw_token(u.unsqueeze(0))


@pytest.mark.parametrize("other", [False, True], ids=["any", "other"])
@pytest.mark.parametrize("vocab", [2, 3, 257, 1001])
def test_naive_equals_torch_version(vocab: int, other: bool) -> None:
    """The definition and the version in blocks agree in float64: tokens, probabilities and masses."""
    count = 40
    rows = 4 * torch.randn(count, vocab + 3, dtype=torch.float64)
    k = torch.randint(vocab + 1, (count,))
    offset, u = 8 * torch.rand(count, dtype=torch.float64), torch.rand(count, dtype=torch.float64)
    k[:3] = torch.tensor([vocab, 0, vocab - 1])
    offset[1] = torch.inf
    expected, found = (op.draw_token(rows, k, offset, u, vocab, other) for op in (naive, cpu))
    assert torch.equal(found.token, expected.token)
    for one, two in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-15)
