"""A film strip: how a sampler turns noise (left) into images (right)."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from m2s.heads import Head
from m2s.io import atomic_write, output_file
from m2s.report.style import SUFFIXES
from m2s.samplers import Trajectory, sample

MASK_COLOR = (0.27, 0.45, 0.77)


def film_frames(
    model: nn.Module, head: Head, length: int, rows: int, columns: int, steps: int, sampler: str, seed: int | None
) -> tuple[list[float], Int[Tensor, "columns rows L"]]:
    """Draw samples and return their states at evenly spaced steps.

    Args:
        model: The network.
        head: Its head.
        length: Positions of a sample, L.
        rows: Number of samples.
        columns: Number of states of each.
        steps: Steps of the sampler.
        sampler: Its name.
        seed: Its seed; None: drawn from torch's generator.

    Returns:
        The fractions of the steps taken, in [0, 1], and the [columns, rows, L] states. A masked position is state K.
    """
    trajectory = Trajectory()
    sample(model, head, (rows, length), steps=steps, sampler=sampler, seed=seed, callback=trajectory)
    last = len(trajectory.states) - 1
    chosen = np.linspace(0, last, columns).round().astype(int)
    return [float(i) / last for i in chosen], trajectory.states[torch.from_numpy(chosen)]


def write_film(
    path: Path,
    model: nn.Module,
    head: Head,
    shape: tuple[int, ...],
    levels: int,
    rows: int = 5,
    columns: int = 9,
    steps: int = 64,
    sampler: str = "auto",
    seed: int | None = None,
) -> None:
    """Draw samples of images and write their states at evenly spaced steps. Masked positions are blue.

    Args:
        path: The picture: .png, .pdf or .svg.
        model: The network.
        head: Its head.
        shape: Height, width and channels of an image.
        levels: Number of levels of a pixel.
        rows: Number of samples.
        columns: Number of states of each.
        steps: Steps of the sampler.
        sampler: Its name.
        seed: Its seed; None: drawn from torch's generator.

    Raises:
        UserError: `path` cannot be written.
    """
    import matplotlib.pyplot as plt  # slow to import, and only films need it

    path = output_file(path, SUFFIXES)
    fractions, states = film_frames(model, head, int(np.prod(shape)), rows, columns, steps, sampler, seed)
    figure, axes = plt.subplots(rows, columns, figsize=(columns, rows + 0.3), squeeze=False)
    for column, fraction in enumerate(fractions):
        axes[0, column].set_title(f"{fraction:.0%}", fontsize=9)
        for row in range(rows):
            axes[row, column].imshow(rgb_image(states[column, row], shape, levels))
    for axis in axes.flat:
        axis.set_axis_off()
    figure.suptitle("Share of the steps taken", fontsize=9, y=0.995)
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=1 - 0.5 / (rows + 0.3), wspace=0.06, hspace=0.06)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=150)
    plt.close(figure)


def rgb_image(tokens: Int[Tensor, "L"], shape: tuple[int, ...], levels: int) -> np.ndarray:
    """Return one image in RGB, with masked positions in blue.

    Args:
        tokens: [L] tokens; those from `levels` on are masks.
        shape: Height, width and channels.
        levels: Number of levels of a pixel.

    Returns:
        [H, W, 3] values in [0, 1].
    """
    height, width = shape[:2]
    image = tokens.numpy().reshape(height, width, -1)
    masked = (image >= levels).any(-1, keepdims=True)
    colors = np.broadcast_to(np.minimum(image, levels - 1) / (levels - 1), (height, width, 3))
    return np.where(masked, np.array(MASK_COLOR), colors)
