"""The Fréchet distance of pixels: a distance between two sets of small images that needs no network."""

import math
from typing import Any

import torch
from jaxtyping import Float64, Integer
from torch import Tensor

from m2s.errors import UserError
from m2s.evaluation.bpd.examples import EvaluationSet
from m2s.evaluation.fid import Statistics, frechet
from m2s.hub import Checkpoint

GROUPS = 32
"""Groups of the jackknife."""


def pixel_statistics(images: Integer[Tensor, "n L"], levels: int) -> Statistics:
    """Compute the mean and the covariance of the pixels of images.

    Args:
        images: Images as tokens 0..levels-1, [n, L].
        levels: The number of levels of a pixel. Pixels are scaled to [0, 1].

    Returns:
        The statistics, with L features for each image.
    """
    statistics = Statistics.empty(images.shape[1])
    statistics.update(images.double() / (levels - 1))
    return statistics


def pixel_distances(
    samples: Integer[Tensor, "arm n L"], reference: Integer[Tensor, "m L"], levels: int, groups: int = GROUPS
) -> Float64[Tensor, "arm groups_plus_1"]:
    """Compute the Fréchet distance of pixels between sets of samples and data, also without each group of samples in turn.

    Sample i of every arm is drawn on the same noise, and every arm leaves out the same indices. So differences between arms are
    paired. `jackknife` turns the result into standard errors. A bootstrap would repeat images, which raises this distance and
    its spread.

    Args:
        samples: Images of each arm as tokens, [arm, n, L].
        reference: Images of the data, [m, L].
        levels: The number of levels of a pixel.
        groups: The number of groups; at most n. Group g has the samples g, g + groups, ...

    Returns:
        The distances, [arm, 1 + groups]. The first column is that of all samples, the others leave out one group.
    """
    data = pixel_statistics(reference, levels)
    group = torch.arange(samples.shape[1]) % groups
    kept = [group >= 0, *(group != left_out for left_out in range(groups))]
    found = [[frechet(pixel_statistics(arm[at], levels), data) for at in kept] for arm in samples]
    return torch.tensor(found, dtype=torch.float64)


def jackknife(values: Float64[Tensor, "groups_plus_1"]) -> float:
    """Compute the standard error of a statistic by the jackknife that leaves out one group at a time.

    It is the root of (g - 1)/g sum_i (v_i - mean v)^2 for g groups.

    Args:
        values: The statistic of all examples, then those without each group, [1 + g].

    Returns:
        The standard error.
    """
    left_out = values[1:]
    return math.sqrt((len(left_out) - 1) * float(left_out.var(correction=0)))


def pixels(
    samples: Integer[Tensor, "n L"] | None,
    reference: EvaluationSet | None = None,
    checkpoint: Checkpoint | None = None,
    levels: int = 256,
    **_: Any,
) -> dict[str, Any]:
    """Measure the Fréchet distance of pixels between samples and data. It is the metric "pixels" of `m2s.evaluation.METRICS`.

    It is |m - m'|^2 + tr(C + C' - 2 (C C')^(1/2)) for the means and covariances of the pixels in [0, 1]. It needs no network,
    and is meant for small images. Compare only values with the same numbers of images.

    Args:
        samples: The images as tokens 0..levels-1, [n, L].
        reference: Images of the data.
        checkpoint: Not used.
        levels: The number of levels of a pixel.

    Returns:
        "pixel_distance" with its standard error by a jackknife over 32 groups of samples, and the numbers of "samples" and
        "reference" images.

    Raises:
        UserError: Samples or data are missing, have other sizes or levels, or are fewer than two.
    """
    if samples is None or reference is None:
        raise UserError("the metric pixels compares samples with data: give a file of samples and --reference, as digits:train")
    data = reference[torch.arange(len(reference))]
    if samples.shape[1] != data.shape[1] or min(len(samples), len(data)) < 2:
        raise UserError(
            f"samples {list(samples.shape)} and reference {list(data.shape)} must be two or more images of the same size each"
        )
    if levels < 2 or max(int(samples.max()), int(data.max())) >= levels:
        raise UserError(option="levels", value=levels, expected="the number of levels of the images, more than every token")
    distance = pixel_distances(samples[None], data, levels, min(GROUPS, len(samples) // 2))[0]
    return {
        "pixel_distance": {"value": float(distance[0]), "error": jackknife(distance) if len(distance) > 2 else None},
        "samples": len(samples),
        "reference": len(data),
    }
