"""Sums over audited scores. They can be merged, and stored as JSON."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.realizability import SCORE_CLASSES


@dataclass
class Counts:
    """Counts of score vectors, either before or after projection.

    Args:
        classes: Vectors in each of `SCORE_CLASSES`.
        strict: The same without a tolerance on the box, which is the paper's count.
        coordinates: Single scores outside the box.
        coordinates_strict: The same without a tolerance.
        signed: Vectors whose signed posterior has an entry below -1e-6, inside the box or not.
        overlap: Those of them that are outside the box, without a tolerance.
        signed_mass: Minus the sum of the negative entries of the signed posteriors, summed over vectors.
        signed_mass_most: The greatest of these.
        negative: Vectors with negative weights in the analytic step.
        negative_mass: Minus the sum of the negative weights, summed over vectors.
        negative_mass_most: The greatest of these.
    """

    classes: list[int] = field(default_factory=lambda: [0] * len(SCORE_CLASSES))
    strict: list[int] = field(default_factory=lambda: [0] * len(SCORE_CLASSES))
    coordinates: int = 0
    coordinates_strict: int = 0
    signed: int = 0
    overlap: int = 0
    signed_mass: float = 0.0
    signed_mass_most: float = 0.0
    negative: int = 0
    negative_mass: float = 0.0
    negative_mass_most: float = 0.0


@dataclass
class LogHistogram:
    """A histogram of real numbers that needs no range.

    Bin i holds the numbers near sign(i) FINE (10^(|i|/PER_DECADE) - 1): linear near 0 and logarithmic far away.

    Args:
        count: How many numbers were added.
        total: Their sum.
        bins: How many are in each bin, by the index of the bin.
    """

    FINE, PER_DECADE, END = 1e-6, 100, 1e12

    count: int = 0
    total: float = 0.0
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, values: Float[Tensor, "N"]) -> None:
        """Add numbers.

        Args:
            values: The numbers, [N]. They are clamped to [-1e12, 1e12].
        """
        values = values.double().clamp(-self.END, self.END)
        index = (values.sign() * self.PER_DECADE * torch.log10(1 + values.abs() / self.FINE)).round().long()
        self.count += len(values)
        self.total += float(values.sum())
        for place, times in zip(*(part.tolist() for part in index.unique(return_counts=True)), strict=True):
            self.bins[place] = self.bins.get(place, 0) + times

    def quantile(self, probability: float) -> float:
        """Return the least number with at least this fraction of all at or below it, with a relative error of about 1%.

        Args:
            probability: The fraction, in [0, 1].
        """
        seen, place = 0, 0
        for place in sorted(self.bins):
            seen += self.bins[place]
            if seen >= probability * self.count:
                break
        size = self.FINE * (10 ** (abs(place) / self.PER_DECADE) - 1)
        return size if place >= 0 else -size


@dataclass
class StepStats:
    """Sums over the audited sites of one sampling step.

    Args:
        samples: The number of samples.
        t: The sum over samples of the time at the start of the step.
        s: The sum over samples of the time at its end.
        sites: The number of audited sites.
        scores: The number of single scores: candidates y with a forward rate into the token of a site.
        before: Counts of the scores as they are.
        after: Counts of the projected scores.
        moved: The sum over sites of |s_projected - s| / |s|.
        moved_most: The greatest of these.
        excess: Under absorbing noise: sum(s) / c - 1 at each site, with c = alpha/(1 - alpha).
    """

    samples: int = 0
    t: float = 0.0
    s: float = 0.0
    sites: int = 0
    scores: int = 0
    before: Counts = field(default_factory=Counts)
    after: Counts = field(default_factory=Counts)
    moved: float = 0.0
    moved_most: float = 0.0
    excess: LogHistogram = field(default_factory=LogHistogram)


Stats = TypeVar("Stats", StepStats, Counts, LogHistogram)


def merge_stats(a: Stats, b: Stats) -> Stats:
    """Return the sums over everything that `a` and `b` have counted.

    Args:
        a: Some sums.
        b: Other sums of the same class.
    """
    return type(a)(**{part.name: _merge_field(part.name, getattr(a, part.name), getattr(b, part.name)) for part in fields(a)})


def _merge_field(name: str, a: Any, b: Any) -> Any:
    """Merge one field. Names that end in `_most` are maxima, all others are sums."""
    if is_dataclass(a):
        return merge_stats(a, b)
    if isinstance(a, dict):
        return {place: a.get(place, 0) + b.get(place, 0) for place in sorted({**a, **b})}
    if isinstance(a, list):
        return [x + y for x, y in zip(a, b, strict=True)]
    return max(a, b) if name.endswith("_most") else a + b


def stats_from_json(steps: list[dict[str, Any]]) -> list[StepStats]:
    """Restore the sums of every step from what `dataclasses.asdict` and JSON made of them.

    Args:
        steps: One dictionary for each step.

    Returns:
        One `StepStats` for each step.

    Raises:
        ValueError: A number is missing or impossible.
    """

    def histogram(stored: dict[str, Any]) -> LogHistogram:
        return LogHistogram(**{**stored, "bins": {int(i): n for i, n in stored["bins"].items()}})  # JSON keys are strings

    found = [
        StepStats(
            **{
                **step,
                "before": Counts(**step["before"]),
                "after": Counts(**step["after"]),
                "excess": histogram(step["excess"]),
            }
        )
        for step in steps
    ]
    if not all(_is_like(stats, StepStats()) for stats in found):
        raise ValueError("a count is missing or impossible")
    return found


def _is_like(value: Any, default: Any) -> bool:
    """Whether a value that was read from a file can be that of a field with this default."""
    if is_dataclass(default):
        return all(_is_like(getattr(value, part.name), getattr(default, part.name)) for part in fields(default))
    if isinstance(default, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return type(value) is type(default) and len(value) >= len(default) and all(_is_like(part, 0) for part in parts)
    if isinstance(default, int):
        return type(value) is int and 0 <= value < 2**63
    return type(value) in (int, float) and abs(value) <= 1e300
