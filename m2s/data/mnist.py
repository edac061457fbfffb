"""MNIST from its idx files, plain or .gz: 28 x 28 pixels, 256 levels."""

import math
from pathlib import Path

import numpy as np

from m2s.data.files import BadData, read_bytes
from m2s.data.image_set import ImageSet
from m2s.data.images import Arrays


def read(folder: Path) -> Arrays:
    """Read the canonical split, 60,000 training and 10,000 test images, in the order of the files.

    Args:
        folder: The folder of the files.

    Returns:
        Training images [60000, 28, 28] and labels, then test images and labels.

    Raises:
        BadData: A file is damaged.
    """
    paths = MNIST.locate(folder)
    arrays = []
    for split in ("train", "t10k"):
        images_path, labels_path = paths[f"{split}-images-idx3-ubyte"], paths[f"{split}-labels-idx1-ubyte"]
        images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
        if images.shape[1:] != MNIST.shape:
            raise BadData(f"{images_path} holds images of shape {list(images.shape[1:])}, expected {list(MNIST.shape)}")
        if len(labels) != len(images):
            raise BadData(f"{labels_path} holds {len(labels)} labels for the {len(images)} images of {images_path.name}")
        if labels.max(initial=0) > 9:
            raise BadData(f"{labels_path} holds label {labels.max()}, expected 0..9: get it again from {MNIST.origin}")
        arrays += [images, labels]
    return arrays[0], arrays[1], arrays[2], arrays[3]


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an idx file of unsigned bytes: magic number 0x000008DD, DD big-endian sizes, then the bytes.

    Args:
        path: The file, plain or .gz.
        dimensions: The expected number of dimensions, DD.

    Returns:
        The array, uint8.

    Raises:
        BadData: The file is no such idx file, or has another size.
    """
    data = read_bytes(path)
    magic, header = 0x800 + dimensions, 4 + 4 * dimensions
    if len(data) < header or int.from_bytes(data[:4], "big") != magic:
        raise BadData(
            f"{path} starts with {data[:4].hex(' ')}, expected magic number {magic:08x} ({magic}: unsigned bytes, {dimensions} "
            f"dimensions): it is not an idx file of that kind"
        )
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", dimensions, 4))
    if len(data) != header + math.prod(shape):
        raise BadData(
            f"{path} holds {len(data):,} bytes, expected {header + math.prod(shape):,} for the shape {list(shape)} "
            f"in its header: get it again from {MNIST.origin}"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape).copy()


MNIST = ImageSet(
    name="mnist",
    summary="MNIST, 60,000 + 10,000 images, idx files (plain or .gz)",
    shape=(28, 28),
    vocab=256,
    read=read,
    sha256={
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    endings=("", ".gz"),
    origin="https://storage.googleapis.com/cvdf-datasets/mnist/",
    hub=("ylecun/mnist", "image", "label"),
    downloadable=True,
)
