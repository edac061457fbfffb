"""The exact distribution of one step of a sampler: a step is a function of uniforms, and this integrates over them.

`exact_distribution` finds where the next token changes, in every uniform that a step uses, by bisection to the last digit. It
then adds up the volumes of the cells between the changes. A change that it missed would assign a cell's mass to a wrong token,
so a test could only fail by it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jaxtyping
import numpy as np
import torch

import m2s
from m2s.samplers import CounterNoise, LogitsProcessor, Move, Prediction, Sampler

LARGEST = 1 - 2.0**-53  # the largest uniform
SCAN = np.unique(np.concatenate([np.linspace(0, LARGEST, 9), [1e-9, 1e-6, 1e-3, 1 - 1e-3, 1 - 1e-6, 1 - 1e-9]]))
Purpose = str | int
Outcome = Callable[[np.ndarray, dict[Purpose, np.ndarray]], np.ndarray]  # (sites [M], uniforms [M] each) -> outcomes [M]


class GivenNoise(CounterNoise):
    """Noise with given numbers. A purpose that was not given is an error, so that a step cannot use a uniform unnoticed."""

    def __init__(self, sites: dict[Purpose, torch.Tensor], once: dict[Purpose, torch.Tensor] | None = None) -> None:
        self.each, self.single = sites, once or {}

    def __call__(self, purpose: Purpose) -> torch.Tensor:
        return self.each[purpose]

    def once(self, purpose: Purpose) -> torch.Tensor:
        return self.single[purpose]


def tensor(value: np.ndarray | float) -> torch.Tensor:
    """A copy of an array as a tensor."""
    return torch.from_numpy(np.array(value))


@dataclass
class Sites:
    """N independent sites, each with its own network output, token and times.

    Args:
        head: What the output means.
        output: Network outputs, [N, S].
        k: Current tokens, [N].
        t: Times of the plan at the start of the step, [N].
        s: Times at its end, [N].
        at: Times at which the prediction holds, [N]: t, or 1 - t_min at an open start.
        logits_processor: Sharpening and guidance.
        unconditional: Outputs without the condition, [N, S], under guidance.
    """

    head: m2s.Head
    output: np.ndarray
    k: np.ndarray
    t: np.ndarray
    s: np.ndarray
    at: np.ndarray
    logits_processor: LogitsProcessor = LogitsProcessor()  # noqa: RUF009
    unconditional: np.ndarray | None = None

    def prediction(self, rows: np.ndarray) -> Prediction:
        """The prediction at some sites, which may repeat, as samples of length 1."""
        unconditional = None if self.unconditional is None else tensor(self.unconditional[rows][:, None])
        token, time = tensor(self.k[rows][:, None]), tensor(self.at[rows])
        return Prediction(self.head, tensor(self.output[rows][:, None]), token, time, self.logits_processor, unconditional)

    def outcome(self, sampler: Sampler) -> Outcome:
        """One step of a sampler, as a function of its uniforms."""

        def step(rows: np.ndarray, uniforms: dict[Purpose, np.ndarray]) -> np.ndarray:
            given = GivenNoise({purpose: tensor(u[:, None]) for purpose, u in uniforms.items()})
            move = Move(tensor(self.t[rows]), tensor(self.s[rows]))
            return sampler.step(self.prediction(rows), move, given).squeeze(-1).numpy()

        return step

    def distribution(
        self, sampler: Sampler, purposes: Sequence[Purpose], hints: dict[Purpose, np.ndarray] | None = None
    ) -> np.ndarray:
        """The exact distribution of the next token, [N, S]."""
        return exact_distribution(self.outcome(sampler), len(self.k), self.head.process.states, purposes, hints)

    def groups(self) -> list[tuple[np.ndarray, float, float, float]]:
        """Sites with the same times, as (sites, t, s, at)."""
        times = np.stack([self.t, self.s, self.at], 1)
        unique, of = np.unique(times, axis=0, return_inverse=True)
        return [(np.flatnonzero(of.reshape(-1) == i), *map(float, row)) for i, row in enumerate(unique)]


def exact_distribution(
    outcome: Outcome,
    sites: int,
    states: int,
    purposes: Sequence[Purpose],
    hints: dict[Purpose, np.ndarray] | None = None,
    ways: int = 12,
) -> np.ndarray:
    """Pr(outcome = y) at every site, over independent uniforms.

    Args:
        outcome: The step: (sites [M], uniforms [M] for each purpose) -> outcomes [M].
        sites: N, the number of sites.
        states: S, the number of outcomes.
        purposes: The uniforms that the step uses.
        hints: Values [N, H] of a uniform that are evaluated as well. A cell of volume 1e-9 would not be found by chance.
        ways: Along each uniform, the number of combinations of the others that are evaluated.

    Returns:
        Probabilities, [N, S].
    """
    volume, result = cells(outcome, sites, purposes, hints or {}, ways)
    out = np.zeros((sites, states))
    for y in range(states):
        out[:, y] = np.where(result == y, volume, 0.0).sum(-1)
    return out


def cells(
    outcome: Outcome, sites: int, purposes: Sequence[Purpose], hints: dict[Purpose, np.ndarray], ways: int
) -> tuple[np.ndarray, np.ndarray]:
    """The volume of every cell on which the outcome is constant, and the outcome there, both [N, cells].

    Arguments are those of `exact_distribution`.
    """
    changes = [
        (np.ones((sites, 0)), np.ones((sites, 0))) for _ in purposes
    ]  # values just before and at each change, for every uniform
    probes = [np.tile([0.0, 0.37, LARGEST], (sites, 1)) for _ in purposes]
    scans = [np.concatenate([np.tile(SCAN, (sites, 1)), hints.get(p, np.ones((sites, 0)))], 1) for p in purposes]

    def at(rows: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        return outcome(rows, dict(zip(purposes, np.minimum(uniforms, LARGEST).T, strict=True)))

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
        raise AssertionError("the search for changes did not end after 8 rounds")
    probes = [_middles(high) for _, high in changes]
    points = _product(probes)
    result = at(np.repeat(np.arange(sites), points.shape[1]), points.reshape(-1, len(purposes)))
    volume = _product([np.diff(_edges(high), axis=1) for _, high in changes]).prod(-1)
    return volume, result.reshape(volume.shape)


def _edges(high: np.ndarray) -> np.ndarray:
    """The edges of the cells along one uniform: 0, the changes, 1."""
    ends = np.zeros((len(high), 1)), np.ones((len(high), 1))
    return np.concatenate([ends[0], high, ends[1]], 1)


def _middles(high: np.ndarray) -> np.ndarray:
    """The midpoints of the cells along one uniform."""
    edges = _edges(high)
    return np.minimum((edges[:, 1:] + edges[:, :-1]) / 2, LARGEST)


def _product(values: list[np.ndarray]) -> np.ndarray:
    """Every combination of the columns of [N, P] arrays, site by site: [N, combinations, arrays]."""
    grids = np.indices([value.shape[1] for value in values]).reshape(len(values), -1)
    return np.stack([value[:, grid] for value, grid in zip(values, grids, strict=True)], -1)


def _some(probes: list[np.ndarray], axis: int, ways: int, number: int) -> np.ndarray:
    """At most `ways` combinations of the other uniforms, different in each round. The column of `axis` is a placeholder."""
    points = _product([value[:, :1] if i == axis else value for i, value in enumerate(probes)])
    return points[:, np.random.default_rng(number).permutation(points.shape[1])[:ways]]


At = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _look(at: At, axis: int, others: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, ...]:
    """Neighboring points [N, Q] of one uniform between which the outcome changes, for some combination of the others.

    Returns (site, axis, all uniforms, low end, high end, outcome at the low end, outcome at the high end).
    """
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

    Each interval is cut into several parts, because a call costs more than its rows.
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
    """Disable the shape checks of signatures, which are slow, for calls that were made with checks before."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def _merge(
    known: tuple[np.ndarray, np.ndarray], site: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The known and the new changes, in order. Sites with fewer changes are padded with ones."""
    sites, count = known[0].shape
    old = np.stack([np.repeat(np.arange(sites), count), *(ends.reshape(-1) for ends in known)], 1)
    rows = np.concatenate([old, np.stack([site, low, high], 1)])
    rows = np.unique(rows[rows[:, 2] < 1], axis=0)
    each = np.bincount(rows[:, 0].astype(int), minlength=sites)
    out = np.ones((2, sites, each.max()))
    out[:, rows[:, 0].astype(int), np.concatenate([np.arange(n) for n in each]).astype(int)] = rows[:, 1:].T
    return out[0], out[1]
