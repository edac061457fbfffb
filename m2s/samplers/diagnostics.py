"""What happened on the way: for every step, over all samples and free sites."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from m2s.heads import Shifted
from m2s.process import Chain
from m2s.realizability import diagnose
from m2s.samplers.base import Move
from m2s.samplers.prediction import Prediction

CLASSES = 4


@dataclass
class WeightStats:
    """Sums over the free sites of one step."""

    t: float = 0.0
    s: float = 0.0
    sites: int = 0
    jumps: int = 0  # sites whose token changed
    exit_above_one: int = 0  # Euler: sites whose exit mass exceeded one
    several_jumps: int = 0  # tau-leaping: sites with more than one jump
    negative_mass: float = 0.0  # analytic: total mass of negative weights that was dropped
    negative_sites: int = 0
    classes: list[int] = field(default_factory=lambda: [0] * CLASSES)
    """Outside the box, material, boundary, realizable; not counted where there are none: at t = 1, for a finite chain, and from
    left to right."""


class Diagnostics:
    """`steps[m]` is a `Moment`; `masks_left` counts the masks that were drawn from the belief after the last step."""

    def __init__(self) -> None:
        self.steps: list[WeightStats] = []
        self.masks_left = 0

    def add(self, number: int, prediction: Prediction, move: Move, x_s: Tensor, real: slice) -> None:
        while len(self.steps) <= number:
            self.steps.append(WeightStats())
        moment = self.steps[number]
        part, after = prediction.rows(real), x_s[real]
        free = part.free if part.free is not None else torch.ones_like(part.x_t, dtype=torch.bool)
        moment.t, moment.s = float(move.t[real].mean()), float(move.s[real].mean())
        moment.sites += int(free.sum())
        moment.jumps += int(((after != part.x_t) & free).sum())
        for name in ("exit_above_one", "several_jumps"):
            if name in part.notes:
                setattr(moment, name, getattr(moment, name) + int((part.notes[name] & free).sum()))
        if "negative_mass" in part.notes:
            negative = torch.where(free, part.notes["negative_mass"], 0)
            moment.negative_mass += float(negative.sum())
            moment.negative_sites += int((negative > 0).sum())
        inside = (part.t > 0) & (part.t < 1)
        if isinstance(part.process, Chain | Shifted) or not bool((inside | ~free.any(-1)).all()):
            return
        part.t = torch.where(inside, part.t, 0.5)  # of samples without a free site, which do not count
        counts = part.map(_classes)[0][free].bincount(minlength=CLASSES)
        moment.classes = [a + b for a, b in zip(moment.classes, counts.tolist(), strict=True)]

    def total(self, name: str) -> Any:
        """A count of `Moment`, summed over all steps."""
        return sum(getattr(moment, name) for moment in self.steps)

    def __repr__(self) -> str:
        counts = ("sites", "jumps", "exit_above_one", "negative_mass")
        return f"Diagnostics({len(self.steps)} steps, " + ", ".join(f"{name}={self.total(name):g}" for name in counts) + ")"


def _classes(part: Prediction) -> tuple[Tensor]:
    return (diagnose(part.score(), part.x_t, part.t, part.process).classes,)
