"""The candidates for the recipe of text: expectations by enumeration of a tiny vocabulary, exact properties, and files."""

import importlib.util
import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch

import m2s
from m2s.data.source import Batch
from m2s.losses.objective import TrainingObjective
from m2s.training.config import resolve
from m2s.training.trainer import LocalBatch

ROOT = Path(__file__).parent.parent.parent
SPEC = importlib.util.spec_from_file_location("candidates", ROOT / "experiments" / "candidates.py")
candidates = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(candidates)
changes = sys.modules["candidate_changes"]

VOCAB, LENGTH = 3, 2
SEQUENCES = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))


class Table(torch.nn.Module):
    """A network with free logits for each x_t, scaled by a function of the time where it sees it. `head.bias` is added."""

    def __init__(self, sees_time: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.nn.Parameter(torch.randn(VOCAB**LENGTH, LENGTH, VOCAB, generator=generator, dtype=torch.float64))
        self.head = torch.nn.Linear(1, VOCAB, dtype=torch.float64)
        self.sees_time = sees_time

    def forward(self, x_t, t, label=None):
        found = self.logits[(x_t * VOCAB ** torch.arange(LENGTH)).sum(-1)]
        return (found * (1 + t.double())[:, None, None] if self.sees_time else found) + self.head.bias


def posterior_head() -> m2s.Posterior:
    return m2s.Posterior(m2s.Uniform(VOCAB, m2s.Linear()), offset="exact")


def probability(head: m2s.Posterior, x_0: torch.Tensor, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """P_t(x_t|x_0) of each pair of sequences."""
    return head.process.rows(x_0, t).gather(-1, x_t.unsqueeze(-1)).squeeze(-1).prod(-1)


def expected_loss(model: Table, head: m2s.Posterior, x_0: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The loss of one sequence at one time, summed over positions and averaged over all x_t."""
    clean, times = x_0.expand_as(SEQUENCES), t.expand(len(SEQUENCES))
    nats = m2s.score_entropy(head, model(SEQUENCES, times), clean, SEQUENCES, times).sum(-1)
    return (probability(head, clean, SEQUENCES, times) * nats).sum()


def test_repeated_times_have_the_expectation_of_single_ones():
    """The mean over all orders of the strata and all rotations of a batch, with x_t enumerated."""
    model, head = Table(sees_time=True), posterior_head()
    batch = SEQUENCES[[0, 1, 5, 7]]
    times = torch.tensor([0.1, 0.35, 0.6, 0.9], dtype=torch.float64)
    weights = 1 / (times + 0.1)
    nats = torch.stack([torch.stack([expected_loss(model, head, x_0, t) for t in times]) for x_0 in batch]).detach()
    place = {tuple(x_0.tolist()): row for row, x_0 in enumerate(batch)}
    totals = dict.fromkeys((1, 2, 4), 0.0)
    for order in itertools.permutations(range(4)):
        for turn in range(4):
            strata = torch.tensor(order)
            given = LocalBatch(torch.arange(4), Batch(batch.roll(turn, 0), None, None), times[strata], weights[strata])
            for repeats in totals:
                found = changes.repeat_examples(given, repeats)
                assert sorted(found.t.tolist()) == times.tolist()  # every stratum once
                rows = [place[tuple(x_0.tolist())] for x_0 in found.batch.x_0]
                columns = [times.tolist().index(t) for t in found.t.tolist()]
                totals[repeats] += float((found.weight * nats[rows, columns]).mean()) / (24 * 4)
    assert totals[2] == pytest.approx(totals[1], rel=1e-12) and totals[4] == pytest.approx(totals[1], rel=1e-12)


def test_each_repeat_of_a_sequence_has_its_part_of_the_times():
    t = (torch.randperm(16, generator=torch.Generator().manual_seed(1)) + 0.5) / 16
    x_0 = torch.arange(16).unsqueeze(-1)
    found = changes.repeat_examples(LocalBatch(torch.arange(16), Batch(x_0, None, None), t, 2 * t), 4)
    assert found.batch.x_0.flatten().tolist() == [row for row in range(4) for _ in range(4)]
    assert (found.t * 4).long().unflatten(0, (4, 4)).eq(torch.arange(4)).all()
    assert found.weight.equal(2 * found.t)


def test_averaged_times_have_the_expectation_of_drawn_ones(monkeypatch):
    """Value and gradient, with x_t enumerated at each time of the grid, and the time that is drawn again enumerated too."""
    grid = 8
    monkeypatch.setattr(changes, "GRID", grid)
    monkeypatch.setattr(changes, "DRAWS", 1)
    changes.grid_times.cache_clear()
    model, head, importance, t_min = Table(sees_time=False), posterior_head(), 0.1, 1e-3
    times, weights = changes.grid_times(head, t_min, importance)
    x_0 = torch.tensor([0, 2]).expand(len(SEQUENCES) * grid, 2)
    x_t, t = SEQUENCES.repeat(grid, 1), times.repeat_interleave(len(SEQUENCES))
    share = probability(head, x_0, x_t, t) * weights.repeat_interleave(len(SEQUENCES)) / grid
    arguments = (model, head, m2s.score_entropy, t_min)
    value, _ = TrainingObjective(*arguments)(x_0, x_t, t, share.unsqueeze(-1).expand(-1, LENGTH))
    gradient = torch.autograd.grad(value, model.logits)[0]
    averaged = changes.AveragedTimes(*arguments, importance=importance)
    likelihood = torch.stack([probability(head, x_0, x_t, time.expand(len(x_0))) for time in times])
    posterior = likelihood / likelihood.sum(0)
    total = torch.zeros((), dtype=torch.float64)
    for one in range(grid):
        monkeypatch.setattr(changes, "posterior_indices", lambda *_, one=one: torch.full((len(x_0), 1), one))
        part, terms = averaged(x_0, x_t, t, (share * posterior[one]).unsqueeze(-1).expand(-1, LENGTH))
        assert terms.sum().item() == pytest.approx(part.item())
        total = total + part
    changes.grid_times.cache_clear()
    torch.testing.assert_close(total, value, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(total, model.logits)[0], gradient, rtol=1e-10, atol=1e-12)


def test_the_grid_of_times_has_the_density_and_its_weights():
    times, weights = changes.grid_times(posterior_head(), 1e-3, 0.1)
    assert weights.mean().item() == pytest.approx(1 - 2e-3, rel=1e-5)  # the integral of 1
    assert (weights * times).mean().item() == pytest.approx((1 - 2e-3) / 2, rel=1e-5)  # of t


def test_posterior_of_the_time_is_that_of_bayes():
    head = posterior_head()
    times = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    x_0, x_t = torch.tensor([[0, 1]]), torch.tensor([[0, 2]])
    wanted = torch.stack([probability(head, x_0, x_t, t.unsqueeze(0)) for t in times]).flatten()
    uniform = (torch.arange(30_000, dtype=torch.float64).unsqueeze(0) + 0.5) / 30_000
    index = changes.posterior_indices(head.process, times, torch.tensor([1]), 2, uniform)
    shares = torch.bincount(index.flatten(), minlength=3) / 30_000
    torch.testing.assert_close(shares.double(), wanted / wanted.sum(), atol=1e-4, rtol=0)


def test_the_control_of_the_bias_has_mean_zero():
    """Over x_0 from independent tokens of the unigram distribution, x_t and t, the expected gradients are equal."""
    model, head = Table(sees_time=True), posterior_head()
    unigram = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    pairs = torch.tensor(list(itertools.product(range(9), range(9), range(3))))
    x_0, x_t, t = SEQUENCES[pairs[:, 0]], SEQUENCES[pairs[:, 1]], torch.tensor([0.1, 0.5, 0.9]).double()[pairs[:, 2]]
    weight = (unigram[x_0].prod(-1) * probability(head, x_0, x_t, t)).unsqueeze(-1).expand(-1, LENGTH)
    arguments = (model, head, m2s.score_entropy, 1e-3)
    plain, control = TrainingObjective(*arguments), changes.BiasControl(*arguments, unigram=unigram.log())
    expected, found = plain(x_0, x_t, t, weight), control(x_0, x_t, t, weight)
    assert found[0].item() == expected[0].item() and found[1].equal(expected[1])
    parameters = [model.logits, model.head.bias]
    for one, other in zip(torch.autograd.grad(expected[0], parameters), torch.autograd.grad(found[0], parameters), strict=True):
        assert one.abs().max() > 1e-3
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)
    with torch.no_grad():  # at the unigram distribution the noise of the bias's gradient is gone, for every single pair
        model.logits.zero_()
        model.head.bias.copy_(unigram.log())
    for row in range(0, len(pairs), 7):
        at = slice(row, row + 1)
        value, _ = control(x_0[at], x_t[at], t[at], torch.ones(1, LENGTH))
        assert torch.autograd.grad(value, model.head.bias)[0].abs().max() < 1e-12


def test_clipped_losses():
    losses = torch.tensor([0.5, 2.0, 8.0], requires_grad=True)
    clipped = changes.clip_examples(losses, 2.0)
    assert clipped.tolist() == [0.5, 2.0, 2.0]
    assert torch.autograd.grad(clipped.sum(), losses)[0].tolist() == [1.0, 1.0, 0.25]


def test_the_clipped_objective_is_the_plain_one_below_the_limit(monkeypatch):
    model, head = Table(sees_time=True), posterior_head()
    x_0, x_t, t = SEQUENCES, SEQUENCES.flip(0), torch.linspace(0.1, 0.9, 9).double()
    weight = torch.full((9, LENGTH), 1 / 9, dtype=torch.float64)
    arguments = (model, head, m2s.score_entropy, 1e-3)
    expected, terms = TrainingObjective(*arguments)(x_0, x_t, t, weight)
    largest = 9 * terms.sum(-1).max().item() / LENGTH  # nats per token
    for limit, equal in ((1.001 * largest, True), (0.5 * largest, False)):
        monkeypatch.setattr(changes, "LOSS_LIMIT", limit)
        value, found = changes.ClippedObjective(*arguments)(x_0, x_t, t, weight)
        wanted = terms.sum(-1).clamp(max=limit * LENGTH / 9).sum()
        assert value.item() == pytest.approx(wanted.item()) and found.equal(terms)
        gradients = [torch.autograd.grad(one, model.logits, retain_graph=True)[0] for one in (value, expected)]
        assert torch.allclose(*gradients, rtol=1e-10) is equal


def test_the_unigram_bias_gives_the_unigram_distribution_at_the_last_time():
    config = resolve(candidates.configure("m2s-offset", "unigram-bias", 1, Path("run")))
    source = m2s.data.Sequences(candidates.plateau.draw(64, 1), candidates.plateau.VOCAB)
    model, head, _ = candidates.make_objects(config, source)
    counts = torch.bincount(candidates.plateau.draw(64, 1).flatten(), minlength=candidates.plateau.VOCAB) + 1.0
    changes.start_at_unigram(model, candidates.plateau.unigram_logits(candidates.plateau.draw(64, 1)))
    x_t, t = torch.randint(candidates.plateau.VOCAB, (2, 5)), torch.ones(2)
    found = head.posterior(model(x_t, t), x_t, t)
    torch.testing.assert_close(found, (counts / counts.sum()).expand_as(found))


def test_a_tied_network_shares_storage_and_its_checkpoint_has_both_names(tmp_path):
    kept = []

    class Kept(candidates.CandidateTrainer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            kept.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "CandidateTrainer", Kept)
        candidates.measure("m2s-offset", "tied", 1, tmp_path / "run", steps=2)
    model = kept[0].model
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    loaded = m2s.load(tmp_path / "run").model
    assert loaded.head.weight.equal(loaded.embedding.weight)
    assert loaded.head.weight.equal(kept[0].average.values["embedding.weight"])


def test_every_candidate_is_the_baseline_with_one_change():
    base = candidates.configure("m2s-offset", candidates.BASELINE, 1, Path("run"))
    assert base == candidates.plateau.configure("owt-fast", 1, Path("run"), candidates.STEPS)
    assert next(iter(candidates.CANDIDATES)) == candidates.BASELINE
    changes = [candidate for name, candidate in candidates.CANDIDATES.items() if name != candidates.BASELINE]
    assert all(candidate != candidates.Candidate() for candidate in changes) and len(changes) == len({*map(repr, changes)})
    for name in candidates.CANDIDATES:
        config = resolve(candidates.configure("m2s-offset", name, 1, Path("run")))
        sizes = [*candidates.CANDIDATES[name].sizes, (config.run.steps, 0)]
        sizes = sizes if len(sizes) > 1 else [(0, config.run.batch), *sizes]
        steps = itertools.pairwise(sizes)
        tokens = sum((after - first) * size for (first, size), (after, _) in steps) * candidates.plateau.LENGTH
        assert tokens == candidates.POINTS[-1], name


def test_a_batch_schedule_counts_its_tokens(tmp_path, monkeypatch):
    monkeypatch.setitem(candidates.CANDIDATES, "batch-schedule", candidates.Candidate(sizes=((0, 8), (2, 16))))
    row = candidates.measure("m2s-offset", "batch-schedule", 1, tmp_path / "run", steps=5)
    assert row["trace"]["tokens"] == [(2 * 8 + 3 * 16) * candidates.plateau.LENGTH]


def made_row(method: str, name: str, seed: int, nats: float) -> dict:
    trace = {"tokens": list(candidates.POINTS), "nats": [nats] * len(candidates.POINTS)}
    return {"method": method, "candidate": name, "seed": seed, "core_seconds": 10.0 + nats, "trace": trace}


def test_differences_are_paired_and_a_win_needs_both_errors(monkeypatch):
    monkeypatch.setattr(candidates, "ROWS", {"m2s-offset": (candidates.BASELINE, "tied", "repeat-2")})
    gaps = {candidates.BASELINE: (0.0, 0.0, 0.0), "tied": (-1.0, -1.1, -0.9), "repeat-2": (-0.1, -0.5, 0.3)}
    rows = [made_row("m2s-offset", name, seed, seed + gap[seed - 1]) for name, gap in gaps.items() for seed in (1, 2, 3)]
    base, tied, repeat = candidates.summarize(rows)
    pooled = math.sqrt((0.01 / 3 + 0.16 / 3) / 2)
    point = tied["points"][0]
    assert point["difference"] == pytest.approx(-1) and point["error"] == pytest.approx(0.1 / math.sqrt(3))
    assert point["pooled_error"] == pytest.approx(pooled)
    assert point["wins"] and not repeat["points"][0]["wins"] and not base["points"][0]["wins"]
    ratios = candidates.time_ratios({"seconds_per_token": {candidates.BASELINE: [1.0, 2.0, 6.0], "tied": [4.0, 3.0, 2.0]}})
    lines = candidates.format_table([base, tied, repeat], "m2s-offset", ratios)
    assert lines[2].startswith("| `owt-fast` | 2.000 |") and lines[3].startswith("| `tied` | **-1.000 ± 0.058** |")
    assert lines[4].startswith("| `repeat-2` | -0.100 ± 0.231 |")
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["1.00", "1.50", "-", ""]
    assert len({line.count("|") for line in lines}) == 1


def test_ratios_of_variances_have_a_jackknife_error():
    """For equal denominators the jackknife error is the standard error of the mean."""
    ratio, error = candidates.ratio_and_error([1.0, 2.0, 3.0, 6.0], [2.0] * 4)
    assert ratio == pytest.approx(1.5) and error == pytest.approx(torch.tensor([0.5, 1, 1.5, 3]).std().item() / 2)


def test_the_variance_of_the_bias_falls_with_its_control(tmp_path, monkeypatch):
    """A network without context that has learned the unigram distribution: the control is its own gradient."""
    monkeypatch.setattr(candidates, "GROUPS", 1)
    monkeypatch.setattr(candidates, "BATCHES", 3)
    monkeypatch.setitem(candidates.VARIANCE, "unigram-bias", ("bias-control",))
    monkeypatch.setitem(candidates.CANDIDATES["unigram-bias"].settings, "optimizer.lr", 1e-9)
    row = candidates.measure_variance("unigram-bias", 1, tmp_path / "run")
    plain, control = (row["variance"][name] for name in ("unigram-bias", "bias-control"))
    assert control["bias"][0] < 1e-6 * plain["bias"][0]
    assert control["all"][0] < plain["all"][0]


def test_each_candidate_is_timed_in_turn(monkeypatch):
    monkeypatch.setattr(candidates, "TIMED", 2)
    monkeypatch.setattr(
        candidates, "CANDIDATES", {name: candidates.CANDIDATES[name] for name in ("owt-fast", "repeat-2", "batch-8")}
    )
    found = candidates.measure_cost()["seconds_per_token"]
    assert [len(values) for values in found.values()] == [2, 2, 2] and min(min(values) for values in found.values()) > 0


def test_rows_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(candidates, "ROWS", {"m2s-offset": (candidates.BASELINE, "loss-clip"), "mdlm": (candidates.BASELINE,)})
    monkeypatch.setattr(candidates, "VARIANCE", {candidates.BASELINE: ("repeat-2",)})
    out, results = tmp_path / "out", tmp_path / "candidates.json"
    assert candidates.main([str(out), "--table", "--results", str(results)]) == 2
    assert "m2s-offset-owt-fast-1.json" in capsys.readouterr().err and not results.exists()

    def made_variance(network, steps, folder):
        values = {"all": [1.0, 2.0], "bias": [1.0, 1.0]}
        return {
            "network": network,
            "steps": steps,
            "variance": {network: values, "repeat-2": {"all": [2.0, 4.0], "bias": [3, 3]}},
        }

    monkeypatch.setattr(candidates, "measure", lambda method, name, seed, run, steps: made_row(method, name, seed, seed))
    monkeypatch.setattr(candidates, "measure_variance", made_variance)
    monkeypatch.setattr(
        candidates, "measure_cost", lambda: {"seconds_per_token": {candidates.BASELINE: [1.0], "loss-clip": [2.0]}}
    )
    assert candidates.main([str(out)]) == 0
    for name in ("measure", "measure_variance", "measure_cost"):
        monkeypatch.setattr(candidates, name, lambda *_: pytest.fail("a finished row was computed again"))
    assert candidates.main([str(out)]) == 0
    assert candidates.main([str(out), "--table", "--results", str(results)]) == 0
    found = json.loads(results.read_text())
    assert len(found["rows"]) == 9 and [one["candidate"] for one in found["summaries"]] == ["owt-fast", "loss-clip", "owt-fast"]
    assert [one["all"]["ratio"] for one in found["variance_ratios"]] == [2, 2] and found["time_ratios"]["loss-clip"] == 2
    assert "| `repeat-2` | 2.00 ± 0.00 | 2.00 ± 0.00 | 3.00 ± 0.00 | 3.00 ± 0.00 |" in capsys.readouterr().out
