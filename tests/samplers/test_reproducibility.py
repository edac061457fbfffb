"""Samples are the same bit for bit, in whatever batches, processes or runs they are drawn."""

import io
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import m2s
from m2s.samplers import (
    GRIDS,
    SAMPLERS,
    Trajectory,
)
from run_cases import (
    ALL,
    BOTH,
    COUNT,
    EVERY_SAMPLER,
    FIRST,
    PROCESSES,
    RANK_ONE,
    SUPPORTED,
    K,
    L,
    NetworkCalled,
    Rounding,
    build,
    cases,
    never,
    pieces,
    run,
    supports,
    trained,
)

pytestmark = pytest.mark.usefixtures("without_shape_hook")


@cases(ALL)
def test_which_sampler_supports_which_head(sampler: str, process: str, head: str) -> None:
    """A sampler that does not support a head raises before the network is called. The advice in the message works."""
    if supports(sampler, process, head):
        with pytest.raises(NetworkCalled):
            run(never, build(process, head), sampler=sampler)
        return
    with pytest.raises(TypeError, match=r"sampler|head|chain|Projected") as caught:
        run(never, build(process, head), sampler=sampler)
    assert re.search("use |it needs", str(caught.value)), caught.value
    for advice in re.findall(r"use (?:sampler=)?('\w+'(?:(?:, | or )'\w+')*)", str(caught.value)):
        for name in re.findall(r"\w+(?=')", advice):
            assert supports(name, process, head), f"bad advice: {caught.value}"


def test_the_network_of_these_tests_depends_on_its_batch() -> None:
    """Its output changes with the number of rows, so tokens would change if `m2s.sample` passed batches through."""
    model, x_t, t = Rounding(K), torch.randint(K, (16, L)), torch.full((16,), 0.3)
    with torch.no_grad():
        full = model(x_t, t)
        assert (model(x_t[:1], t[:1]) - full[:1]).abs().max() > 0.05
        assert torch.equal(model(x_t, t), full)
        x_t[1:] = 0
        assert torch.equal(model(x_t, t)[0], full[0])


@cases(SUPPORTED)
def test_samples_depend_neither_on_the_batch_nor_on_padding(sampler: str, process: str, head: str) -> None:
    """Alone, with others, or with extra columns of any value: the same tokens, all in the vocabulary."""
    chosen = build(process, head)
    model = Rounding(chosen.process.states)

    def padded(x_t: Tensor, t: Tensor) -> Tensor:
        return torch.cat([model(x_t, t), torch.tensor([60.0, torch.inf, -3.0]).expand(*x_t.shape, 3)], -1)

    full = run(model, chosen, sampler=sampler)
    assert full.dtype == torch.int64 and full.shape == (COUNT, L)
    assert (full >= 0).all() and (full < K).all()
    assert torch.equal(run(model, chosen, 1, FIRST + 1, sampler=sampler), full[1:2])
    assert torch.equal(run(padded, chosen, 2, FIRST + 2, sampler=sampler), full[2:])


@cases(EVERY_SAMPLER + [case for case in SUPPORTED if case[1] in ("uniform", "absorbing") and case[2] == "score"])
def test_samples_do_not_depend_on_how_a_run_is_divided(sampler: str, process: str, head: str) -> None:
    chosen = build(process, head)
    model = Rounding(chosen.process.states)
    full = run(model, chosen, sampler=sampler)
    for how, tokens in pieces(chosen, model, sampler=sampler).items():
        assert torch.equal(tokens, full), how


@cases(EVERY_SAMPLER)
def test_hidden_states_do_not_depend_on_the_batch(sampler: str, process: str, head: str) -> None:
    """The sampler applies the last layer over the same rows in any batch."""
    chosen = build(process, head)
    model = Rounding(chosen.process.states, lazy=True)
    full = run(model, chosen, 16, 0, sampler=sampler, steps=4)
    for size in (1, 5):
        assert torch.equal(run(model, chosen, 10, 0, sampler=sampler, steps=4, batch_size=size), full[:10]), size


@pytest.mark.parametrize("process", RANK_ONE)
@BOTH
def test_a_projection_does_not_depend_on_the_batch(process: str, dtype: torch.dtype) -> None:
    """The nearest posterior of a score is the same, bit for bit, whatever other scores are projected with it."""
    chosen = PROCESSES[process]
    score = (1.5 * torch.randn(150, chosen.states, dtype=dtype)).exp()
    x_t, t = torch.randint(chosen.states, (150,)), torch.full((150,), 0.6, dtype=torch.float64)
    together = m2s.project(score, x_t, t, chosen)
    alone = torch.cat([m2s.project(score[i : i + 1], x_t[i : i + 1], t[i : i + 1], chosen) for i in range(150)])
    torch.testing.assert_close(alone.sum(-1), torch.ones(150, dtype=dtype), rtol=0, atol=1e-5)
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)
    assert torch.equal(alone, together)


def test_a_projection_is_a_distribution() -> None:
    """A score whose threshold changes its branch while the support stays the same: K = 7, t = 0.6, k = 6."""
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
    full = run(model, chosen, 12, 0, sampler=sampler, steps=4)
    assert torch.equal(run(model, chosen, 5, 5, sampler=sampler, steps=4), full[5:10])
    assert torch.equal(run(model, chosen, 12, 0, sampler=sampler, steps=4, batch_size=5), full)
    assert torch.equal(run(model, chosen, 1, 11, sampler=sampler, steps=4), full[11:])


