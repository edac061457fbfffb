"""Data sets of the Hugging Face hub, through the package `datasets`. They are never downloaded as a fallback."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from m2s.data.files import BadData
from m2s.data.images import Arrays
from m2s.errors import UserError


@dataclass(frozen=True)
class HubText:
    """A text data set on the hub.

    Args:
        repository: OWNER/NAME.
        config: The configuration of the data set; None for its default.
        revision: The git revision, such as `PARQUET`, which runs no script.
    """

    repository: str
    config: str | None = None
    revision: str | None = None


PARQUET = "refs/convert/parquet"
"""The revision with the hub's conversion of scripts to parquet files. A configuration is a folder there."""
PACKAGE = "'datasets>=4'"
"""The package that reads data sets of the hub, as pip takes it."""
HUB_TEXTS = {
    "openwebtext": HubText("Skylion007/openwebtext", revision=PARQUET),
    "lm1b": HubText("billion-word-benchmark/lm1b", revision=PARQUET),
    "text8": HubText("afmck/text8"),
}


def is_installed() -> bool:
    """Return whether the package `datasets` is installed."""
    if "datasets" in sys.modules:
        return sys.modules["datasets"] is not None
    return importlib.util.find_spec("datasets") is not None


def load_splits(repository: str, config: str | None = None, revision: str | None = None) -> Any:
    """Load a data set through the package `datasets`, without running a script of its repository.

    Args:
        repository: OWNER/NAME.
        config: The configuration of the data set; None for its default.
        revision: The git revision; None for the newest.

    Returns:
        The `datasets.DatasetDict`: splits by name.

    Raises:
        UserError: The package `datasets` is not installed.
        BadData: The data set could not be loaded.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{repository} is on the Hugging Face hub, which needs: pip install {PACKAGE}") from error
    # Before version 4 a data set could be a script. Later versions have no such argument.
    scripts = {} if _major(datasets) >= 4 else {"trust_remote_code": False}
    folder = {"data_dir": config} if revision == PARQUET and config is not None else {}
    try:
        return datasets.load_dataset(repository, None if folder else config, revision=revision, **folder, **scripts)
    except Exception as error:  # no network, an unknown name, a script that must not run: any exception type can occur
        reason = " ".join(str(error).split())
        raise BadData(f"{repository} could not be loaded from the hub ({type(error).__name__}: {reason})") from error


def _major(package: object) -> int:
    """The first number of a package's version; 0 where it has none."""
    first = str(getattr(package, "__version__", "0")).partition(".")[0]
    return int(first) if first.isdigit() else 0


def hub_images(repository: str, image: str, label: str, shape: tuple[int, ...]) -> Arrays:
    """Download an image data set.

    Args:
        repository: OWNER/NAME.
        image: The column of the images.
        label: The column of the labels.
        shape: (height, width), or (height, width, channels).

    Returns:
        Training images and labels, then test images and labels, in the order of the hub's copy.

    Raises:
        UserError: The package `datasets` is not installed.
        BadData: It could not be loaded, or its images have another shape.
    """
    data = load_splits(repository)
    arrays = []
    for split in ("train", "test"):
        pixels = np.stack([np.asarray(picture) for picture in data[split][image]])
        if pixels.shape[1:] != shape or pixels.dtype != np.uint8:
            raise BadData(f"{repository} holds images {list(pixels.shape[1:])} {pixels.dtype}, expected {list(shape)} uint8")
        arrays += [pixels, np.asarray(list(data[split][label]))]
    return arrays[0], arrays[1], arrays[2], arrays[3]


@dataclass(frozen=True)
class HubSplit:
    """One split of a text data set.

    Args:
        name: DATASET/SPLIT.
        texts: All examples of the split.
        column: The column of the text.
        split: train, validation or test; None where documents are divided between train and validation by index.
    """

    name: str
    texts: Any
    column: str
    split: str | None

    def read(self, skip: int) -> Iterator[tuple[str, str]]:
        """Yield the text and the place of each document after the first `skip`.

        Args:
            skip: The number of documents to leave out at the beginning.

        Yields:
            The text, "" for an empty one, and its place such as "row 1".
        """
        for index in range(skip, len(self.texts)):
            yield self.texts[index][self.column] or "", f"row {index + 1}"


def hub_splits(name: str, column: str) -> list[HubSplit]:
    """Download a text data set.

    Validation and test splits of the data set are used as they are. Where it has no validation split, some documents of the
    training split become one (see `m2s.data.prepare_text`).

    Args:
        name: A name of `HUB_TEXTS`, or OWNER/NAME.
        column: The column of the text.

    Returns:
        The splits train, validation and test, where they exist.

    Raises:
        BadData: It could not be loaded, or has no such column or split.
    """
    entry = HUB_TEXTS.get(name) or HubText(name)
    data = load_splits(entry.repository, entry.config, entry.revision)
    splits = []
    for split in ("train", "validation", "test"):
        if split not in data:
            continue
        if column not in data[split].column_names:
            columns = ", ".join(data[split].column_names)
            raise BadData(
                f"{name} ({split}) has columns {columns}, expected {column!r}: name the one that holds the text: "
                "m2s data prepare --text-field NAME"
            )
        by_index = split == "train" and "validation" not in data
        splits.append(HubSplit(f"{name}/{split}", data[split], column, None if by_index else split))
    if not splits:
        raise BadData(f"{name} has the splits {', '.join(data)}, expected train, validation or test")
    return splits
