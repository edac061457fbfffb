"""Cases of step distributions: sites with every token, time and kind of prediction, and the closed forms at all of them."""

import importlib
import inspect
import itertools
from collections.abc import Callable

import numpy as np
import pytest

import closed_forms as forms
import exact_steps
import m2s
from closed_forms import log, transition
from exact_steps import Sites
from oracle import CASES, Case, hybrid, linear, tabulated, uniform_rates

EXACT = 1e-12
PLACES = {
    **CASES,
    "uniform-2": Case(m2s.Uniform(2, m2s.Linear()), tabulated(uniform_rates(2), linear), 3),
    "hybrid-0": Case(m2s.Hybrid(3, p_uniform=0.0), hybrid(3, 0.0), 3),
}
MASKS = {name: PLACES[name] for name in ("absorbing-linear", "absorbing-cosine", "hybrid-0")}
RANK_ONE = [
    "uniform-2",
    "uniform-linear",
    "uniform-exponential",
    "absorbing-linear",
    "absorbing-cosine",
    "hybrid-0.2",
    "hybrid-0.6",
]
TABULATED = ["gaussian", "birth-death", "tabulated-absorbing"]
STEPS = [(1.0, 0.5), (1.0, 0.0), (0.999, 0.9), (0.5, 0.5 - 1e-9), (0.7, 0.1), (0.5, 0.0), (1e-3, 5e-4), (1e-3, 0.0), (0.3, 0.3)]


def predictions(name: str, t: float, k: int, kind: int, score: bool, offset: bool) -> np.ndarray:
    """An output for a site with token k, [S]: exact for some sequence (kind 0), random (1), with a peak or gap at k (2, 3)."""
    case = PLACES[name]
    states = case.process.states
    rng = np.random.default_rng([kind, k, int(1e9 * t)])
    if kind == 0:
        oracle = case.oracle()
        have = oracle.noisy[oracle.noisy[:, 0] == k]
        x = have[rng.integers(len(have))][None]
        at = min(t, 1 - 1e-3)
        if score:
            return log(oracle.score(x, at))[0, 0]
        return log((oracle.leave_one_out if offset else oracle.posterior)(x, at))[0, 0]
    row = rng.normal(size=states) * 2
    row[k] += {1: 0.0, 2: 60.0, 3: -60.0}[kind]
    return row


def sites(
    name: str,
    head: m2s.Head,
    steps: list[tuple[float, float]],
    excludes_t_one: bool = False,
    kinds: tuple[int, ...] = (0, 1, 2, 3),
) -> Sites:
    """Every token at every step, with alternating kinds of output; at t = 1 only tokens of positive reference probability."""
    process = PLACES[name].process
    score, offset = not isinstance(head, m2s.Posterior), isinstance(head, m2s.Posterior) and head.offset == "exact"
    rows = []
    for turn, ((t, s), k) in enumerate(itertools.product(steps, range(process.states))):
        at = min(t, 1 - 1e-3) if excludes_t_one else t
        if t == 1 and process.reference()[k] == 0:
            continue
        for kind in {kinds[turn % len(kinds)], kinds[(turn + 1) % len(kinds)]}:
            rows.append((predictions(name, at, k, kind, score, offset), k, t, min(s, at), at))
    output, *columns = zip(*rows, strict=True)
    return Sites(head, np.array(output), *(np.array(column) for column in columns))


def expected(closed_form: Callable[..., np.ndarray], problem: Sites) -> np.ndarray:
    """A closed form `closed_form(output, k, t, s, at)` at all sites, [N, S]."""
    out = np.empty((len(problem.k), problem.head.process.states))
    for rows, t, s, at in problem.groups():
        out[rows] = closed_form(problem.output[rows], problem.k[rows], t, s, at)
    return out


def same(found: np.ndarray, wanted: np.ndarray, problem: Sites, tolerance: float = EXACT) -> None:
    """Assert that two distributions are equal; the message names the worst site."""
    worst = np.abs(found - wanted).max(-1).argmax()
    at = f"k = {problem.k[worst]}, t = {problem.t[worst]}, s = {problem.s[worst]}, output = {problem.output[worst]}"
    np.testing.assert_allclose(wanted.sum(-1), 1, atol=1e-10)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance, err_msg=at)


