"""Read .npz and .npy files that may be damaged, or written by others: the sizes in their headers are checked before reading."""

import io
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m2s.io import open_regular

MAX_BYTES = 4 << 30  # of the arrays of a file. 4 MB can decompress to this much.
# Arrays above this size must not be compressed more than so many times. Zeros are compressed about 1,000 times.
LARGE_BYTES, MAX_RATIO = 256 << 20, 200


def read_npz(
    path: Path | io.BytesIO, names: Sequence[str], optional: Sequence[str] = (), limit: int = MAX_BYTES
) -> dict[str, np.ndarray]:
    """Read arrays of an .npz file. Nothing in it is unpickled.

    Args:
        path: The file.
        names: The arrays to read.
        optional: Arrays to read where the file has them.
        limit: The greatest number of bytes that these arrays may take.

    Returns:
        The arrays by name.

    Raises:
        ValueError: The file is damaged, lacks an array, or is too large.
        OSError: It cannot be read.
    """
    try:
        with open_regular(path) if isinstance(path, Path) else path as file, zipfile.ZipFile(file) as archive:
            entries = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if missing := [name for name in names if name not in entries]:
                held = ", ".join(list(entries)[:8]) or "nothing"
                raise ValueError(f"it has no array {', '.join(missing)}, only {held}")
            chosen = [name for name in (*names, *optional) if name in entries]
            if (total := sum(entries[name].file_size for name in chosen)) > limit:
                raise ValueError(f"its arrays take {total:,} bytes, and at most {limit:,} are read")
            stored = sum(entries[name].compress_size for name in chosen)
            if total > LARGE_BYTES and total > MAX_RATIO * stored:
                raise ValueError(f"its arrays take {total:,} bytes, compressed to {stored:,}: they are not samples")
            return {name: _read(archive, entries[name]) for name in chosen}
    except (ValueError, OSError):
        raise
    except Exception as error:  # a damaged archive can raise nearly anything: BadZipFile, zlib.error, struct.error, SyntaxError
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """Read one array of an archive."""
    with archive.open(entry) as file:
        _check_header(file, entry.file_size)
    with archive.open(entry) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def read_npy(path: Path, limit: int = MAX_BYTES) -> np.ndarray:
    """Read an .npy file. Nothing in it is unpickled.

    Args:
        path: The file.
        limit: The greatest number of bytes of the file.

    Returns:
        The array.

    Raises:
        ValueError: The file is damaged or too large.
        OSError: It cannot be read.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, io.SEEK_END)
            if size > limit:
                raise ValueError(f"it has {size:,} bytes, and at most {limit:,} are read")
            file.seek(0)
            _check_header(file, size)
            file.seek(0)
            return np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, OSError):
        raise
    except Exception as error:  # a damaged header can raise nearly anything
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _check_header(file: Any, size: int) -> None:
    """Raise ValueError where the shape in the header of an array does not fit the number of its bytes."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not read")
    if any(type(each) is not int or each < 0 for each in shape):
        raise ValueError(f"its shape is {shape}")
    if (expected := math.prod(shape) * dtype.itemsize + file.tell()) != size:
        raise ValueError(f"it has {size:,} bytes, expected {expected:,} for the shape {list(shape)} in its header")
