"""Samples to look at: a grid of pictures, or text."""

import math
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8
from torch import Tensor

from m2s.data.tokenizer import Tokenizer
from m2s.io import atomic_write

LEAST_SIDE = 56  # pixels; smaller pictures are enlarged, each pixel a square


def picture_grid(tokens: Int[Tensor, "n L"], shape: tuple[int, ...], levels: int) -> UInt8[np.ndarray, "H W 3"]:
    """The samples side by side, in a grid that is about square, white lines between; grey levels or RGB as they were."""
    height, width, *channels = shape
    images = tokens.cpu().numpy().reshape(len(tokens), height, width, -1).astype(np.float64) / (levels - 1)
    images = np.rint(
        255 * np.broadcast_to(images, (*images.shape[:-1], 3)) if not channels or channels == [1] else 255 * images
    )
    scale = math.ceil(LEAST_SIDE / min(height, width))
    images = images.repeat(scale, 1).repeat(scale, 2)
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    tall, wide = images.shape[1] + 2, images.shape[2] + 2
    page = np.full((rows * tall + 2, columns * wide + 2, 3), 255.0)
    for number, image in enumerate(images):
        top, left = 2 + number // columns * tall, 2 + number % columns * wide
        page[top : top + image.shape[0], left : left + image.shape[1]] = image
    return page.astype(np.uint8)


def write_pictures(path: Path, tokens: Int[Tensor, "n L"], shape: tuple[int, ...], levels: int) -> None:
    from matplotlib.image import imsave

    with atomic_write(path) as temporary:
        imsave(temporary, picture_grid(tokens, shape, levels))


def write_text(path: Path, tokens: Int[Tensor, "n L"], tokenizer: Tokenizer, start: int = 0) -> None:
    """Each sample under a line with its number."""
    texts = [f"--- sample {start + number} ---\n{tokenizer.decode(row)}\n" for number, row in enumerate(tokens.tolist())]
    with atomic_write(path) as temporary:
        temporary.write_text("\n".join(texts), encoding="utf-8")
