"""Files: output paths that are checked before anything is computed, and writes that are atomic."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from m2s.errors import UserError


def output_file(path: Path, suffixes: tuple[str, ...]) -> Path:
    """`path` as a place for a file: its folder made, known to be writable, its ending one of `suffixes`."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file, such as {path / ('name' + suffixes[0])}")
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{path} must end in {' or '.join(suffixes)}")
    if os.path.lexists(path) and not path.is_file():
        raise UserError(f"{path} is not an ordinary file: give another name")
    output_folder(path.parent)
    return path


def output_folder(path: Path) -> Path:
    """`path` as a folder that files can be written to, made where it does not exist."""
    blocked = next((parent for parent in (path, *path.parents) if os.path.lexists(parent) and not parent.is_dir()), None)
    if blocked is not None:
        raise UserError(f"{blocked} is a file, so nothing can be written below it: give another place")
    probe = path / f".m2s-{os.getpid()}.tmp"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror or error}") from error
    return path


def require_absent(files: Sequence[Path], overwrite: bool) -> None:
    """None of `files` is there, or it may be replaced."""
    there = next((path for path in files if path.exists()), None)
    if there is not None and not overwrite:
        raise UserError(f"{there} is there already: give another --out, or --overwrite to replace it")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, which takes its place on the disk when the block ends well and is gone if not."""
    temporary = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """What was written to `path` is on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON; NaN and infinity, which JSON does not have, are an error."""
    text = json.dumps(value, indent=1, allow_nan=False)
    with atomic_write(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
