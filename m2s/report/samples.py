"""Samples as a grid of images or as text."""

import math
from io import BytesIO
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8
from torch import Tensor

from m2s.data.tokenizer import Tokenizer
from m2s.io import atomic_write

MIN_SIDE = 56  # pixels; smaller images are enlarged, each pixel to a square
LINE = 2  # pixels of white between images


def picture_grid(tokens: Int[Tensor, "n L"], shape: tuple[int, ...], levels: int) -> UInt8[np.ndarray, "H W 3"]:
    """Arrange images in a grid that is about square, with white lines between them.

    Args:
        tokens: [n, L] images as tokens 0..levels-1.
        shape: Height and width of an image, and its channels where it has any; L is their product.
        levels: Number of levels of a pixel.

    Returns:
        [H, W, 3] RGB picture. Gray images become gray in RGB.
    """
    height, width, *channels = shape
    images = tokens.cpu().numpy().reshape(len(tokens), height, width, -1).astype(np.float64) / (levels - 1)
    if not channels or channels == [1]:
        images = np.broadcast_to(images, (*images.shape[:-1], 3))
    images = np.rint(255 * images)
    scale = math.ceil(MIN_SIDE / min(height, width))
    images = images.repeat(scale, 1).repeat(scale, 2)
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    tall, wide = images.shape[1] + LINE, images.shape[2] + LINE
    grid = np.full((rows * tall + LINE, columns * wide + LINE, 3), 255.0)
    for number, image in enumerate(images):
        top, left = LINE + number // columns * tall, LINE + number % columns * wide
        grid[top : top + image.shape[0], left : left + image.shape[1]] = image
    return grid.astype(np.uint8)


def grid_uri(tokens: Int[Tensor, "n L"], shape: tuple[int, ...], levels: int) -> str:
    """Return images in a grid (`picture_grid`) as the data URI of a PNG picture.

    Args:
        tokens: [n, L] images as tokens.
        shape: Height, width and channels of an image.
        levels: Number of levels of a pixel.
    """
    from matplotlib.image import imsave

    from m2s.report.blocks import data_uri

    file = BytesIO()
    imsave(file, picture_grid(tokens, shape, levels), format="png")
    return data_uri("image/png", file.getvalue())


def write_pictures(path: Path, tokens: Int[Tensor, "n L"], shape: tuple[int, ...], levels: int) -> None:
    """Write images as one PNG file (`picture_grid`).

    Args:
        path: The file.
        tokens: [n, L] images as tokens.
        shape: Height, width and channels of an image.
        levels: Number of levels of a pixel.
    """
    from matplotlib.image import imsave  # matplotlib takes half a second to import, and `m2s sample` of text needs none of it

    with atomic_write(path) as temporary:
        imsave(temporary, picture_grid(tokens, shape, levels))


def write_text(path: Path, tokens: Int[Tensor, "n L"], tokenizer: Tokenizer, start: int = 0) -> None:
    """Write samples as text, each below a line with its number.

    Args:
        path: The file.
        tokens: [n, L] samples.
        tokenizer: Decodes them.
        start: Number of the first sample.
    """
    texts = [f"--- sample {start + number} ---\n{tokenizer.decode(row)}\n" for number, row in enumerate(tokens.tolist())]
    with atomic_write(path) as temporary:
        temporary.write_text("\n".join(texts), encoding="utf-8")
