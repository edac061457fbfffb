"""Files: output paths that are checked before anything is computed, and writes that are atomic."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from m2s.errors import UserError


def output_file(path: Path, suffixes: tuple[str, ...]) -> Path:
    """Check that a file can be written at `path`, and create its folder.

    Args:
        path: The file.
        suffixes: The endings that are allowed, in lower case, such as (".png", ".pdf").

    Returns:
        `path`.

    Raises:
        UserError: `path` is a folder, has another ending, is not an ordinary file, or its folder is not writable.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file, such as {path / ('name' + suffixes[0])}")
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{path} must end in {' or '.join(suffixes)}")
    if os.path.lexists(path) and not path.is_file():
        raise UserError(f"{path} is not an ordinary file: give another name")
    output_folder(path.parent)
    return path


def output_folder(path: Path) -> Path:
    """Create a folder where it does not exist, and check that files can be written to it.

    Args:
        path: The folder.

    Returns:
        `path`.

    Raises:
        UserError: A file is in the way, or the folder is not writable.
    """
    blocked = next((parent for parent in (path, *path.parents) if os.path.lexists(parent) and not parent.is_dir()), None)
    if blocked is not None:
        raise UserError(f"{blocked} is a file, so nothing can be written below it: give another place")
    # Permission bits do not tell about read-only or full file systems: write a probe.
    probe = path / f".m2s-{os.getpid()}.tmp"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror or error}") from error
    return path


def require_absent(files: Sequence[Path], overwrite: bool) -> None:
    """Check that no file would be replaced by accident.

    Args:
        files: The files that are about to be written.
        overwrite: Whether existing files may be replaced.

    Raises:
        UserError: A file exists and `overwrite` is false.
    """
    there = next((path for path in files if path.exists()), None)
    if there is not None and not overwrite:
        raise UserError(f"{there} is there already: give another --out, or --overwrite to replace it", option="out")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file so that readers see the old or the new content, never a part of it.

    Args:
        path: The file to write.

    Yields:
        A temporary path in the same folder, with the same suffix. When the block ends without an error, it is flushed to the
        disk and renamed to `path`. After an error it is deleted.

    Example:
        >>> with atomic_write(Path("weights.safetensors")) as temporary:
        ...     save_file(weights, temporary)
    """
    # The same folder: a rename across file systems is not atomic. The process id: several processes may write the same file.
    temporary = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Wait until what was written to a file is on the disk.

    Args:
        path: The file.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically.

    Args:
        path: The file.
        value: Anything that `json.dumps` accepts.

    Raises:
        ValueError: `value` contains NaN or infinity, which JSON does not have.
    """
    text = json.dumps(value, indent=1, allow_nan=False)
    with atomic_write(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
