"""Files: output paths that are checked before anything is computed, writes that are atomic, and JSON that may be damaged."""

import contextlib
import difflib
import errno
import hashlib
import io
import json
import math
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from m2s.errors import UserError

# A few digits that stand for the name of this machine in the names of temporary files.
_HOST = hashlib.blake2b(socket.gethostname().encode(), digest_size=3).hexdigest()


LOCAL_FOLDERS = ("runs", "out", "output", "outputs", "results", "checkpoints", "data", "tmp")
"""Folders that no name on the Hugging Face hub is likely to begin with. `m2s train` writes to runs/ by default."""


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
    try:
        for parent in reversed([parent for parent in (path, *path.parents) if not parent.exists()]):
            parent.mkdir(exist_ok=True)
            fsync(parent.parent)
        probe = _temporary(path / "m2s.tmp")
        create_file(probe)
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


def is_likely_local(name: str | Path) -> bool:
    """Return whether a path that does not exist is more likely a mistyped path than OWNER/NAME on the Hugging Face hub.

    Args:
        name: The path or name, as it was given.

    Returns:
        True where its folder exists, its ending is that of a file, it begins like a path or with a folder for results, or a
        similar path exists (`similar_path`). Other names in the current folder do not matter.
    """
    path = Path(name).expanduser()
    if path.is_absolute() or path.parts[:1] in ((".",), ("..",)) or path.suffix in (".txt", ".json", ".jsonl", ".parquet"):
        return True
    if len(path.parts) < 2:
        return False
    return path.parent.is_dir() or path.parts[0] in LOCAL_FOLDERS or similar_path(path) is not None


def similar_path(path: Path) -> Path | None:
    """Return an existing path that differs in a letter or so of some of its names.

    Args:
        path: A path that does not exist, such as run/digits.

    Returns:
        The path, such as runs/digits; None where there is none. Every name must be similar, not only that of the first folder.
    """
    found = Path(path.anchor)
    for name in path.parts[1 if path.anchor else 0 :]:
        if not (found / name).exists():
            try:
                names = [entry.name for entry in found.iterdir()]
            except OSError:  # a file, or a folder that cannot be read
                return None
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
            if not close:
                return None
            name = close[0]
        found /= name
    return found


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
    temporary = _temporary(path)
    try:
        create_file(temporary)
        yield temporary
        fsync(temporary)
        replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """Name a temporary file for `path`, and remove those that killed processes left.

    It is in the same folder, since a rename across file systems is not atomic. Its name has the machine and the process, since
    several processes may write the same file. Only a process of this machine can be known to have ended.
    """
    start = f".{path.stem}-{_HOST}-"
    with contextlib.suppress(OSError), os.scandir(path.parent) as files:
        for name in [file.name for file in files]:
            process = name.removeprefix(start).removesuffix(path.suffix)
            if name.startswith(start) and process.isdecimal() and not _is_running(int(process)):
                path.with_name(name).unlink(missing_ok=True)
    return path.with_name(f"{start}{os.getpid()}{path.suffix}")


def _is_running(process: int) -> bool:
    """Return whether a process of this machine exists."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it belongs to another user
        pass
    return True


def create_file(path: Path) -> None:
    """Create an empty file. A file or a symbolic link that has the name already is removed, and nothing is written through it.

    Args:
        path: The file.

    Raises:
        OSError: It cannot be created.
    """
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))


def open_file(path: Path, flags: int) -> int:
    """Open a file of ours for writing, or create it, but never through a symbolic link.

    Args:
        path: The file.
        flags: Flags of `os.open`, such as `os.O_RDWR`.

    Returns:
        The file descriptor.

    Raises:
        UserError: `path` is a symbolic link, or not an ordinary file.
        OSError: It cannot be opened.
    """
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise UserError(f"{path} is a link or not an ordinary file, so nothing is written to it: remove it")
    # O_NOFOLLOW: the file may have been replaced by a link since the check above.
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def open_regular(path: Path) -> io.BufferedReader:
    """Open an ordinary file for reading. A pipe or a device, from which reading could wait forever, is an error.

    Args:
        path: The file, or a link to one.

    Returns:
        The open file.

    Raises:
        OSError: It cannot be opened, or is not an ordinary file.
    """
    # O_NONBLOCK: opening a pipe without a writer would wait.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path) -> bytes:
    """Return the contents of an ordinary file; see `open_regular`.

    Args:
        path: The file, or a link to one.

    Raises:
        OSError: It cannot be read, or is not an ordinary file.
    """
    with open_regular(path) as file:
        return file.read()


def replace(source: Path, target: Path) -> None:
    """Rename a file or folder, and wait until the new name is on the disk.

    Args:
        source: The path to rename.
        target: The new path. A file or an empty folder of that name is replaced.

    Raises:
        OSError: It cannot be renamed.
    """
    os.replace(source, target)
    fsync(target.parent)


def fsync(path: Path) -> None:
    """Wait until what was written to a file is on the disk, or the names of the files in a folder.

    Args:
        path: The file or folder.

    Raises:
        OSError: It cannot be written.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems, such as network ones, cannot sync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
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


def parse_json(data: bytes | str, allow_nan: bool = False, kind: type = dict) -> Any:
    """Parse JSON that may be damaged. Whatever is wrong with it, the error is a ValueError.

    Args:
        data: The text, in UTF-8.
        allow_nan: Accept NaN and infinities, which Python writes although JSON does not have them.
        kind: The expected type, dict or list.

    Returns:
        The value.

    Raises:
        ValueError: The text is not UTF-8, not JSON, of another type, nested too deeply, has NaN, or has a key twice.
    """

    def number(digits: str) -> float:
        value = float(digits)
        if not allow_nan and not math.isfinite(value):
            raise ValueError(f"it has the number {digits[:20]}")
        return value

    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=number, parse_float=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, kind):
        raise ValueError(f"it is a {type(value).__name__}, expected {'an object' if kind is dict else 'a list'}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys all differ: of two equal keys, Python would ignore the first."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return value


def read_json(path: Path, hint: str, allow_nan: bool = False) -> dict[str, Any]:
    """Read a JSON object from a file of ours.

    Args:
        path: The file.
        hint: What the user can do if it is damaged, as the end of the message.
        allow_nan: Accept NaN and infinities.

    Returns:
        The object.

    Raises:
        UserError: The file cannot be read or is damaged.
    """
    try:
        return parse_json(read_regular(path), allow_nan)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): {hint}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): {hint}") from error
