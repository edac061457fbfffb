"""Measure several estimators on data, so that an interrupted computation continues."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from m2s.evaluation.bpd.examples import EvaluationSet
from m2s.evaluation.likelihood.base import Options
from m2s.evaluation.likelihood.measure import Draws, join, measure
from m2s.heads import Head
from m2s.io import read_json, write_json
from m2s.losses.objective import Model
from m2s.progress import Progress

PAUSE = 10.0  # seconds between two saved states


class _Part(EvaluationSet):
    """The first `count` sequences of a set."""

    def __init__(self, x_0: EvaluationSet, count: int) -> None:
        self.x_0, self.count = x_0, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any, /) -> Any:
        return self.x_0[index]


def measure_all(
    model: Model,
    head: Head,
    x_0: EvaluationSet,
    names: Sequence[str],
    settings: Mapping[str, Any],
    partial: Path | None = None,
    passes: int = 2,
    seed: int = 0,
    batch_size: int = 64,
    options: Options | None = None,
    labels: Int[Tensor, "N"] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Draws]:
    """Estimate the likelihood of sequences by several estimators, with a progress bar.

    Args:
        model: The network.
        head: What its output means.
        x_0: The sequences.
        names: Names of the estimators.
        settings: What the result depends on. A saved state with other settings is not used.
        partial: Where the state is saved every few seconds; None: nowhere.
        passes: Independent draws of noise for each sequence.
        seed: The seed of the noise.
        batch_size: Sequences per call of the network.
        options: t_min, and the number of steps in discrete time.
        labels: The network's third argument, [N].
        device: Where the network is.

    Returns:
        The draws by estimator.
    """
    finished = _load(partial, settings)
    saved = time.monotonic()
    already = sum(len(next(iter(draws.terms.values()))[0]) for draws in finished.values())
    with Progress(len(names) * len(x_0), "estimating", "sequence") as progress:
        progress.update(already)
        for name in names:
            parts = [finished[name]] if name in finished else []
            first = parts[0].total.shape[1] if parts else 0
            while first < len(x_0):
                end = min(first + batch_size, len(x_0))
                group = (_Part(x_0, end), name, passes, seed, batch_size, options, labels, first, device, progress.update)
                parts = [join([*parts, measure(model, head, *group)])]
                first, finished[name] = end, parts[0]
                if partial is not None and (time.monotonic() - saved > PAUSE or end == len(x_0)):
                    _save(partial, settings, finished)
                    saved = time.monotonic()
    return finished


def _save(partial: Path, settings: Mapping[str, Any], finished: Mapping[str, Draws]) -> None:
    """Write the state, unless a value is infinite, which JSON cannot hold."""
    if not all(bool(each.total.isfinite().all()) for each in finished.values()):
        return
    draws = {
        name: {"calls": each.calls, "terms": {term: values.tolist() for term, values in each.terms.items()}}
        for name, each in finished.items()
    }
    write_json(partial, {"settings": dict(settings), "draws": draws})


def _load(partial: Path | None, settings: Mapping[str, Any]) -> dict[str, Draws]:
    """The state of an interrupted computation with the same settings; else nothing."""
    if partial is None or not partial.is_file():
        return {}
    state = read_json(partial, "delete it, and the command starts again")
    if state.get("settings") != dict(settings):
        return {}
    return {
        name: Draws({term: torch.tensor(values).double() for term, values in each["terms"].items()}, each["calls"])
        for name, each in state["draws"].items()
    }
