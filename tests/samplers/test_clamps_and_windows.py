"""Clamped sites, prompts and windows."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import m2s
from m2s.samplers import (
    Trajectory,
)
from run_cases import (
    COUNT,
    EVERY_SAMPLER,
    FIRST,
    PROCESSES,
    REVERSE_SAMPLERS,
    SUPPORTED,
    K,
    L,
    Rounding,
    build,
    cases,
    run,
    supports,
)

pytestmark = pytest.mark.usefixtures("without_shape_hook")


@cases([case for case in SUPPORTED if case[2] in ("posterior", "score")])
def test_clamped_sites_never_move(sampler: str, process: str, head: str) -> None:
    """At no step, and not in the network's input. All free sites are filled."""
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
def test_clamping_all_sites_returns_the_clamp(sampler: str, process: str, head: str) -> None:
    chosen = build(process, head)
    clamp = torch.randint(K, (COUNT, L))
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert torch.equal(run(Rounding(chosen.process.states), chosen, sampler=sampler, clamp=clamp.to(dtype)), clamp)


@cases(EVERY_SAMPLER)
def test_an_empty_clamp_has_no_effect(sampler: str, process: str, head: str) -> None:
    chosen = build(process, head)
    model = Rounding(chosen.process.states)
    free = torch.full((COUNT, L), -1, dtype=torch.int16)
    assert torch.equal(run(model, chosen, sampler=sampler, clamp=free), run(model, chosen, sampler=sampler))


@cases(EVERY_SAMPLER)
def test_a_prompt_is_continued(sampler: str, process: str, head: str) -> None:
    """The prompt stays, and the network sees it from the first call. Other sites start from the same noise as without it."""
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


def test_the_network_sees_full_batches_at_valid_times() -> None:
    """Every call has `micro_batch` rows, each sample in the row of its number, and times in [t_min, 1 - t_min]."""
    head = build("hybrid", "posterior")
    rows: list[tuple[int, ...]] = []
    inner = Rounding(K + 1)

    def model(x_t: Tensor, t: Tensor) -> Tensor:
        assert x_t.dtype == torch.int64 and t.dtype == torch.float32 and t.shape == x_t.shape[:1]
        assert (t >= 0.02 - 1e-7).all() and (t <= 0.98 + 1e-7).all()
        rows.append(tuple(x_t.shape))
        return inner(x_t, t)

    for sampler in REVERSE_SAMPLERS:
        if supports(sampler, "hybrid", "posterior"):
            run(model, head, sampler=sampler, batch_size=5, t_min=0.02)
    assert set(rows) == {(16, L)}
    rows.clear()
    run(model, head, micro_batch=4, t_min=0.02)
    assert set(rows) == {(4, L)}


@pytest.mark.parametrize(("length", "window", "overlap"), [(20, 8, None), (17, 8, 3), (12, 4, 0), (10, 8, 7), (5, 8, None)])
@pytest.mark.parametrize("sampler", ["bayes", "predictor_corrector", "first_hitting"])
def test_windows_are_filled_one_after_another(sampler: str, length: int, window: int, overlap: int | None) -> None:
    """No call of the network is longer than the window. Each window starts with the last tokens of the one before."""
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
    for number, window_states in enumerate(states):
        size = window_states[0].shape[1]
        if number:
            assert all(torch.equal(state[:, :shared], out[:, begin : begin + shared]) for state in window_states)
            assert (window_states[0][:, shared:] == process.mask).all()
        assert torch.equal(window_states[-1], out[:, begin : begin + size])
        begin += window - shared
    assert begin - (window - shared) + states[-1][0].shape[1] == length
    assert len(states) == max(1, math.ceil((length - shared) / (window - shared)))
    again = run(model, head, 3, 0, length, sampler=sampler, window=window, overlap=overlap, batch_size=1)
    assert torch.equal(again, out)


def test_windows_have_different_noise() -> None:
    head, model = m2s.Posterior(m2s.Uniform(997, m2s.Linear())), Rounding(997, 8)
    starts: list[Tensor] = []
    run(model, head, 2, 0, 24, window=8, overlap=0, callback=lambda step: starts.append(step.x_t) if step.number == 0 else None)
    assert len(starts) == 3
    for one, two in itertools.combinations(starts, 2):
        assert float((one == two).double().mean()) < 0.2


def test_clamps_apply_across_windows() -> None:
    head, model = m2s.Posterior(PROCESSES["absorbing"]), Rounding(K + 1, 8)
    clamp = torch.where(torch.rand(3, 20) < 0.3, torch.randint(K, (3, 20)), -1)
    out = run(model, head, 3, 0, 20, window=8, overlap=4, clamp=clamp)
    assert torch.equal(out[clamp >= 0], clamp[clamp >= 0]) and (out >= 0).all() and (out < K).all()
