"""Where data is stored, and how its files are read."""

import gzip
import hashlib
import os
import zlib
from pathlib import Path

from m2s.errors import UserError

MAX_BYTES = 1 << 30
"""The greatest size of a file of images. Those of MNIST and CIFAR-10 are below 50 MB."""


class BadData(UserError):
    """A data file is missing or damaged. The message names the file, what was expected and what to do."""


def root() -> Path:
    """Return the folder of all data: $M2S_DATA, or ~/.cache/m2s."""
    return Path(os.environ.get("M2S_DATA") or "~/.cache/m2s").expanduser()


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits.

    Args:
        path: The file.

    Raises:
        BadData: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror or error}") from error


def inside(folder: Path, name: object) -> Path:
    """Return the path of a file that a description in a folder names. It must be in that folder.

    Args:
        folder: The folder.
        name: The name, as the description has it.

    Returns:
        The path.

    Raises:
        BadData: It is not a name, or leads out of the folder, also through a symbolic link.
    """
    if not isinstance(name, str) or not name or "\0" in name or Path(name).name != name or name == "..":
        raise BadData(
            f"{folder} names the file {str(name)[:200]!r}, expected a name without folders: it was not written by m2s"
        )
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise BadData(f"{path} is a link out of its folder, which is not followed: copy the file into {folder}")
    return path


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Read a file, and decompress it if its name ends in .gz.

    Args:
        path: The file.
        limit: The greatest number of bytes, decompressed.

    Returns:
        The contents, at least one byte.

    Raises:
        BadData: The file is missing, empty, damaged or too large.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" and path.stat().st_size else path.open("rb") as file:
            data = file.read(limit + 1)  # a small .gz can decompress to any size
        if len(data) > limit:
            raise BadData(f"{path} has more than {limit:,} bytes, which no file of this kind has: get it again")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadData(f"{path} is a damaged or incomplete gzip file ({error}): get it again") from error
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror or error}") from error
    if not data:
        raise BadData(f"{path} is empty: get it again")
    return data
