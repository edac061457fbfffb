"""Images as sequences of tokens."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8
from torch import Tensor

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Training images, training labels, test images and test labels."""


@dataclass(frozen=True)
class ImageDataset:
    """An image data set in memory, one token per pixel and color channel.

    Args:
        name: The name of the data set.
        train: Training images, [N, L]. `train[i, j]` in 0..vocab-1 is the level of pixel j, in row-major order of `shape`.
        train_labels: Their classes, [N].
        test: Test images, [M, L].
        test_labels: Their classes, [M].
        shape: (height, width), or (height, width, channels).
        vocab: The number of levels.
    """

    name: str
    train: UInt8[Tensor, "train L"]
    train_labels: Int[Tensor, "train"]
    test: UInt8[Tensor, "test L"]
    test_labels: Int[Tensor, "test"]
    shape: tuple[int, ...]
    vocab: int

    @property
    def description(self) -> dict[str, Any]:
        """The entry "data" of a checkpoint's config.json."""
        return {"kind": "image", "shape": list(self.shape), "levels": self.vocab}

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of all images and labels."""
        found = hashlib.sha256(json.dumps([list(self.shape), self.vocab, len(self.train), len(self.test)]).encode())
        for tensor in (self.train, self.train_labels, self.test, self.test_labels):
            found.update(tensor.contiguous().numpy().data)
        return found.hexdigest()
