"""What training reads: rows of tokens by index, with a weight for each site and a label for each row where there are any."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from m2s import data
from m2s.data.files import BadData, root
from m2s.data.tokenizer import Tokenizer
from m2s.errors import UserError, suggest


@dataclass(frozen=True)
class Batch:
    x_0: Integer[Tensor, "B L"]
    weight: Float[Tensor, "B L"] | None = None  # of each site in loss and averages; 0 for padding
    label: Int[Tensor, "B"] | None = None

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(None if x is None else x.to(device, non_blocking=True) for x in (self.x_0, self.weight, self.label)))  # type: ignore[arg-type]

    def part(self, at: slice) -> "Batch":
        return Batch(*(None if x is None else x[at] for x in (self.x_0, self.weight, self.label)))  # type: ignore[arg-type]


@runtime_checkable
class Source(Protocol):
    """Any object with these can be trained on."""

    @property
    def vocab(self) -> int: ...

    @property
    def length(self) -> int:
        """Tokens of a row."""

    @property
    def size(self) -> int:
        """Rows to train on."""

    @property
    def held_out(self) -> int:
        """Rows to validate on."""

    @property
    def classes(self) -> int | None:
        """Labels lie in 0..classes-1; None: there are none."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of an image, whose sites a row holds in row-major order."""

    @property
    def description(self) -> dict[str, Any]:
        """What a checkpoint keeps about its data."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def train(self, indices: Int[Tensor, "B"]) -> Batch: ...

    def validation(self, indices: Int[Tensor, "B"]) -> Batch: ...


class ImageSource:
    """Images of a data set with labels."""

    tokenizer = None

    def __init__(self, images: data.Images) -> None:
        self.images = images
        self.vocab, self.length, self.shape = images.vocab, images.train.shape[1], images.shape
        self.classes = int(images.train_labels.max()) + 1
        self.size, self.held_out = len(images.train), len(images.test)
        self.description = images.description

    def train(self, indices: Int[Tensor, "B"]) -> Batch:
        return Batch(self.images.train[indices], None, self.images.train_labels[indices])

    def validation(self, indices: Int[Tensor, "B"]) -> Batch:
        return Batch(self.images.test[indices], None, self.images.test_labels[indices])


class TextSource:
    """Windows of a prepared text."""

    shape, classes = None, None

    def __init__(self, folder: str, length: int) -> None:
        self._train = data.Tokens(folder, "train", length)
        self._validation = data.Tokens(folder, "validation", length)
        self.vocab, self.length = self._train.vocab, length
        self.size, self.held_out = len(self._train), len(self._validation)
        self.description, self.tokenizer = self._train.description, self._train.tokenizer

    def train(self, indices: Int[Tensor, "B"]) -> Batch:
        return Batch(self._train[indices])

    def validation(self, indices: Int[Tensor, "B"]) -> Batch:
        return Batch(self._validation[indices])


def open_source(name: str, folder: str | None = None, length: int = 512, hub: bool = False) -> Source:
    """Open the data that a configuration names.

    Args:
        name: An image data set (`m2s.data.DATASETS`), or "text".
        folder: Where the data is; for text, a folder that `m2s data prepare` made ("$M2S_DATA" is replaced).
        length: Tokens of an example, for text.
        hub: Read images from the Hugging Face hub.

    Returns:
        The training and validation examples.

    Raises:
        UserError: There is no such data set, or the folder is missing or damaged.
    """
    if name in data.DATASETS:
        return ImageSource(data.load(name, folder, hub))
    if name != "text":
        raise UserError(f"data.name is {name!r}: {suggest(name, [*data.DATASETS, 'text'])}")
    if folder is None:
        raise UserError("data.folder is not given: name the folder that `m2s data prepare` made")
    try:
        return TextSource(folder.replace("$M2S_DATA", str(root()), 1), length)
    except BadData:
        raise
    except (ValueError, OSError) as error:
        raise UserError(f"data.folder: {error}") from error
