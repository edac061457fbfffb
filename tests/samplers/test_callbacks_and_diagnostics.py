"""Callbacks, trajectories, grids and diagnostics."""

import itertools
import math
from typing import Any

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
    CHAINS,
    CORRECTIONS,
    COUNT,
    EVERY_SAMPLER,
    FIRST,
    PROCESSES,
    RANDOM_OR_EXTRA_TIMES,
    RANK_ONE,
    STEPS,
    SUPPORTED,
    K,
    L,
    Rounding,
    build,
    cases,
    run,
)

pytestmark = pytest.mark.usefixtures("without_shape_hook")


def expected_steps(sampler: str, steps: int) -> int:
    others = {
        "analytic": steps + 1,
        "predictor_corrector": 2 * steps - 1,
        "informed": 2 * steps - 1,
        "self_correcting": steps + CORRECTIONS,
    }
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
    for sample, events in seen.items():
        at = rows[sample]
        number = expected_steps(sampler, steps)
        assert [step.number for step in events] == list(range(number))
        assert all(step.steps == number for step in events)
        for m, step in enumerate(events):
            assert torch.equal(step.x_t[at[m]], trajectory.states[m][sample - FIRST])
            assert torch.equal(step.x_s[at[m]], trajectory.states[m + 1][sample - FIRST])
            assert step.t[at[m]] >= step.s[at[m]]
            if m + 1 < number:
                assert torch.equal(step.x_s[at[m]], events[m + 1].x_t[at[m + 1]])
                assert sampler in RANDOM_OR_EXTRA_TIMES or step.s[at[m]] == events[m + 1].t[at[m + 1]]
        if sampler not in RANDOM_OR_EXTRA_TIMES:
            assert events[0].t[at[0]] == 1 and events[-1].s[at[-1]] == 0
    assert trajectory.states.shape == (number + 1, COUNT, L)
    last = trajectory.states[-1]
    assert torch.equal(last[last < K], out[last < K])


@pytest.mark.parametrize("grid", GRIDS)
def test_grids_are_those_of_the_paper(grid: str) -> None:
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
def test_grids_of_a_chain_are_multiples_of_its_step(grid: str, asked: int, steps: int) -> None:
    """The grid has as many steps as asked for, at most T, each from one n/T to a lower one, near the continuous grid."""
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
    """`trajectory.states` is [steps + 1, n, L], also where L is greater than the window."""
    trajectory = Trajectory()
    model = Rounding(K + 1, 8)

    def short(x_t: Tensor, t: Tensor) -> Tensor:
        return model(torch.nn.functional.pad(x_t, (0, 8 - x_t.shape[1])), t)[:, : x_t.shape[1]]

    out = run(short, build("absorbing", "posterior"), 3, 0, length, sampler=sampler, steps=8, window=8, callback=trajectory)
    assert trajectory.states.shape[1:] == (3, length)
    assert torch.equal(trajectory.states[-1], out)


COUNTED = [case for case in SUPPORTED if case[1] not in CHAINS and case[2] not in ("offset", "rate")]


@cases([case for case in COUNTED if case[1] in RANK_ONE or case[2] != "projected"])
def test_diagnostics_count_what_happened(sampler: str, process: str, head: str) -> None:
    """Sites, jumps, classes and remaining masks, against the trajectory, with a clamp and several batches."""
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
        inside = moment.t < 1 or chosen.excludes_t_one or SAMPLERS[sampler].excludes_t_one
        assert sum(moment.classes) == (free if inside else 0)
    if process not in RANK_ONE or head != "posterior":
        return  # one comparison of batches for each sampler
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


@cases([case for case in SUPPORTED if case[0] in ("euler", "analytic") and case[2] not in ("offset", "rate")])
def test_notes_of_a_sampler_are_right(sampler: str, process: str, head: str) -> None:
    """Exit masses above one and negative weights, computed from the score of each step."""
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
            return  # the last step is a draw from the prediction
        rates = m2s.rate_from_score(score.double(), x_t, t, chosen.process)
        exit_mass = (step.t - step.s)[:, None] * rates.sum(-1)
        here["above"] += int((exit_mass > 1 + 1e-5).sum())
        # Under absorbing noise the mass of the last step is one, up to rounding.
        here["not below"] += int((exit_mass > 1 - 1e-5).sum())
        if sampler == "euler":
            assert (step.x_s != step.x_t)[exit_mass > 1 + 1e-5].all()

    _, log = run(Rounding(chosen.process.states), chosen, steps=2, sampler=sampler, callback=callback, diagnostics=True)
    for moment, found in zip(log.steps, direct, strict=True):
        if sampler == "euler":
            assert found["above"] <= moment.exit_above_one <= found["not below"]
        if sampler == "analytic":
            assert moment.negative_mass == pytest.approx(found["negative_mass"], rel=1e-4, abs=1e-4)


def test_exit_masses_above_one_are_counted() -> None:
    """An unconstrained score with large exit rates, in two steps."""
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
    """Masks that are left by a plan that ends early are drawn."""
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
    """A chain has no rates, so classes are not counted; everything else is."""
    model = Rounding(PROCESSES[process].states)
    out, log = run(model, build(process, "posterior"), diagnostics=True)
    assert log.total("sites") == COUNT * L * STEPS
    assert torch.equal(out, run(model, build(process, "posterior")))


@pytest.mark.parametrize(("vocab", "offset"), [(3, "none"), (5, "exact"), (64, "none")])
def test_a_posterior_head_is_realizable_at_every_step(vocab: int, offset: str) -> None:
    """No score is outside the box or material, also near t = 1 and with logits in float32."""
    head = m2s.Posterior(m2s.Uniform(vocab, m2s.Linear()), offset=offset)
    table = 3 * torch.randn(vocab, vocab)
    _, log = run(lambda x_t, t: table[x_t], head, 16, 0, 16, steps=96, diagnostics=True)
    assert [moment.t for moment in log.steps if moment.classes[0] or moment.classes[1]] == []
