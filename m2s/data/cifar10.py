"""CIFAR-10 from its binary or its Python batches: 32 x 32 pixels, 3 colors, 256 levels."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from m2s.data.files import BadData, read_bytes
from m2s.data.image_set import ImageSet
from m2s.data.images import Arrays

RECORDS = 10_000
PIXELS = 3 * 32 * 32


def read(folder: Path) -> Arrays:
    """Read the canonical split: data_batch_1 to 5 are train (50,000 images), test_batch is test (10,000 images).

    The files store an image in the order (C, H, W). Tokens are in the order (H, W, C): the three colors of the top left pixel,
    then those of the pixel to its right, and so on.

    Args:
        folder: The folder of the files.

    Returns:
        Training images [50000, 3072] and labels, then test images [10000, 3072] and labels.

    Raises:
        BadData: A file is damaged.
    """
    images, labels = [], []
    for path in (CIFAR10.locate(folder)[name] for name in CIFAR10.sha256):
        planes, label = read_binary(path) if path.suffix == ".bin" else read_python(path)
        if label.max() > 9:
            raise BadData(f"{path} holds label {label.max()}, expected 0..9: get it again from {CIFAR10.origin}")
        images.append(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).reshape(-1, PIXELS))
        labels.append(label)
    return np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1], labels[-1]


def read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a binary batch: 10,000 records of one label and 3,072 bytes.

    Args:
        path: The file.

    Returns:
        Pixels [10000, 3072] and labels [10000], uint8.

    Raises:
        BadData: The file has another size.
    """
    data = read_bytes(path)
    expected = RECORDS * (1 + PIXELS)
    if len(data) != expected:
        raise BadData(
            f"{path} holds {len(data):,} bytes, expected {expected:,} ({RECORDS:,} records of 1 + {PIXELS:,}): "
            f"get it again from {CIFAR10.origin}"
        )
    records = np.frombuffer(data, np.uint8).reshape(RECORDS, 1 + PIXELS)
    return records[:, 1:], records[:, 0]


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that builds numpy arrays and plain containers and calls nothing else.

    A pickle can name any function to call, so an ordinary unpickler would run code of an untrusted file.
    """

    ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),  # Python 3 writes bytes this way in the old protocols
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it calls {module}.{name}, which is not allowed")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_python(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a Python batch: a pickled dictionary with `data` [10000, 3072] and `labels`. No code of the file is run.

    Args:
        path: The file.

    Returns:
        Pixels [10000, 3072], uint8, and labels [10000].

    Raises:
        BadData: The file is damaged, or is no such dictionary.
    """
    data = read_bytes(path)
    try:
        batch = _ArraysOnly(io.BytesIO(data), encoding="latin1").load()
        pixels, labels = np.asarray(batch["data"]), np.asarray(batch["labels"])
    except Exception as error:  # a damaged pickle can raise anything
        raise BadData(
            f"{path} is not a CIFAR-10 Python batch ({type(error).__name__}: {error}): "
            f"get the binary version from {CIFAR10.origin}"
        ) from error
    fits = pixels.shape == (RECORDS, PIXELS) and pixels.dtype == np.uint8 and labels.shape == (RECORDS,)
    if not fits or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise BadData(
            f"{path} holds data of shape {list(pixels.shape)} {pixels.dtype} with {labels.size} labels, expected "
            f"[{RECORDS}, {PIXELS}] uint8 with {RECORDS} integers: get it again from {CIFAR10.origin}"
        )
    return pixels, labels


CIFAR10 = ImageSet(
    name="cifar10",
    summary="CIFAR-10, 50,000 + 10,000 images, binary (.bin) or Python batches",
    shape=(32, 32, 3),
    vocab=256,
    read=read,
    sha256={
        "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    endings=(".bin", ""),
    inside=("", "cifar-10-batches-bin", "cifar-10-batches-py"),
    origin="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    hub=("uoft-cs/cifar10", "img", "label"),
    downloadable=True,
)
