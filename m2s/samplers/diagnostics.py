"""Counts of what happened in each step, over all samples and free sites."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from m2s.realizability import SCORE_CLASSES, diagnose
from m2s.samplers.base import Move
from m2s.samplers.prediction import Prediction


@dataclass
class WeightStats:
    """Sums over the free sites of one step."""

    t: float = 0.0
    """Mean time at the start of the step."""
    s: float = 0.0
    """Mean time at its end."""
    sites: int = 0
    """Free sites."""
    jumps: int = 0
    """Sites whose token changed."""
    exit_above_one: int = 0
    """euler: sites whose exit probability exceeded one."""
    several_jumps: int = 0
    """tau_leaping: sites with more than one jump."""
    negative_mass: float = 0.0
    """analytic and last steps: total mass of the negative weights that were dropped."""
    negative_sites: int = 0
    """Sites with negative weights."""
    classes: list[int] = field(default_factory=lambda: [0] * len(SCORE_CLASSES))
    """Scores that are outside the box, material, boundary and realizable (`m2s.classify`). Not counted at t = 1, for a finite
    chain, and in autoregressive generation, where there is no score."""


class Diagnostics:
    """What `m2s.sample(..., diagnostics=True)` counts.

    Args:
        seed: The seed of the samples.

    Attributes:
        seed: The seed that was used, given or drawn: `m2s.sample(..., seed=diagnostics.seed)` draws the same samples again.
        steps: One `WeightStats` for each step.
        masks_left: The number of masks that were left after the last step and then drawn from the prediction.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self.steps: list[WeightStats] = []
        self.masks_left = 0

    def add(self, number: int, prediction: Prediction, move: Move, x_s: Tensor, requested: slice) -> None:
        """Count one step of a micro-batch.

        Args:
            number: The number of the step.
            prediction: The prediction at its start, [M, W].
            move: Its times.
            x_s: The state at its end, [M, W].
            requested: The rows that hold requested samples.
        """
        while len(self.steps) <= number:
            self.steps.append(WeightStats())
        stats = self.steps[number]
        part, after = prediction.samples(requested), x_s[requested]
        free = part.free if part.free is not None else torch.ones_like(part.x_t, dtype=torch.bool)
        stats.t, stats.s = float(move.t[requested].mean()), float(move.s[requested].mean())
        stats.sites += int(free.sum())
        stats.jumps += int(((after != part.x_t) & free).sum())
        for name in ("exit_above_one", "several_jumps"):
            if name in part.notes:
                setattr(stats, name, getattr(stats, name) + int((part.notes[name] & free).sum()))
        if "negative_mass" in part.notes:
            negative = torch.where(free, part.notes["negative_mass"], 0)
            stats.negative_mass += float(negative.sum())
            stats.negative_sites += int((negative > 0).sum())
        self._add_classes(stats, part, free)

    def _add_classes(self, stats: WeightStats, part: Prediction, free: Tensor) -> None:
        """Count the classes of the scores, where there are scores."""
        inside = (part.t > 0) & (part.t < 1)
        if not part.process.has_rates or not bool((inside | ~free.any(-1)).all()):
            return
        part.t = torch.where(inside, part.t, 0.5)  # placeholder for samples without a free site: not counted
        counts = part.map(_classes)[0][free].bincount(minlength=len(SCORE_CLASSES))
        stats.classes = [a + b for a, b in zip(stats.classes, counts.tolist(), strict=True)]

    def total(self, name: str) -> Any:
        """Return a count of `WeightStats`, summed over all steps.

        Args:
            name: A field of `WeightStats` that holds a number, such as "jumps".
        """
        return sum(getattr(stats, name) for stats in self.steps)

    def __repr__(self) -> str:
        counts = ("sites", "jumps", "exit_above_one", "negative_mass")
        return (
            f"Diagnostics(seed={self.seed}, {len(self.steps)} steps, "
            + ", ".join(f"{name}={self.total(name):g}" for name in counts)
            + ")"
        )


def _classes(part: Prediction) -> tuple[Tensor]:
    """The class of the score at every site."""
    return (diagnose(part.score(), part.x_t, part.t, part.process).classes,)
