"""What training reads: examples by index, with a weight for each position and a label for each example where there are any.

A data set is a function `(folder, length, hub) -> Source` in the registry `DATASETS`. Training uses nothing but the members of
`Source`, so any object that has them can be trained on.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from m2s.data.files import root
from m2s.data.images import ImageDataset
from m2s.data.tokenizer import Tokenizer
from m2s.data.tokens import Tokens
from m2s.errors import UserError, UserTypeError
from m2s.registry import Registry


@dataclass(frozen=True)
class Batch:
    """Some examples.

    Args:
        x_0: Clean tokens, [B, L].
        weight: Weight of each position in the loss and in averages, [B, L]; 0 for padding. None: every weight is 1.
        label: Class of each example, [B]; None where there are no classes.
    """

    x_0: Integer[Tensor, "B L"]
    weight: Float[Tensor, "B L"] | None = None
    label: Int[Tensor, "B"] | None = None

    def to(self, device: torch.device) -> "Batch":
        """Return a copy on `device`. From pinned memory the copy is asynchronous.

        Args:
            device: The device.
        """
        return Batch(*(None if x is None else x.to(device, non_blocking=True) for x in (self.x_0, self.weight, self.label)))  # type: ignore[arg-type]

    def part(self, at: slice) -> "Batch":
        """Return the examples of a slice.

        Args:
            at: The slice of examples.
        """
        return Batch(*(None if x is None else x[at] for x in (self.x_0, self.weight, self.label)))  # type: ignore[arg-type]


@runtime_checkable
class Source(Protocol):
    """Training and validation examples by index. Any object with these members can be trained on."""

    @property
    def vocab(self) -> int:
        """The number of clean tokens: `x_0` is in 0..vocab-1."""

    @property
    def length(self) -> int:
        """The number of tokens of an example."""

    @property
    def size(self) -> int:
        """The number of training examples."""

    @property
    def held_out(self) -> int:
        """The number of validation examples."""

    @property
    def classes(self) -> int | None:
        """Labels are in 0..classes-1; None where there are no labels."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of an image, whose pixels are the tokens in row-major order; None for text."""

    @property
    def description(self) -> dict[str, Any]:
        """The entry "data" of a checkpoint's config.json, such as {"kind": "text", "length": 128}."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that decodes samples to text; None for images."""

    def train(self, indices: Int[Tensor, "B"]) -> Batch:
        """Return the training examples with these indices.

        Args:
            indices: Indices below `size`, [B].

        Returns:
            The examples, with weights and labels where there are any.
        """

    def validation(self, indices: Int[Tensor, "B"]) -> Batch:
        """Return the validation examples with these indices.

        Args:
            indices: Indices below `held_out`, [B].

        Returns:
            The examples, with weights and labels where there are any.
        """


OpenDataset = Callable[[str | None, int, bool], Source]
"""Opens a data set: (data.folder, data.length, data.hub) of the configuration to a `Source`."""

DATASETS: Registry[OpenDataset] = Registry("data set")
"""Every data set that `m2s train --data.name` can open. The built-in ones are added in `m2s/data/__init__.py`."""


def fingerprint(source: Source) -> str | None:
    """Return a SHA-256 that identifies the examples of a data set, so that a run does not resume on other ones by accident.

    Args:
        source: The data set. Its attribute `fingerprint` is optional.

    Returns:
        `source.fingerprint`; None where it has none.
    """
    return getattr(source, "fingerprint", None)


def is_padded(source: Source) -> bool:
    """Return whether some examples of a data set are padded, so that a network must not read all positions.

    Args:
        source: The data set. Its attribute `padded` is optional.

    Returns:
        `source.padded`; False where it has none.
    """
    return bool(getattr(source, "padded", False))


