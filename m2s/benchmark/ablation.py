"""Part "ablation": a training step without one of its auxiliary kernels, for each of them.

All trainers use the fused backend. In each of them one operation is replaced by the form that would run if its kernel did not
exist; everything around it stays as it is. Two trainers with all kernels run beside them: the difference between these two is
the noise of the measurement.

A training step is compiled, and recorded as a CUDA graph in its fourth call. The choice of an operation is therefore made while
the trainer is built and in its first steps, except for operations outside the graph. So the replacement is active in every call
of a trainer, and in no call of another.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from m2s.benchmark.comparison import Comparison, release
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting
from m2s.benchmark.train import MakeStep, RandomTokens, Step, configuration, time_training, trainer
from m2s.data.source import Source
from m2s.models import dit
from m2s.ops import adamw, norm, philox, rotary
from m2s.ops.dense import dense
from m2s.patches import AttributePatches

BASELINE, REPEATED = "all kernels", "all kernels, again"
GROUP = 4  # operations whose trainers are in memory at once, besides the two with all kernels: 10 to 15 GB each
ROUNDS = 24  # over all trainers of a group: the clock of a GPU changes over time
NORMAL_DEVIATION, MEDIAN_ERROR = 1.4826, 1.2533  # standard deviation over median absolute deviation; error of median over mean
SMALL = 0.02  # a kernel that saves a smaller share of a training step is not worth its code


def _add_norm(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    shift: Tensor | None,
    scale: Tensor | None,
    fused: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`m2s.ops.norm.add_norm` without its kernel."""
    return norm.naive.add_norm(x, branch, gate, weight, eps, shift, scale, bias)