def test_a_transformer_learns_and_is_sampled() -> None:
    """Samples are sequences such as 0 1 2 3 4 0, so the tests above are not about noise only."""
    head = build("absorbing", "posterior")
    x = run(trained("absorbing", "posterior", 250), head, 64, 0, sampler="first_hitting", steps=L)
    assert float(((x[:, 1:] - x[:, :-1]) % K == 1).double().mean()) > 0.5  # 0.2 by chance


SPLIT = [("bayes", "uniform", "posterior"), ("euler", "hybrid", "score"), ("predictor_corrector", "absorbing", "posterior")]


def test_two_processes_divide_one_run() -> None:
    """A second process draws samples 8 to 14. They are those of one run of all samples."""
    program = (
        "import sys, torch; torch.set_num_threads(1); sys.path[:0] = sys.argv[1:3]\n"
        "import numpy as np, test_reproducibility as tests\n"
        "parts = [tests.split_run(*case, 7, 8).numpy() for case in tests.SPLIT]\n"
        "np.save(sys.stdout.buffer, np.stack(parts))"
    )
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", program, str(here), str(here.parent)], capture_output=True, check=True)
    theirs = torch.from_numpy(np.load(io.BytesIO(done.stdout)))
    for case, part in zip(SPLIT, theirs, strict=True):
        full = split_run(*case, 15, 0)
        assert torch.equal(torch.cat([split_run(*case, 8, 0), part]), full), case


def split_run(sampler: str, process: str, head: str, count: int, start: int) -> Tensor:
    chosen = build(process, head)
    return run(Rounding(chosen.process.states), chosen, count, start, sampler=sampler)


@cases(EVERY_SAMPLER)
def test_a_killed_run_resumes(sampler: str, process: str, head: str) -> None:
    """A run is killed in its second batch and resumed from the end of the first."""
    chosen = build(process, head)
    model, done = Rounding(chosen.process.states), Trajectory()

    class Killed(Exception):
        pass

    def callback(step: m2s.samplers.StepEvent) -> None:
        if 4 in step.samples and step.number == 1:
            raise Killed
        done(step)

    full = run(model, chosen, 10, 0, sampler=sampler)
    with pytest.raises(Killed):
        run(model, chosen, 10, 0, sampler=sampler, batch_size=4, callback=callback)
    last = done.states[-1][:4]
    assert torch.equal(last[last < K], full[:4][last < K])
    assert torch.equal(run(model, chosen, 6, 4, sampler=sampler, batch_size=4), full[4:])


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


def test_guidance_and_clamps_do_not_depend_on_the_batch() -> None:
    """Condition, clamp and sharpening of a sample do not affect others."""
    head = build("absorbing", "posterior")
    model, condition = Rounding(K + 1), torch.arange(COUNT)
    clamp = torch.where(torch.rand(COUNT, L) < 0.4, torch.randint(K, (COUNT, L)), -1)
    for sampler in (name for name in SAMPLERS if supports(name, "absorbing", "posterior")):
        options = {"sampler": sampler, "guidance": 2.0, "temperature": 0.7, "top_p": 0.9, "on": "leave_one_out"}
        full = run(model, head, condition=condition, clamp=clamp, **options)
        parts = [
            run(model, head, 1, FIRST + i, condition=condition[i : i + 1], clamp=clamp[i : i + 1], **options)
            for i in range(COUNT)
        ]
        assert torch.equal(torch.cat(parts), full), sampler
        assert torch.equal(run(model, head, condition=condition, clamp=clamp, batch_size=3, **options), full), sampler


@pytest.mark.parametrize("process", PROCESSES)
def test_two_heads_start_from_the_same_state(process: str) -> None:
    """The initial state depends on process and noise only, not on head, sampler or network."""
    starts = []
    for sampler, _, head in [case for case in SUPPORTED if case[1] == process and case[2] in ("posterior", "score")]:
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
def test_a_posterior_and_its_projected_score_give_the_same_samples(process: str, grid: str) -> None:
    """On the same noise: `Posterior` with log mu, and the projection of the exact score of mu, in float64."""
    chosen = PROCESSES[process]
    posterior, model, t_min = m2s.Posterior(chosen), Rounding(chosen.states).double(), 1e-7

    def logits(x_t: Tensor, t: Tensor) -> Tensor:
        return model(x_t, t.double()) / 4

    def log_score(x_t: Tensor, t: Tensor) -> Tensor:
        return posterior.log_score(logits(x_t, t), x_t, t.double())

    torch.set_default_dtype(torch.float64)  # the dtype of the time that the network sees
    try:
        options = {"steps": 12, "grid": grid, "t_min": t_min}
        one = run(logits, posterior, 24, 0, **options)
        two = run(log_score, m2s.Projected(m2s.LogScore(chosen)), 24, 0, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(one, two)


@pytest.mark.parametrize("process", ["gaussian", "chain"])
def test_transition_matrices_are_computed_once_per_sample(process: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sites of a sample have the same time. One K x K matrix for each site of an image would not fit into memory."""
    kind, most = type(PROCESSES[process]), [0]
    transition, step_transition = kind.transition_matrix, kind.step_transition_matrix

    def seen(self: Any, t: Tensor) -> Tensor:
        most.append(t.numel())
        return transition(self, t)

    def step_seen(self: Any, s: Tensor, t: Tensor) -> Tensor:
        most.append(t.numel())
        return step_transition(self, s, t)

    monkeypatch.setattr(kind, "transition_matrix", seen)
    monkeypatch.setattr(kind, "step_transition_matrix", step_seen)
    run(Rounding(K), build(process, "posterior"))
    assert max(most) <= 16