def routes(process: m2s.Process, offset: bool, output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
    """Hints for `exact_distribution`: roughly where the three routes of the Bayes step meet, and the middle of the second."""
    mu, p_s, p_t = forms.posterior(process, output, k, at, offset), transition(process, s), transition(process, at)
    step = forms.step_transition(process, s, at)
    into = np.where(k == 0, step[1, k], step[0, k])  # from any other token
    alpha = p_s[0, 0] - p_s[1, 0]
    likelihood_of_other = np.where(k == 0, p_t[1, k], p_t[0, k])
    divisor = np.where(likelihood_of_other > 0, likelihood_of_other, 1.0)
    column = np.moveaxis(p_t[:, k], 0, -1)
    go = into * alpha / divisor
    jump = into * (1 - alpha) * np.divide(mu, column, out=np.zeros_like(mu), where=column > 0).sum(-1)
    hints = np.stack([go, go + jump / 2, go + jump], -1).clip(0, exact_steps.LARGEST)
    return np.concatenate([hints, np.ones((len(k), process.states))], 1)[:, : process.states].clip(0, exact_steps.LARGEST)


def use_blocks_of(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make categorical draws sum over blocks of `size` tokens. Signatures of wider blocks are unwrapped."""
    for name in ("ops.categorical", "ops.reverse_step.cpu"):
        module = importlib.import_module(f"m2s.{name}")
        monkeypatch.setattr(module, "block_width", lambda columns: size)
        monkeypatch.setattr(module, "invert_cdf", inspect.unwrap(module.invert_cdf))
    monkeypatch.setattr(importlib.import_module("m2s.samplers.prediction"), "BLOCK", size)


def score_of(head: m2s.Head, output: np.ndarray, k: np.ndarray, t: float) -> np.ndarray:
    """The score of an output, by transition matrices."""
    if isinstance(head, m2s.LogScore):
        return np.exp(output)
    return forms.score_from_posterior(head.process, forms.posterior(head.process, output, k, t, head.offset == "exact"), k, t)


def rates_of(head: m2s.Head, output: np.ndarray, k: np.ndarray, t: float) -> np.ndarray:
    """The reverse rates of an output."""
    return forms.reverse_rates(head.process, score_of(head, output, k, t), k, t)


HEADS = {
    "posterior": lambda process: m2s.Posterior(process),
    "offset": lambda process: m2s.Posterior(process, offset="exact"),
    "score": lambda process: m2s.LogScore(process),
}
SHORT = [(1.0, 0.5), (0.999, 0.9), (0.5, 0.5 - 1e-9), (0.7, 0.1), (0.5, 0.0), (1e-3, 0.0)]  # t = 1 stands for 1 - t_min
WITH_RATES = [(name, kind) for name in [*RANK_ONE, "gaussian", "birth-death"] for kind in ("posterior", "score")]
PURPOSES = ("route", "token", "jump", "order")


def permutations(length: int) -> np.ndarray:
    """Every order of the sites, as numbers in [0, 1). Independent uniforms have each order with the same probability."""
    return (np.array(list(itertools.permutations(range(length)))) + 0.5) / length


def sharpened(p: np.ndarray, temperature: float, top_k: int | None, top_p: float) -> np.ndarray:
    """Temperature, then top-k, then top-p, row by row, by sorting."""
    out = np.zeros_like(p)
    for row, distribution in zip(out, p, strict=True):
        powered = np.where(distribution > 0, np.exp(log(distribution) / temperature), 0.0)
        powered /= powered.sum()
        order = sorted(range(len(distribution)), key=lambda z: -powered[z])
        if top_k is not None:
            order = [z for z in order if powered[z] >= powered[order[min(top_k, len(order)) - 1]]]
        total, mass = powered[order].sum(), 0.0
        for z in order:
            if mass / total >= top_p:
                break
            row[z] = powered[z]
            mass += powered[z]
        row /= row.sum()
    return out


SHARP = [(0.5, None, 1.0), (1.0, 1, 1.0), (1.0, None, 0.6), (0.7, 2, 0.8), (3.0, 99, 0.999)]
