"""Handwritten digits of 8 x 8 pixels and 17 levels. They are part of the package; digits.txt names authors and license."""

import io
from pathlib import Path

import numpy as np

from m2s.data.files import BadData, read_bytes
from m2s.data.image_set import ImageSet
from m2s.data.images import Arrays
from m2s.npz import read_npz


def read(folder: Path) -> Arrays:
    """Read 1,797 images. Every seventh (indices 6, 13, 20, ...) is test: 1,541 training and 256 test images.

    The classes repeat in the file with a period of ten. Every fifth or tenth image would select only a few of them.

    Args:
        folder: The folder of digits.npz.

    Returns:
        Training images [1541, 64] and labels, then test images and labels.

    Raises:
        BadData: The file is damaged.
    """
    path = folder / "digits.npz"
    try:
        file = read_npz(io.BytesIO(read_bytes(path)), ["images", "labels"], limit=1 << 20)
    except BadData:
        raise
    except (ValueError, OSError) as error:
        raise BadData(f"{path} is damaged ({error}): install m2s again") from error
    images, labels = file["images"], file["labels"]
    fits = images.shape[1:] == (64,) and labels.shape == (len(images),) and labels.dtype.kind in "iu"
    if not fits or images.dtype != np.uint8 or images.max(initial=0) > 16 or labels.max(initial=0) > 9:
        raise BadData(f"{path} holds images {images.dtype} {list(images.shape)}, expected uint8 [n, 64]: install m2s again")
    test = np.arange(len(images)) % 7 == 6
    return images[~test], labels[~test], images[test], labels[test]


DIGITS = ImageSet(
    name="digits",
    summary="UCI optical digits, 1,541 + 256 images (CC BY 4.0), inside the package",
    shape=(8, 8),
    vocab=17,
    read=read,
    sha256={"digits": "af104d81e7cd419be5f343d23c6ca2e4e4ff847b06636260802df8e903c6183f"},
    endings=(".npz",),
    origin="the m2s package (install it again)",
    home=Path(__file__).parent,
)
