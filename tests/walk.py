"""Exact laws of samplers: a step is a function of uniforms, and this integrates it; closed forms of what it should be; chains.

`law` finds where the next token changes, in every uniform that a step asks for, by bisection to the last digit, and adds up the
volumes of the cells. A change it overlooked would put a cell's mass at the wrong token, so that a test could only fail by it.
The closed forms are numpy over K x K matrices, [N, L, S] over sequences, sites and states like those of `oracle.py`.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jaxtyping
import numpy as np
import torch

import m2s
from m2s.samplers import CounterNoise, LogitsProcessor, Move, Prediction, Sampler
from m2s.samplers.grid import GRIDS

LAST = 1 - 2.0**-53  # the greatest uniform
SCAN = np.unique(np.concatenate([np.linspace(0, LAST, 9), [1e-9, 1e-6, 1e-3, 1 - 1e-3, 1 - 1e-6, 1 - 1e-9]]))
Purpose = str | int
Outcome = Callable[[np.ndarray, dict[Purpose, np.ndarray]], np.ndarray]  # (sites [M], uniforms [M] each) -> outcomes [M]


class Given(CounterNoise):
    """Noise whose every number is given; a purpose that was not given is an error, so that no uniform goes unnoticed."""

    def __init__(self, sites: dict[Purpose, torch.Tensor], once: dict[Purpose, torch.Tensor] | None = None) -> None:
        self.each, self.single = sites, once or {}

    def __call__(self, purpose: Purpose) -> torch.Tensor:
        return self.each[purpose]

    def once(self, purpose: Purpose) -> torch.Tensor:
        return self.single[purpose]


def tensor(value: np.ndarray | float) -> torch.Tensor:
    return torch.from_numpy(np.array(value))


def log(p: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(p)


@dataclass
class Sites:
    """Sites with a belief of their own each: output [N, S], token and times [N]. `t` is the plan's, `at` the belief's."""

    head: m2s.Head
    output: np.ndarray
    k: np.ndarray
    t: np.ndarray
    s: np.ndarray
    at: np.ndarray
    logits_processor: LogitsProcessor = LogitsProcessor()  # noqa: RUF009
    without: np.ndarray | None = None

    def prediction(self, rows: np.ndarray) -> Prediction:
        without = None if self.without is None else tensor(self.without[rows][:, None])
        token, time = tensor(self.k[rows][:, None]), tensor(self.at[rows])
        return Prediction(self.head, tensor(self.output[rows][:, None]), token, time, self.logits_processor, without)

    def outcome(self, sampler: Sampler) -> Outcome:
        def step(rows: np.ndarray, uniforms: dict[Purpose, np.ndarray]) -> np.ndarray:
            given = Given({purpose: tensor(u[:, None]) for purpose, u in uniforms.items()})
            move = Move(tensor(self.t[rows]), tensor(self.s[rows]))
            return sampler.step(self.prediction(rows), move, given).squeeze(-1).numpy()

        return step

    def distribution(
        self, sampler: Sampler, purposes: Sequence[Purpose], hints: dict[Purpose, np.ndarray] | None = None
    ) -> np.ndarray:
        """The exact law of the next token, [N, S]."""
        return distribution(self.outcome(sampler), len(self.k), self.head.process.states, purposes, hints)

    def groups(self) -> list[tuple[np.ndarray, float, float, float]]:
        """Rows that share their times, as (rows, t, s, at)."""
        times = np.stack([self.t, self.s, self.at], 1)
        unique, of = np.unique(times, axis=0, return_inverse=True)
        return [(np.flatnonzero(of.reshape(-1) == i), *map(float, row)) for i, row in enumerate(unique)]


def distribution(
    outcome: Outcome,
    sites: int,
    states: int,
    purposes: Sequence[Purpose],
    hints: dict[Purpose, np.ndarray] | None = None,
    ways: int = 12,
) -> np.ndarray:
    """Pr(outcome = y) at every site, [N, S], over independent uniforms for the purposes.

    `hints` [N, H] are places to look at as well: a cell of 1e-9 between two of one outcome is not found by chance. Along each
    uniform, `ways` combinations of the others are looked at.
    """
    volume, result = cells(outcome, sites, purposes, hints or {}, ways)
    out = np.zeros((sites, states))
    for y in range(states):
        out[:, y] = np.where(result == y, volume, 0.0).sum(-1)
    return out


def cells(
    outcome: Outcome, sites: int, purposes: Sequence[Purpose], hints: dict[Purpose, np.ndarray], ways: int
) -> tuple[np.ndarray, np.ndarray]:
    """The volume of every cell on which the outcome is constant, and the outcome there, both [N, cells]."""
    changes = [(np.ones((sites, 0)), np.ones((sites, 0))) for _ in purposes]  # just before and at each, of every uniform
    probes = [np.tile([0.0, 0.37, LAST], (sites, 1)) for _ in purposes]
    scans = [np.concatenate([np.tile(SCAN, (sites, 1)), hints.get(p, np.ones((sites, 0)))], 1) for p in purposes]

    def at(rows: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        return outcome(rows, dict(zip(purposes, np.minimum(uniforms, LAST).T, strict=True)))

    for number in range(8):
        intervals = [
            _look(at, axis, _some(probes, axis, ways, number), np.sort(np.concatenate([scan, *known], 1), axis=1))
            for axis, (scan, known) in enumerate(zip(scans, changes, strict=True))
        ]
        found = _bisect(at, [np.concatenate(column) for column in zip(*intervals, strict=True)])
        new = [_merge(known, *(column[found[1] == axis] for column in found[::2])) for axis, known in enumerate(changes)]
        if all((n[1] < 1).sum() == (known[1] < 1).sum() for n, known in zip(new, changes, strict=True)):
            break
        changes, probes = new, [_middles(high) for _, high in new]
    else:
        raise AssertionError("the search for changes did not come to an end")
    probes = [_middles(high) for _, high in changes]
    points = _product(probes)
    result = at(np.repeat(np.arange(sites), points.shape[1]), points.reshape(-1, len(purposes)))
    volume = _product([np.diff(_edges(high), axis=1) for _, high in changes]).prod(-1)
    return volume, result.reshape(volume.shape)


def _edges(high: np.ndarray) -> np.ndarray:
    ends = np.zeros((len(high), 1)), np.ones((len(high), 1))
    return np.concatenate([ends[0], high, ends[1]], 1)


def _middles(high: np.ndarray) -> np.ndarray:
    edges = _edges(high)
    return np.minimum((edges[:, 1:] + edges[:, :-1]) / 2, LAST)


def _product(values: list[np.ndarray]) -> np.ndarray:
    """Every combination of the columns of [N, P] arrays, site by site: [N, combinations, arrays]."""
    grids = np.indices([value.shape[1] for value in values]).reshape(len(values), -1)
    return np.stack([value[:, grid] for value, grid in zip(values, grids, strict=True)], -1)


def _some(probes: list[np.ndarray], axis: int, ways: int, number: int) -> np.ndarray:
    """At most `ways` of the combinations of the other uniforms, other ones each time; this one's column is to be filled."""
    points = _product([value[:, :1] if i == axis else value for i, value in enumerate(probes)])
    return points[:, np.random.default_rng(number).permutation(points.shape[1])[:ways]]


At = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _look(at: At, axis: int, others: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, ...]:
    """Neighbours among the points [N, Q] of one uniform between which the outcome changes, with any of the others' values:
    (site, axis, all uniforms, low end, high end, outcome there, and there)."""
    (sites, ways, count), width = others.shape, points.shape[1]
    uniforms = np.broadcast_to(others[:, None], (sites, width, ways, count)).copy()
    uniforms[..., axis] = points[:, :, None]
    seen = at(np.repeat(np.arange(sites), width * ways), uniforms.reshape(-1, count)).reshape(sites, width, ways)
    differs = seen[:, 1:] != seen[:, :-1]
    site, left = np.nonzero(differs.any(-1))
    way = differs[site, left].argmax(-1)
    ends = points[site, left], points[site, left + 1]
    return site, np.full(len(site), axis), others[site, way], *ends, seen[site, left, way], seen[site, left + 1, way]


def _bisect(at: At, intervals: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Every change between the ends, to the last digit: (site, axis, low, axis, high), the axis twice for easy slicing.

    Each interval is cut into as many parts as make a call of moderate size, for a call costs more than its rows do.
    """
    done = []
    while True:
        site, axis, uniforms, low, high, left, right = intervals
        middle = (low + high) / 2
        short = (high - low <= 1.2e-16) | (middle <= low) | (middle >= high)
        done.append((site[short], axis[short], low[short], axis[short], high[short]))
        if short.all():
            return tuple(np.concatenate(column) for column in zip(*done, strict=True))
        site, axis, uniforms, low, high, left, right = (column[~short] for column in intervals)
        parts = int(np.clip(3000 // len(site), 2, 64))
        points = low[:, None] + (high - low)[:, None] * (np.arange(parts + 1) / parts)
        points[:, 0], points[:, -1] = low, high
        inner = np.repeat(uniforms, parts - 1, axis=0)
        inner[np.arange(len(inner)), np.repeat(axis, parts - 1)] = points[:, 1:-1].reshape(-1)
        with unchecked():
            here = at(np.repeat(site, parts - 1), inner).reshape(len(site), parts - 1)
        seen = np.concatenate([left[:, None], here, right[:, None]], 1)
        row, cut = np.nonzero(seen[:, 1:] != seen[:, :-1])
        ends = points[row, cut], points[row, cut + 1], seen[row, cut], seen[row, cut + 1]
        intervals = [site[row], axis[row], uniforms[row], *ends]


@contextmanager
def unchecked() -> Iterator[None]:
    """Shapes in signatures are not checked: the same call was just made with them checked, and they cost more than it does."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def _merge(
    known: tuple[np.ndarray, np.ndarray], site: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The changes that were known and those found, in order; sites with fewer are filled up with ones."""
    sites, count = known[0].shape
    old = np.stack([np.repeat(np.arange(sites), count), *(ends.reshape(-1) for ends in known)], 1)
    rows = np.concatenate([old, np.stack([site, low, high], 1)])
    rows = np.unique(rows[rows[:, 2] < 1], axis=0)
    each = np.bincount(rows[:, 0].astype(int), minlength=sites)
    out = np.ones((2, sites, each.max()))
    out[:, rows[:, 0].astype(int), np.concatenate([np.arange(n) for n in each]).astype(int)] = rows[:, 1:].T
    return out[0], out[1]


# ---------------------------------------------------------------------------------------------------------------- closed forms


def times(*values: float) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(value, dtype=torch.float64) for value in values)


def kernel(process: m2s.Process, t: float) -> np.ndarray:
    return process.kernel(*times(t)).numpy()


def between(process: m2s.Process, s: float, t: float) -> np.ndarray:
    return process.step_kernel(*times(s, t)).numpy()


def forward_rates(process: m2s.Process, t: float) -> np.ndarray:
    rates = process.rates(*times(t)).numpy().copy()
    np.fill_diagonal(rates, 0.0)
    return rates


def one_hot(k: np.ndarray, states: int) -> np.ndarray:
    return np.eye(states)[k]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def posterior(process: m2s.Process, logits: np.ndarray, k: np.ndarray, t: float, offset: bool = False) -> np.ndarray:
    """mu over all states; mu_z ∝ e^{logit_z} P_t(k|z) with the offset; only z from which k can be reached."""
    column = np.moveaxis(kernel(process, t)[:, k], 0, -1)[..., : process.vocab]
    clean = logits[..., : process.vocab] + (log(column) if offset else 0.0)
    if process.mask is not None:  # a clean token under a mask alone has one origin; every other process reaches all
        clean = np.where(column > 0, clean, -np.inf)
    nowhere = (clean == -np.inf).all(-1, keepdims=True)  # a token that the reference law at t = 1 never draws
    mu = softmax(np.where(nowhere, 0.0, clean))
    return np.concatenate([mu, np.zeros((*k.shape, process.states - process.vocab))], -1)


def bridge(process: m2s.Process, mu: np.ndarray, k: np.ndarray, t: float) -> np.ndarray:
    """s_y = sum_z mu_z P_t(y|z) / P_t(k|z), 1 at k."""
    p = kernel(process, t)
    column = np.moveaxis(p[:, k], 0, -1)
    w = np.divide(mu, column, out=np.zeros_like(mu), where=column > 0)
    return np.where(one_hot(k, process.states) > 0, 1.0, w @ p)


def bayes(process: m2s.Process, mu: np.ndarray, k: np.ndarray, t: float, s: float) -> np.ndarray:
    """Eq. 19: sum_z mu_z P_s(y|z) P_{t|s}(k|y) / P_t(k|z)."""
    column = np.moveaxis(kernel(process, t)[:, k], 0, -1)
    w = np.divide(mu, column, out=np.zeros_like(mu), where=column > 0)
    return (w @ kernel(process, s)) * np.moveaxis(between(process, s, t)[:, k], 0, -1)


def reverse_rates(process: m2s.Process, score: np.ndarray, k: np.ndarray, t: float) -> np.ndarray:
    """Q_t(y -> k) s_y, 0 at k."""
    weight = np.moveaxis(forward_rates(process, t)[:, k], 0, -1)
    return np.where(weight > 0, weight, 0.0) * np.where(weight > 0, score, 0.0)


def euler(rates: np.ndarray, k: np.ndarray, step: float) -> np.ndarray:
    """(t - s) times the rates, normalised where they exceed one, and the rest stays."""
    moved = step * rates
    moved = moved / np.maximum(moved.sum(-1, keepdims=True), 1.0)
    return moved + one_hot(k, rates.shape[-1]) * (1 - moved.sum(-1, keepdims=True))


def tau_leap(rates: np.ndarray, k: np.ndarray, step: float) -> np.ndarray:
    """Exactly one jump of a Poisson number moves."""
    mean = step * rates.sum(-1, keepdims=True)
    moved = step * rates * np.exp(-mean)
    return moved + one_hot(k, rates.shape[-1]) * (1 - moved.sum(-1, keepdims=True))


def analytic_weights(process: m2s.Process, score: np.ndarray, k: np.ndarray, t: float, s: float) -> np.ndarray:
    """(s P_{t|s}^{-1})_y P_{t|s}(k|y), by a linear solve."""
    score = np.where(one_hot(k, process.states) > 0, 1.0, score)
    step = between(process, s, t)
    earlier = np.linalg.solve(step.T, score.reshape(-1, process.states).T).T.reshape(score.shape)
    return earlier * np.moveaxis(step[:, k], 0, -1)


def analytic(process: m2s.Process, score: np.ndarray, k: np.ndarray, t: float, s: float) -> np.ndarray:
    """The positive part of the weights, normalised; the last step does not lead to the mask. NaN where nothing is left."""
    weights = np.maximum(analytic_weights(process, score, k, t, s), 0.0)
    if process.mask is not None and s == 0:
        weights[..., process.mask] = 0.0
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, out=np.full_like(weights, np.nan), where=total > 0)


def remasking(process: m2s.Process, mu: np.ndarray, k: np.ndarray, t: float, s: float, strength: float) -> np.ndarray:
    """ReMDM: sigma = strength min(1, (1 - alpha_s)/alpha_t)."""
    alpha_t, alpha_s = (float(kernel(process, time)[0, 0]) for time in (t, s))
    sigma = strength * (min(1.0, (1 - alpha_s) / alpha_t) if alpha_t > 0 else 1.0)
    mask = np.eye(process.states)[process.mask]
    reveal = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
    masked = (k == process.mask)[..., None]
    return np.where(masked, reveal * mu + (1 - reveal) * mask, sigma * mask + (1 - sigma) * one_hot(k, process.states))


# --------------------------------------------------------------------------------------------------------------------- chains


def parallel(distributions: np.ndarray) -> np.ndarray:
    """The matrix of one step in which every site moves by its own law: [N, L, S] -> [N, S^L], the last site fastest."""
    out = distributions[:, 0]
    for site in range(1, distributions.shape[1]):
        out = (out[:, :, None] * distributions[:, site][:, None, :]).reshape(len(out), -1)
    return out


Beliefs = Callable[[np.ndarray, float], np.ndarray]  # (all sequences [N, L], the network's time) -> output [N, L, S]
Form = Callable[[np.ndarray, np.ndarray, float, float, float], np.ndarray]  # (belief, k, plan's t, s, belief's t) -> laws


def terminal(
    process: m2s.Process,
    length: int,
    network: Beliefs,
    form: Form,
    ends: Sequence[float],
    open_start: bool,
    t_min: float,
) -> np.ndarray:
    """The exact distribution over all S^L states at the end of a walk over the times `ends`, from the reference."""
    x = np.array(list(itertools.product(range(process.states), repeat=length)))
    p = parallel(np.broadcast_to(process.reference().numpy(), (1, length, process.states)))[0]
    for t, s in itertools.pairwise(ends):
        at = min(t, 1 - t_min) if open_start else t
        p = p @ parallel(form(network(x, seen(t, t_min)), x, t, min(s, at), at))
    return p


def seen(t: float, t_min: float) -> float:
    """The time that a network is told."""
    return min(max(t, t_min), 1 - t_min)


def grid(name: str, steps: int, end: float | None = None) -> list[float]:
    """The times of a walk; with `end`, squeezed into [end, 1] and then 0, as the analytic sampler has them."""
    ends = GRIDS[name](steps)
    return ends if end is None else [end + (1 - end) * t for t in ends] + [0.0]


def total_variation(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.abs(p - q).sum() / 2)