def _rotate_separately(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`m2s.ops.rotary.joint` without its kernel: the product, and the definition of the rotation."""
    return rotary.naive.rotary(dense(x, weight, None, fused), cos, sin, heads)


def _never(_: Any) -> bool:
    """In the place of `uses_triton`."""
    return False


Replacement = tuple[Any, str, Callable[..., Any]]  # a module, the name of a function in it, and the function in its place
REPLACEMENTS: Mapping[str, tuple[Replacement, ...]] = {
    "adamw": ((adamw, "uses_triton", _never),),
    "norm": ((dit, "add_norm", _add_norm),),
    "rotary": ((dit, "joint", _rotate_separately),),
    "philox": ((philox, "uses_triton", _never),),
}
"""How an auxiliary operation is replaced by its reference form, by the name of the operation."""


@contextmanager
def without(*operations: str) -> Iterator[None]:
    """Replace operations by their reference forms.

    Args:
        operations: Keys of `REPLACEMENTS`.

    Yields:
        None.
    """
    with AttributePatches() as patches:
        for operation in operations:
            for owner, name, function in REPLACEMENTS[operation]:
                patches.set(owner, name, function)
        yield


def make_without(setting: Setting, source: Source, *operations: str) -> tuple[Step, torch.nn.Module]:
    """Set up a trainer whose steps run without the kernels of some operations.

    Args:
        setting: Sizes, device and method.
        source: The data.
        operations: Keys of `REPLACEMENTS`.

    Returns:
        A function that takes one training step and returns its loss, and the network.
    """
    return inside(partial(without, *operations), partial(trainer, configuration(setting, "fused"), source))


def inside(context: Callable[[], AbstractContextManager[None]], make: MakeStep) -> tuple[Step, torch.nn.Module]:
    """Set up a trainer that is built, and takes every step, inside a context.

    Args:
        context: Returns the context.
        make: Sets up the trainer.

    Returns:
        A function that takes one training step and returns its loss, and the network.
    """
    with context():
        step, model = make()

    def step_inside() -> float:
        with context():
            return step()

    return step_inside, model


@PARTS.register("ablation")
def measure(setting: Setting) -> dict[str, Any]:
    """Compare training steps without one auxiliary kernel with steps that have all.

    Args:
        setting: Sizes, device and method.

    Returns:
        Times and memory of the steps without each kernel and of those with all, and `saved`: for each operation the time and
        the memory that its kernel saves, as shares of a step with all kernels, with the standard error over rounds. The entries
        "nothing" compare the two trainers with all kernels. `below` names the operations that save less than `SMALL`, and
        the entry "all below" compares a step without any of these.
    """
    comparison, operations = Comparison(setting), list(REPLACEMENTS)
    saved: dict[str, dict[str, float | None]] = {}
    reason = setting.why_unavailable("fused")
    if reason:
        comparison.skipped.append(f"kernels fused: {reason}")
        operations = []
    source = RandomTokens(setting.vocab, setting.length, rows=max(64, setting.batch))
    for first in range(0, len(operations), GROUP):
        group = {name: (name,) for name in operations[first : first + GROUP]}
        saved |= _measure_group(comparison, source, group, f" ({first // GROUP + 1})")
    below = [name for name in operations if (share := saved[name]["time"]) is not None and share < SMALL]
    if below:
        saved |= _measure_group(comparison, source, {"all below": tuple(below)}, " (last)")
    return comparison.result(
        f"one training step of a DiT {setting.depth} x {setting.width} x {setting.heads}, {setting.batch} x {setting.length} "
        f"tokens, method {setting.method}, without one kernel",
        {},
        [],
        saved=saved,
        below=", ".join(below) or None,
    )


def _measure_group(
    comparison: Comparison, source: Source, group: Mapping[str, tuple[str, ...]], suffix: str
) -> dict[str, dict[str, float | None]]:
    """Time steps without the operations of each entry beside two trainers with all kernels, and return what they save.

    The names of the latter get the suffix, which tells groups apart.
    """
    setting, found = comparison.setting, Comparison(comparison.setting)
    makers: dict[str, MakeStep] = {BASELINE: partial(make_without, setting, source)}
    makers |= {f"without {name}": partial(make_without, setting, source, *operations) for name, operations in group.items()}
    makers[REPEATED] = partial(make_without, setting, source)
    time_training(found, makers, ROUNDS)
    release()
    comparison.results |= {name + suffix * (name in (BASELINE, REPEATED)): result for name, result in found.results.items()}
    comparison.skipped += found.skipped
    saved = {name: saved_share(found, f"without {name}") for name in group}
    return {**saved, f"nothing{suffix}": saved_share(found, REPEATED)}


def saved_share(comparison: Comparison, name: str) -> dict[str, float | None]:
    """Return what a step takes more than one with all kernels.

    Steps of the same round are compared, and the median over rounds counts. Its standard error is estimated from the median
    absolute deviation.

    Args:
        comparison: The measured steps, among them `BASELINE` and `REPEATED`.
        name: The step.

    Returns:
        `time`, a share of the step with all kernels, with its `error`; `milliseconds`; `memory_gib`. None where not measured.
    """
    known = [one for key in (BASELINE, REPEATED) if key != name and (one := comparison.results.get(key, {}).get("rounds_ms"))]
    step = comparison.results.get(name, {}).get("rounds_ms")
    if not known or not step:
        return {"time": None, "error": None, "milliseconds": None, "memory_gib": None}
    base = [statistics.fmean(one) for one in zip(*known, strict=True)]
    shares = [with_less / with_all - 1 for with_less, with_all in zip(step, base, strict=True)]
    share = statistics.median(shares)
    deviation = statistics.median(abs(one - share) for one in shares)
    memory = [comparison.value(key, "peak_gib") for key in (BASELINE, name)]
    return {
        "time": share,
        "error": NORMAL_DEVIATION * MEDIAN_ERROR * deviation / len(shares) ** 0.5,
        "milliseconds": share * statistics.median(base),
        "memory_gib": None if None in memory else memory[1] - memory[0],  # type: ignore[operator]
    }
