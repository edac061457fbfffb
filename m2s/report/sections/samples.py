"""Samples: grids of images, texts, film strips and other pictures of a run."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from m2s.report.blocks import Picture
from m2s.report.read_run import SampleFile, TrainingRun
from m2s.report.samples import grid_uri
from m2s.report.sections.common import Problems, sampler_settings


def collect(runs: Sequence[TrainingRun], problems: Problems) -> dict[str, Any] | None:
    """Collect samples and pictures.

    Args:
        runs: The runs.
        problems: Receives what cannot be shown.

    Returns:
        The pictures `grids`, `films` and `others`, and `texts`, a heading and the samples of each file; None where there is
        none of them.
    """
    grids, films, others = [], [], []
    texts = []
    for run in runs:
        for samples in run.samples:
            if samples.images is None:
                texts.append({"heading": _caption(run, samples, len(samples.texts)), "samples": samples.texts})
            else:
                grids.append(problems.attempt(run.path / samples.file, partial(_grid, run, samples)))
        if run.film is not None:
            alt = f"{run.name}: from noise to samples"
            films.append(problems.picture(run.film, alt, f"{alt}. A sample a row, the steps from left to right."))
        for path in run.pictures:
            alt = f"{run.name}: {path.relative_to(run.path)}"
            others.append(problems.picture(path, alt, alt))
    shown = {name: [one for one in found if one] for name, found in (("grids", grids), ("films", films), ("others", others))}
    return {**shown, "texts": texts} if texts or any(shown.values()) else None


def _caption(run: TrainingRun, samples: SampleFile, shown: int) -> str:
    """Return the number of samples shown, how they were drawn, and the file."""
    count = f"{shown} of {samples.count:,}" if shown < samples.count else f"{shown}"
    settings = sampler_settings(samples.settings)
    return f"{run.name}: {count} samples{f', {settings}' if settings else ''} ({samples.file})"


def _grid(run: TrainingRun, samples: SampleFile) -> Picture:
    """Return the first images of a file in a grid."""
    assert samples.images is not None
    data = samples.settings["data"]
    uri = grid_uri(torch.from_numpy(samples.images), tuple(data["shape"]), data["levels"])
    return Picture(uri, f"A grid of samples of {run.name}", _caption(run, samples, len(samples.images)))