class ImageSource:
    """Examples of an image data set, with labels. The test split is used for validation.

    Args:
        images: The data set.
    """

    tokenizer = None

    def __init__(self, images: ImageDataset) -> None:
        self.images = images
        self.vocab, self.length, self.shape = images.vocab, images.train.shape[1], images.shape
        self.classes = int(images.train_labels.max()) + 1
        self.size, self.held_out = len(images.train), len(images.test)
        self.description = images.description

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of all images and labels, whatever the files that they were read from."""
        return self.images.fingerprint

    def train(self, indices: Int[Tensor, "B"]) -> Batch:
        """Return the training images with these indices.

        Args:
            indices: Indices below `size`, [B].

        Returns:
            Pixels [B, L] and labels [B].
        """
        return Batch(self.images.train[indices], None, self.images.train_labels[indices])

    def validation(self, indices: Int[Tensor, "B"]) -> Batch:
        """Return the test images with these indices.

        Args:
            indices: Indices below `held_out`, [B].

        Returns:
            Pixels [B, L] and labels [B].
        """
        return Batch(self.images.test[indices], None, self.images.test_labels[indices])


SLOW_BYTES = 5_000_000_000  # comparing more than this takes several seconds, so that it is announced


class TextSource:
    """Windows of a text that `m2s data prepare` packed.

    Args:
        folder: The folder of the packed text.
        length: The number of tokens of a window.
    """

    shape, classes = None, None

    def __init__(self, folder: str, length: int) -> None:
        self.folder = folder
        self._train = Tokens(folder, "train", length)
        self._validation = Tokens(folder, "validation", length)
        self.vocab, self.length = self._train.vocab, length
        self.size, self.held_out = len(self._train), len(self._validation)
        self.description, self.tokenizer = self._train.description, self._train.tokenizer

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the packed tokens and of the tokenizer, from the checksums in meta.json."""
        return self._train.fingerprint

    def verify(self) -> None:
        """Compare the packed tokens with their checksums and with the vocabulary.

        Raises:
            BadData: A file was changed.
        """
        size = 2 * (self.size + self.held_out) * self.length
        if size > SLOW_BYTES:
            print(f"comparing {size / 1e9:.0f} GB of tokens with their SHA-256", file=sys.stderr, flush=True)
        self._train.verify()
        self._validation.verify()

    def train(self, indices: Int[Tensor, "B"]) -> Batch:
        """Return the training windows with these indices.

        Args:
            indices: Indices below `size`, [B].

        Returns:
            Windows, [B, L].
        """
        return Batch(self._train[indices])

    def validation(self, indices: Int[Tensor, "B"]) -> Batch:
        """Return the validation windows with these indices.

        Args:
            indices: Indices below `held_out`, [B].

        Returns:
            Windows, [B, L].
        """
        return Batch(self._validation[indices])


def open_text(folder: str | None, length: int, hub: bool) -> Source:
    """Open a packed text: the entry "text" of `DATASETS`.

    Args:
        folder: The folder that `m2s data prepare` made.
        length: The number of tokens of a window.
        hub: Not used. Text of the hub is packed first, by `m2s data prepare OWNER/NAME`.

    Returns:
        The training and validation windows.

    Raises:
        UserError: `folder` is None or is no packed text.
    """
    if folder is None:
        raise UserError("data.folder is not given: name the folder that `m2s data prepare` made")
    return TextSource(folder, length)


def open_source(name: str, folder: str | None = None, length: int = 512, hub: bool = False) -> Source:
    """Open the data set that a configuration names.

    Args:
        name: A name of `m2s.data.DATASETS`: an image data set, "text", or what a plugin registered.
        folder: Where the data is; a leading "$M2S_DATA" is replaced. For text, a folder that `m2s data prepare` made.
        length: The number of tokens of an example, for text.
        hub: Download images from the Hugging Face hub in place of reading files.

    Returns:
        The training and validation examples.

    Raises:
        UserError: There is no such data set, or the folder is missing or damaged.
        TypeError: The registered function did not return a `Source`.
    """
    open_dataset = DATASETS.find(name, "data.name")
    if folder is not None:
        folder = folder.replace("$M2S_DATA", str(root()), 1)
    try:
        source = open_dataset(folder, length, hub)
    except UserError as error:
        raise (error if error.option is None else error.within("data")) from None
    except (ValueError, OSError) as error:
        raise UserError(f"data.folder: {error}") from error
    if not isinstance(source, Source):
        members = [member for member in dir(Source) if not member.startswith("_") and not hasattr(source, member)]
        raise UserTypeError(
            f"the data set {name!r} returned {type(source).__name__}, which has no {', '.join(members)}: "
            "return an object with all members of m2s.data.Source"
        )
    return source
