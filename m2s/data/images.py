"""What an image data set is: where its files lie, how they are read, and the rows of tokens that come out."""

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from m2s.data.files import BadData, read_bytes, root

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Images:
    """Images as rows of tokens: level `train[i, j]` in 0..vocab-1 of pixel j, pixels of `shape` in row-major order."""

    name: str
    train: UInt8[Tensor, "train L"]
    train_labels: Int[Tensor, "train"]
    test: UInt8[Tensor, "test L"]
    test_labels: Int[Tensor, "test"]
    shape: tuple[int, ...]
    vocab: int

    @property
    def description(self) -> dict[str, Any]:
        """What a checkpoint keeps about its data."""
        return {"kind": "image", "shape": list(self.shape), "levels": self.vocab}


@dataclass(frozen=True)
class ImageSet:
    """A data set of images. `read` gives train images and labels, then test images and labels, from a folder.

    `sha256` holds the canonical files by name without ending; a file may have any of `endings`, the first being canonical,
    and may lie in any of the subfolders `inside`.
    """

    name: str
    summary: str
    shape: tuple[int, ...]
    vocab: int
    read: Callable[[Path], Arrays]
    sha256: Mapping[str, str]
    endings: tuple[str, ...]
    inside: tuple[str, ...] = ("",)
    origin: str = ""
    hub: tuple[str, str, str] | None = None
    """Repository, image column and label column on the Hugging Face hub."""
    home: Path | None = None
    """Where the files are when it is not below `root()`."""

    @property
    def folder(self) -> Path:
        """Where the files are looked for unless the caller says otherwise."""
        return self.home or root() / self.name

    def locate(self, folder: Path) -> dict[str, Path]:
        """The files that are there, by name without ending."""
        found: dict[str, Path] = {}
        for name, end, inside in itertools.product(self.sha256, self.endings, self.inside):
            path = folder / inside / (name + end)
            if path.is_file():
                found.setdefault(name, path)
        return found

    def missing(self, folder: Path) -> list[str]:
        found = self.locate(folder)
        return [name + self.endings[0] for name in self.sha256 if name not in found]

    def load(self, folder: Path | str | None = None, hub: bool = False) -> Images:
        """Read the files in `folder`; with `hub`, ask the Hugging Face hub (the `data` extra) instead."""
        if hub:
            from m2s.data.hub import hub_images

            arrays = hub_images(self)
        else:
            place = self.folder if folder is None else Path(folder).expanduser()
            self.require(place)
            arrays = self.read(place)
        train, train_labels, test, test_labels = arrays
        images = [torch.from_numpy(np.ascontiguousarray(a).reshape(len(a), math.prod(self.shape))) for a in (train, test)]
        labels = [torch.from_numpy(np.asarray(a, dtype=np.int64)) for a in (train_labels, test_labels)]
        return Images(self.name, images[0], labels[0], images[1], labels[1], self.shape, self.vocab)

    def require(self, folder: Path) -> None:
        missing = self.missing(folder)
        if missing:
            hub = f', or from the hub (--data.hub, or m2s.data.load("{self.name}", hub=True))' if self.hub else ""
            raise BadData(f"{self.name}: {folder} has no {', '.join(missing)}: get them from {self.origin}{hub}")

    def verify(self, folder: Path) -> None:
        """Compare every file, unpacked where it is a .gz, with the SHA-256 of the canonical one."""
        self.require(folder)
        for name, path in self.locate(folder).items():
            canonical = name + self.endings[0]
            if path.name.removesuffix(".gz") != canonical:
                raise BadData(f"{path} has no known SHA-256, only {canonical} has: get that from {self.origin} to check it")
            found = hashlib.sha256(read_bytes(path)).hexdigest()
            if found != self.sha256[name]:
                raise BadData(f"{path} has SHA-256 {found}, expected {self.sha256[name]}: get it again from {self.origin}")
