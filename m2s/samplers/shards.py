"""Samples on disk in shards, so that a run can be interrupted, resumed, or divided among processes.

Beside the output file there is a folder `<name>.parts` with `settings.json` and one .npz file for each batch. Each file is
written atomically. The process that writes the last shard joins them and deletes the folder.
"""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from m2s.errors import UserError
from m2s.io import atomic_write, open_file, parse_json, read_regular, replace, write_json
from m2s.npz import read_npz

DIGEST = re.compile("[0-9a-f]{64}")
LOCK = ".lock"  # start of the names of lock files, which only divided runs have


class CorruptShardError(UserError):
    """A shard is damaged, or the shards belong to a run with other settings."""


class SampleShards:
    """The samples of one run, on disk in shards of `size` samples.

    Args:
        out: The output file. The folder of the shards is beside it.
        n: The number of samples.
        length: The length of a sample.
        size: Samples of one shard.
        settings: Everything that the samples depend on. A folder with other settings is an error.
        vocab: The number of clean tokens. A shard with other tokens is damaged. None: tokens are not checked.

    Attributes:
        folder: The folder of the shards.
        settings: The settings, with n, length and size added.
    """

    def __init__(self, out: Path, n: int, length: int, size: int, settings: dict[str, Any], vocab: int | None = None) -> None:
        self.out, self.n, self.length, self.size, self.vocab = out, n, length, size, vocab
        self.folder = _folder(out)
        self.settings = {**settings, "n": n, "length": length, "part": size}

    @contextlib.contextmanager
    def lock(self, shard: int = 0, shards: int = 1) -> Iterator[None]:
        """Keep other processes from drawing the same samples inside a `with` block. The folder is created if it does not exist.

        The locks are the operating system's: they are released when the process ends, in whatever way.

        Args:
            shard: The index of this process, from 0.
            shards: The number of processes. Processes with other indices may draw at the same time.

        Yields:
            None.

        Raises:
            UserError: Another process draws these samples, or the folder or a file in it is a symbolic link.
        """
        with contextlib.ExitStack() as stack:
            self._lock(stack, "", exclusive=shards == 1)
            if shards > 1:
                self._lock(stack, f"{LOCK}-{shard}-of-{shards}", exclusive=True)
            yield

    @contextlib.contextmanager
    def joining(self) -> Iterator[bool]:
        """Wait until no other process joins the shards.

        Yields:
            Whether all shards are there. Another process may have joined and deleted them.
        """
        with contextlib.ExitStack() as stack:
            if self.folder.is_dir():
                self._lock(stack, f"{LOCK}-join", exclusive=True, wait=True)
            yield self.is_complete()

    def _lock(self, stack: contextlib.ExitStack, name: str, exclusive: bool, wait: bool = False) -> None:
        """Lock the folder, or a file in it, until the stack is closed."""
        import fcntl  # imported late: Windows does not have it

        path = self.folder / name
        while True:
            if self.folder.is_symlink():
                raise UserError(f"{self.folder} is a link, and nothing is written through links: remove it")
            if not wait:
                self.folder.mkdir(parents=True, exist_ok=True)
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                handle = open_file(path, os.O_RDWR) if name else os.open(path, flags)
            except FileNotFoundError:  # another process has finished and deleted the folder
                if wait:
                    return
                continue
            with contextlib.ExitStack() as opened:
                opened.callback(os.close, handle)
                try:
                    fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError:
                    raise UserError(
                        f"{self.out} is being drawn by another process: wait for it, or give another --out"
                    ) from None
                # Otherwise it is the lock of a folder that was deleted while this process waited.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(path.stat(), os.fstat(handle)):
                        stack.push(opened.pop_all())
                        return

    def open(self, overwrite: bool = False) -> int:
        """Create the folder, or resume with the one that exists.

        Args:
            overwrite: Delete the folder of an unfinished run with other settings, and start again from the beginning.

        Returns:
            The number of samples that are on disk already.

        Raises:
            CorruptShardError: The folder belongs to a run with other settings, or its settings cannot be read.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "settings.json"
        try:
            if path.exists():
                self._check_settings(path)
        except CorruptShardError:
            if not overwrite:
                raise
            shutil.rmtree(self.folder)
            self.folder.mkdir()
        if not path.exists():
            write_json(path, self.settings)
        return sum(min(self.size, self.n - first) for first in self.starts() if self._path(first).exists())

    def _check_settings(self, path: Path) -> None:
        """The settings on disk are those of this run."""
        try:
            there = parse_json(read_regular(path))
        except (ValueError, OSError) as error:
            raise CorruptShardError(f"{path} is damaged ({error}): delete {self.folder} to start again") from None
        here = json.loads(json.dumps(self.settings))
        other = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        if other:
            changes = ", ".join(_change(name, there.get(name), here.get(name)) for name in other)
            raise CorruptShardError(
                f"{self.folder} holds an unfinished run with other settings ({changes}): "
                "give another --out, or delete the folder"
            )

    def starts(self) -> range:
        """Return the index of the first sample of each shard."""
        return range(0, self.n, self.size)

    def missing(self, shard: int = 0, shards: int = 1) -> Iterator[tuple[int, int]]:
        """Yield the shards that are not on disk yet.

        Args:
            shard: The index of this process, from 0.
            shards: The number of processes. Each draws every `shards`-th shard.

        Yields:
            The number of the first sample, and the number of samples.
        """
        for index, first in enumerate(self.starts()):
            if index % shards == shard and not self._path(first).exists():
                yield first, min(self.size, self.n - first)

    def write(self, first: int, tokens: Int[Tensor, "B L"]) -> None:
        """Write one shard atomically.

        Args:
            first: The number of its first sample.
            tokens: The samples, [B, L].
        """
        with atomic_write(self._path(first)) as temporary:
            np.savez_compressed(temporary, tokens=tokens.cpu().numpy().astype(np.int32))

    def is_complete(self) -> bool:
        """Return whether all shards are on disk."""
        return all(self._path(first).exists() for first in self.starts())

    def read_all(self) -> Int[Tensor, "n L"]:
        """Return all samples, [n, L].

        Raises:
            CorruptShardError: A shard is damaged.
        """
        return torch.cat([self._read(first) for first in self.starts()])

    def delete(self) -> None:
        """Delete the folder. It is renamed first: what is left of it after a kill would look like an unfinished run."""
        _delete(self.folder)

    def _path(self, first: int) -> Path:
        """The file of a shard."""
        return self.folder / f"{first:09d}.npz"

    def _read(self, first: int) -> Tensor:
        """The samples of a shard."""
        path, shape = self._path(first), (min(self.size, self.n - first), self.length)
        try:
            tokens = read_npz(path, ["tokens"], limit=4 * math.prod(shape) + 4096)["tokens"]
        except (ValueError, OSError) as error:
            raise CorruptShardError(f"{path} is damaged ({error}): delete it and run the same command again") from None
        if tokens.shape != shape or tokens.dtype != np.int32:
            raise CorruptShardError(
                f"{path} holds {tokens.dtype} {list(tokens.shape)}, expected int32 {list(shape)}: delete it"
            )
        if self.vocab is not None and (tokens.min() < 0 or tokens.max() >= self.vocab):
            raise CorruptShardError(f"{path} holds tokens outside 0..{self.vocab - 1}: delete it and run the command again")
        return torch.from_numpy(tokens).long()


def read_unfinished(out: Path) -> dict[str, Any] | None:
    """Return the settings of an unfinished run.

    Args:
        out: The output file of the run.

    Returns:
        The settings; None where there is no unfinished run, or its settings cannot be read.
    """
    try:
        return parse_json(read_regular(_folder(out) / "settings.json"))
    except (OSError, ValueError):
        return None


def remove_finished(out: Path, settings: Any) -> None:
    """Delete the folder of a run that was killed after it had written its result, and before it had deleted the folder.

    Args:
        out: The output file.
        settings: The settings that the result records. A folder with other settings belongs to another run, and stays.
    """
    folder = _folder(out)
    shutil.rmtree(_deleted(folder), ignore_errors=True)
    try:
        finished = json.loads(read_regular(folder / "settings.json")) == settings
    except (OSError, ValueError, RecursionError):
        return
    if finished:
        _delete(folder)


def _folder(out: Path) -> Path:
    """The folder of the shards of an output file."""
    return out.with_name(out.name + ".parts")


def _deleted(folder: Path) -> Path:
    """The name of a folder that is being deleted."""
    return folder.with_name(f".{folder.name}.deleted")


def _delete(folder: Path) -> None:
    """Rename a folder and delete it."""
    shutil.rmtree(_deleted(folder), ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        replace(folder, _deleted(folder))
    shutil.rmtree(_deleted(folder), ignore_errors=True)


def _change(name: str, there: Any, here: Any) -> str:
    """Describe a setting that differs, without the digits of a checksum."""
    if any(isinstance(value, str) and DIGEST.fullmatch(value) for value in (there, here)):
        return f"other {name:.60}"
    return f"{name:.60} {there!r:.300} there and {here!r:.300} here"
