"""Images on the command line: an .npz of samples, or a split of a data set such as mnist:test."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2s.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

SPLITS = ("train", "test")


@dataclass(frozen=True)
class ImageTokens:
    """Images as tokens, with their name and format.

    Args:
        name: A file, or a split such as mnist:test.
        tokens: Gray or color levels, uint8 [N, L].
        shape: The shape of one image. Its product is L.
        levels: The number of levels.
    """

    name: str
    tokens: "Tensor"
    shape: tuple[int, ...]
    levels: int

    def first(self, count: int | None) -> "ImageTokens":
        """Return the first `count` images, or all where it is None.

        Args:
            count: The number of images; None: all.
        """
        return ImageTokens(self.name, self.tokens[:count], self.shape, self.levels)

    @property
    def sha256(self) -> str:
        """The checksum of the levels, one byte each, and of their format."""
        about = json.dumps([list(self.tokens.shape), list(self.shape), self.levels])
        return hashlib.sha256(about.encode() + self.tokens.numpy().tobytes()).hexdigest()


def is_split(name: str) -> bool:
    """Return whether `name` is like mnist:train, and not the name of a file.

    Args:
        name: What was typed.
    """
    from m2s.data import image_sets

    data, colon, part = name.partition(":")
    return bool(colon) and data in image_sets() and part in SPLITS and not Path(name).exists()


def load_split(name: str) -> ImageTokens:
    """Return the images of a split of a data set.

    Args:
        name: The data set and the split, such as mnist:train.

    Raises:
        UserError: There is no such split.
    """
    from m2s.data import image_sets, load

    if not is_split(name):
        known = ", ".join(f"{data}:{part}" for data in image_sets() for part in SPLITS)
        raise UserError(f"{name!r} is not a split of a data set: choose from {known}")
    data, _, part = name.partition(":")
    images = load(data)
    return ImageTokens(name, getattr(images, part), images.shape, images.vocab)


def read(name: str, reference: ImageTokens) -> ImageTokens:
    """Read samples, which must have the format of the reference.

    Args:
        name: An .npz of m2s sample, or a split such as mnist:train.
        reference: The images to compare with.

    Returns:
        The samples.

    Raises:
        UserError: The file cannot be read, or its images have another shape or other levels.
    """
    if is_split(name):
        images = load_split(name)
        if (images.shape, images.levels) != (reference.shape, reference.levels):
            raise UserError(
                f"{name} has images of {list(images.shape)} in {images.levels} levels, but {reference.name} has "
                f"{list(reference.shape)} in {reference.levels}: give images of the same size and levels"
            )
        return images
    tokens = read_tokens(Path(name), reference)
    data = (read_settings(name) or {}).get("data")
    if isinstance(data, dict) and (data.get("shape"), data.get("levels")) != (list(reference.shape), reference.levels):
        raise UserError(
            f"{name} says that it holds {data}, but {reference.name} has images of {list(reference.shape)} in "
            f"{reference.levels} levels: give images of the same size and levels"
        )
    return ImageTokens(name, tokens, reference.shape, reference.levels)


def read_tokens(path: Path, reference: ImageTokens) -> "Tensor":
    """Read the tokens of an .npz, which must be images of the same number of sites and levels as the reference.

    Args:
        path: The file.
        reference: The images to compare with.

    Returns:
        The tokens, uint8 [N, L].

    Raises:
        UserError: The file cannot be read, or holds something else.
    """
    import numpy as np
    import torch

    from m2s.data import image_sets
    from m2s.npz import read_npz

    if not path.is_file():
        splits = ", ".join(f"{name}:train" for name in image_sets())
        raise UserError(
            f"there is no file {path}: give an .npz that m2s sample wrote, or a split of a data set such as {splits}"
        )
    try:
        tokens = read_npz(path, ["tokens"])["tokens"]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no .npz with an array `tokens`, as m2s sample writes it ({error})") from error
    sites = reference.tokens.shape[1]
    if tokens.dtype.kind not in "iu" or tokens.ndim != 2 or tokens.shape[1] != sites:
        raise UserError(
            f"{path} holds {tokens.dtype} tokens of shape {list(tokens.shape)}, but an image of {reference.name} is "
            f"{' x '.join(map(str, reference.shape))}: expected whole numbers [N, {sites}]"
        )
    outside = (tokens < 0) | (tokens >= reference.levels)
    if outside.any():
        at = tuple(int(i) for i in np.argwhere(outside)[0])
        raise UserError(
            f"{path}: tokens{list(at)} is {tokens[at]}, but the levels of {reference.name} are 0..{reference.levels - 1}: "
            "these samples have another vocabulary"
        )
    return torch.from_numpy(tokens.astype(np.uint8))


def read_settings(name: str) -> dict[str, Any] | None:
    """Return the settings that m2s sample wrote beside the tokens: how they were drawn.

    Args:
        name: An .npz of samples, or a split of a data set.

    Returns:
        The settings, None where there are none.

    Raises:
        OSError: The disk fails. A result without the settings would look complete.
    """
    from m2s.npz import read_npz

    if is_split(name):
        return None
    try:
        found = json.loads(str(read_npz(Path(name), ["settings"])["settings"]))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
