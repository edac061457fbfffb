"""Where data lies, and what is said when a file is not what it should be."""

import gzip
import hashlib
import os
import zlib
from pathlib import Path

from m2s.errors import UserError


class BadData(UserError):
    """A file is missing or does not hold what it should. The message names it, what was expected and what to do."""


def root() -> Path:
    """The folder of all data: $M2S_DATA, or ~/.cache/m2s."""
    return Path(os.environ.get("M2S_DATA") or "~/.cache/m2s").expanduser()


def sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror or error}") from error


def read_bytes(path: Path) -> bytes:
    """All of a file, unpacked where its name ends in .gz; an empty or damaged one is an error."""
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
