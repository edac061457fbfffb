"""Where data is stored, and how its files are read."""

import gzip
import hashlib
import os
import zlib
from pathlib import Path

from m2s.errors import UserError


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


def read_bytes(path: Path) -> bytes:
    """Read a file, and decompress it if its name ends in .gz.

    Args:
        path: The file.

    Returns:
        The contents, at least one byte.

    Raises:
        BadData: The file is missing, empty or damaged.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".gz" and data:
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadData(f"{path} is a damaged or incomplete gzip file ({error}): get it again") from error
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror or error}") from error
    if not data:
        raise BadData(f"{path} is empty: get it again")
    return data
