"""A film strip: how samples become images, from noise on the left to the result on the right."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from m2s.heads import Head
from m2s.io import atomic_write, output_file
from m2s.samplers import Trajectory, sample


def frames(
    model: nn.Module, head: Head, sites: int, rows: int, columns: int, steps: int, sampler: str, seed: int
) -> tuple[list[float], Int[Tensor, "columns rows L"]]:
    """The shares of the way gone, evenly spread, and the samples there. A mask is shown as state K."""
    kept = Trajectory()
    sample(model, head, (rows, sites), steps=steps, sampler=sampler, seed=seed, callback=kept)
    at = np.linspace(0, len(kept.states) - 1, columns).round().astype(int)
    return [float(i) / (len(kept.states) - 1) for i in at], kept.states[torch.from_numpy(at)]


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
    seed: int = 0,
) -> None:
    """Draw `rows` samples of images `shape` at `columns` moments; masks in colour."""
    import matplotlib.pyplot as plt

    path = output_file(path, (".png", ".pdf", ".svg"))
    shares, states = frames(model, head, int(np.prod(shape)), rows, columns, steps, sampler, seed)
    figure, axes = plt.subplots(rows, columns, figsize=(columns, rows + 0.3), squeeze=False)
    for column, share in enumerate(shares):
        axes[0, column].set_title(f"{share:.0%}", fontsize=9)
        for row in range(rows):
            axes[row, column].imshow(picture(states[column, row], shape, levels))
    for axis in axes.flat:
        axis.set_axis_off()
    figure.suptitle("Share of the steps taken", fontsize=9, y=0.995)
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=1 - 0.5 / (rows + 0.3), wspace=0.06, hspace=0.06)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=150)
    plt.close(figure)


def picture(tokens: Int[Tensor, "L"], shape: tuple[int, ...], levels: int) -> np.ndarray:
    """One image [H, W, 3] in [0, 1]; masked sites are blue."""
    height, width = shape[:2]
    image = tokens.numpy().reshape(height, width, -1)
    masked = (image >= levels).any(-1, keepdims=True)
    colours = np.broadcast_to(np.minimum(image, levels - 1) / (levels - 1), (height, width, 3))
    return np.where(masked, np.array([0.27, 0.45, 0.77]), colours)
