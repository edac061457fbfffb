"""Data sets from the Hugging Face hub, through the `datasets` package: asked for by name only, never as a silent fallback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from m2s.data.files import BadData
from m2s.errors import UserError

if TYPE_CHECKING:
    from m2s.data.images import Arrays, ImageSet
    from m2s.data.sources import Source


@dataclass(frozen=True)
class HubText:
    """A text data set on the hub. Scripts are not run: `revision` is the hub's own conversion to parquet files."""

    repository: str
    config: str | None = None
    revision: str | None = None


HUB_TEXTS = {
    "openwebtext": HubText("Skylion007/openwebtext", revision="refs/convert/parquet"),
    "lm1b": HubText("billion-word-benchmark/lm1b", revision="refs/convert/parquet"),
    "text8": HubText("afmck/text8"),
}


def _load(repository: str, config: str | None = None, revision: str | None = None) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(f"{repository} is on the Hugging Face hub, which needs: pip install datasets") from error
    try:
        return load_dataset(repository, config, revision=revision)
    except Exception as error:  # a network, a missing name, a refused script: whatever it was, say it in one line
        reason = " ".join(str(error).split())
        raise BadData(f"{repository} could not be loaded from the hub ({type(error).__name__}: {reason})") from error


def hub_images(images: ImageSet) -> Arrays:
    """The train and test splits of an image data set, as the hub's copy orders them."""
    if images.hub is None:
        raise UserError(f"{images.name} is not on the hub: it is {images.summary}")
    repository, image, label = images.hub
    data = _load(repository)
    parts = []
    for split in ("train", "test"):
        pixels = np.stack([np.asarray(picture) for picture in data[split][image]])
        if pixels.shape[1:] != images.shape or pixels.dtype != np.uint8:
            raise BadData(
                f"{repository} holds images {list(pixels.shape[1:])} {pixels.dtype}, expected {list(images.shape)} uint8"
            )
        parts += [pixels, np.asarray(list(data[split][label]))]
    return parts[0], parts[1], parts[2], parts[3]


def hub_sources(name: str, column: str) -> list[Source]:
    """One source for each split of a text data set. Its validation and test splits stay what they are; where it has no
    validation split, every so many documents of the train split become one (see `prepare_text`)."""
    from m2s.data.sources import NAME_IT, Document, Source, named_field

    entry = HUB_TEXTS.get(name) or HubText(name)
    data = _load(entry.repository, entry.config, entry.revision)
    sources = []
    for split in ("train", "validation", "test"):
        if split not in data:
            continue
        rows = data[split]
        if column not in rows.column_names:
            raise BadData(f"{name} ({split}) has columns {', '.join(rows.column_names)}, expected {column!r}: {NAME_IT}")

        def read(skip: int, rows: Any = rows) -> Iterator[Document]:
            for index in range(skip, len(rows)):
                yield Document(rows[index][column] or "", f"row {index + 1}")

        identity = {"name": f"{name}/{split}", "rows": len(rows), "fingerprint": rows._fingerprint, **named_field(column)}
        by_index = split == "train" and "validation" not in data
        sources.append(Source(f"{name}/{split}", read, identity, None if by_index else split))
    if not sources:
        raise BadData(f"{name} has the splits {', '.join(data)}, expected train, validation or test")
    return sources
