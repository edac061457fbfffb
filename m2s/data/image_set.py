"""Image data sets: where their files are, how the files are read and how they are verified."""

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from m2s.data.files import BadData, read_bytes, root
from m2s.data.hub import hub_images
from m2s.data.images import Arrays, ImageDataset
from m2s.data.source import DATASETS, ImageSource, Source
from m2s.errors import UserError


@dataclass(frozen=True)
class ImageSet:
    """An image data set on disk or on the Hugging Face hub.

    It is an entry of `m2s.data.DATASETS`: calling it opens the data for training.

    Args:
        name: The name in `m2s.data.DATASETS`.
        summary: One line for `m2s data list`.
        shape: (height, width), or (height, width, channels).
        vocab: The number of levels.
        read: Reads training images and labels, then test images and labels, from a folder.
        sha256: The SHA-256 of each canonical file, by file name without suffix.
        endings: Suffixes that a file may have. The first one is canonical.
        inside: Subfolders in which a file may be.
        origin: Where to download the files.
        hub: Repository, image column and label column on the Hugging Face hub; None where the hub does not have it.
        home: The folder of the files, for a data set that is not below `m2s.data.root()`.
        downloadable: Whether `m2s data download` knows it.
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
    home: Path | None = None
    downloadable: bool = False

    def __call__(self, folder: str | None, length: int, hub: bool) -> Source:
        """Open the images for training.

        Args:
            folder: The folder of the files; None for `self.folder`.
            length: Not used: the length of an example is the number of pixels.
            hub: Download from the Hugging Face hub in place of reading files.

        Returns:
            The training and validation examples.

        Raises:
            BadData: A file is missing or damaged.
        """
        return ImageSource(self.load(folder, hub))

    @property
    def folder(self) -> Path:
        """The folder in which the files are expected by default."""
        return self.home or root() / self.name

    def locate(self, folder: Path) -> dict[str, Path]:
        """Return the paths of the files that exist in `folder`, by file name without suffix.

        Args:
            folder: The folder. Its subfolders `inside` are searched too.
        """
        found: dict[str, Path] = {}
        for name, end, inside in itertools.product(self.sha256, self.endings, self.inside):
            path = folder / inside / (name + end)
            if path.is_file():
                found.setdefault(name, path)
        return found

    def missing(self, folder: Path) -> list[str]:
        """Return the canonical names of the files that `folder` does not have.

        Args:
            folder: The folder.
        """
        found = self.locate(folder)
        return [name + self.endings[0] for name in self.sha256 if name not in found]

    def load(self, folder: Path | str | None = None, hub: bool = False) -> ImageDataset:
        """Read the data set.

        Args:
            folder: The folder of the files; None for `self.folder`.
            hub: Download from the Hugging Face hub (package `datasets`) in place of reading files.

        Returns:
            The images and labels.

        Raises:
            BadData: A file is missing or damaged.
        """
        if hub:
            if self.hub is None:
                raise UserError(f"{self.name} is not on the hub: it is {self.summary}")
            arrays = hub_images(*self.hub, self.shape)
        else:
            path = self.folder if folder is None else Path(folder).expanduser()
            self.require(path)
            arrays = self.read(path)
        train, train_labels, test, test_labels = arrays
        images = [torch.from_numpy(np.ascontiguousarray(a).reshape(len(a), math.prod(self.shape))) for a in (train, test)]
        labels = [torch.from_numpy(np.asarray(a, dtype=np.int64)) for a in (train_labels, test_labels)]
        return ImageDataset(self.name, images[0], labels[0], images[1], labels[1], self.shape, self.vocab)

    def require(self, folder: Path) -> None:
        """Raise an error, with a download address, where a file is missing in `folder`.

        Args:
            folder: The folder.

        Raises:
            BadData: A file is missing.
        """
        missing = self.missing(folder)
        if missing and (folder / "meta.json").is_file():
            raise BadData(
                f"{self.name} is a data set of images, but {folder} is a text that m2s data prepare made: train on it with "
                f"m2s train owt --data.folder {folder}"
            )
        if missing and folder != self.folder and not self.missing(self.folder):
            raise BadData(
                f"{self.name}: {folder} has no {', '.join(missing)}: leave out --data.folder ({self.folder} has them)"
            )
        if missing:
            hub = f', or from the hub (--data.hub, or m2s.data.load("{self.name}", hub=True))' if self.hub else ""
            way = f"{'or ' if self.downloadable else ''}get them from {self.origin}{hub}"
            if self.downloadable:
                way = f"run `m2s data download {self.name}`, {way}"
            raise BadData(f"{self.name}: {folder} has no {', '.join(missing)}: {way}")

    def verify(self, folder: Path) -> None:
        """Compare the SHA-256 of every file (decompressed, for .gz) with the canonical one.

        Args:
            folder: The folder.

        Raises:
            BadData: A file is missing, has no known SHA-256, or differs.
        """
        self.require(folder)
        for name, path in self.locate(folder).items():
            canonical = name + self.endings[0]
            if path.name.removesuffix(".gz") != canonical:
                raise BadData(f"{path} has no known SHA-256, only {canonical} has: get that from {self.origin} to verify it")
            found = hashlib.sha256(read_bytes(path)).hexdigest()
            if found != self.sha256[name]:
                raise BadData(f"{path} has SHA-256 {found}, expected {self.sha256[name]}: get it again from {self.origin}")


def image_sets() -> dict[str, ImageSet]:
    """Return the image data sets of `m2s.data.DATASETS`, by name."""
    return {name: entry for name, entry in DATASETS.items() if isinstance(entry, ImageSet)}


def load(name: str, folder: Path | str | None = None, hub: bool = False) -> ImageDataset:
    """Load an image data set.

    Args:
        name: digits, mnist, cifar10, or an `ImageSet` that was added to `m2s.data.DATASETS`.
        folder: The folder of its files; by default `$M2S_DATA/name`.
        hub: Download it from the Hugging Face hub in place of reading files.

    Returns:
        The images and labels.

    Raises:
        UserError: There is no such image data set.
        BadData: A file is missing or damaged.

    Example:
        >>> m2s.data.load("digits").train.shape
        torch.Size([1541, 64])
    """
    known = image_sets()
    if name not in known:
        raise UserError(f"there is no image data set {name!r}: choose from {', '.join(known)}")
    return known[name].load(folder, hub)
