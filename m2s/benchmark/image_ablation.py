"""Part "image-ablation": a training step of a U-Net without one of the changes that were made for its speed.

As in `ablation.py`, two trainers with everything run beside those without one thing; their difference is the noise. Each
trainer is built, compiled and run inside its own replacement.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from m2s.benchmark.ablation import BASELINE, REPEATED, SMALL, inside, saved_share
from m2s.benchmark.comparison import Comparison, release
from m2s.benchmark.images import TRAINED, Case, configuration, is_small, random_images
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting
from m2s.benchmark.train import MakeStep, Step, time_training, trainer
from m2s.heads import Posterior
from m2s.ops import group_norm
from m2s.patches import AttributePatches
from m2s.training import trainer as training

ROUNDS = 12
Replacement = tuple[Any, str, Any]  # an owner, the name of its attribute, and the value in its place


def _never(*_: Any) -> bool:
    """In the place of a function that decides."""
    return False


REPLACEMENTS: Mapping[str, Mapping[str, Replacement]] = {
    "train cifar10": {
        "group norm": (group_norm, "is_fused", _never),
        "channels-last weights": (training, "uses_channels_last", _never),
        "autotuning": (training, "AUTOTUNE", False),
    },
    "train mnist": {
        "group norm": (group_norm, "is_fused", _never),
        "channels-last weights": (training, "uses_channels_last", _never),
        "autotuning": (training, "AUTOTUNE", False),
    },
    "train mnist, d3pm-gaussian": {"float32 loss": (Posterior, "softmax_is_leave_one_out", False)},
}
"""What is left out, by the case of the part "images"."""


@contextmanager
def _replaced(replacement: Replacement | None) -> Iterator[None]:
    """Apply a replacement, or none."""
    with AttributePatches() as patches:
        if replacement is not None:
            patches.set(*replacement)
        yield


def make_without(setting: Setting, case: Case, replacement: Replacement | None) -> tuple[Step, torch.nn.Module]:
    """Set up a trainer that is built and run with a replacement.

    Args:
        setting: Device, seed and sizes.
        case: What is trained.
        replacement: The replacement; None: nothing is left out.

    Returns:
        A function that takes one training step and returns its loss, and the network.
    """
    make = partial(trainer, configuration(setting, case), random_images(setting, case))
    return inside(partial(_replaced, replacement), make)


@PARTS.register("image-ablation")
def measure(setting: Setting) -> dict[str, Any]:
    """Compare training steps of U-Nets without one change with steps that have all.

    Args:
        setting: Device, repeats and seed.

    Returns:
        Times and memory, and `saved`: for each change the time and the memory that it saves, as shares of a step, with the
        standard error over rounds; "nothing" compares two equal trainers. `below` names the changes that save less than
        `SMALL`.
    """
    comparison = Comparison(setting)
    saved: dict[str, dict[str, float | None]] = {}
    reason = setting.why_unavailable("fused")
    if reason:
        comparison.skipped.append(f"kernels fused: {reason}")
    for name, every in REPLACEMENTS.items():
        replacements = {what: one for what, one in every.items() if not (reason and what == "group norm")}
        found, make = Comparison(setting), partial(make_without, setting, TRAINED[name])
        makers: dict[str, MakeStep] = {BASELINE: partial(make, None)}
        makers |= {f"without {what}": partial(make, replacement) for what, replacement in replacements.items()}
        makers[REPEATED] = partial(make, None)
        models, _ = time_training(found, makers, 2 if is_small(setting) else ROUNDS)
        models.clear()
        release()
        comparison.results |= {f"{name}: {what}": result for what, result in found.results.items()}
        comparison.skipped += found.skipped
        saved |= {f"{name}: {what}": saved_share(found, f"without {what}") for what in replacements}
        saved[f"{name}: nothing"] = saved_share(found, REPEATED)
    changes = [name for name in saved if not name.endswith(": nothing")]
    below = [name for name in changes if (share := saved[name]["time"]) is not None and share < SMALL]
    what = "one training step of a U-Net without one change"
    return comparison.result(what, {}, [], saved=saved, below=", ".join(below) or None)
