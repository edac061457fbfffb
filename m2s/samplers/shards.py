"""Samples on disk in shards, so that a run can be interrupted, resumed, or divided among processes.

Beside the output file there is a folder `<name>.parts` with `settings.json` and one .npz file for each batch. Each file is
written atomically. Whoever writes the last shard joins them and deletes the folder.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from m2s.io import atomic_write, write_json

DIGEST = re.compile("[0-9a-f]{64}")


class CorruptShardError(ValueError):
    """A shard is damaged, or the shards belong to a run with other settings."""


class SampleShards:
    """The samples of one run, on disk in shards of `size` samples.

    Args:
        out: The output file. The folder of the shards is beside it.
        n: The number of samples.
        length: The length of a sample.
        size: Samples of one shard.
        settings: Everything that the samples depend on. A folder with other settings is an error.

    Attributes:
        folder: The folder of the shards.
        settings: The settings, with n, length and size added.
    """

    def __init__(self, out: Path, n: int, length: int, size: int, settings: dict[str, Any]) -> None:
        self.out, self.n, self.length, self.size = out, n, length, size
        self.folder = out.with_name(out.name + ".parts")
        self.settings = {**settings, "n": n, "length": length, "part": size}

    def open(self) -> int:
        """Create the folder, or resume with the one that exists.

        Returns:
            The number of samples that are on disk already.

        Raises:
            CorruptShardError: The folder belongs to a run with other settings, or its settings cannot be read.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "settings.json"
        if path.exists():
            self._check_settings(path)
        else:
            write_json(path, self.settings)
        return sum(min(self.size, self.n - first) for first in self.firsts() if self._path(first).exists())

    def _check_settings(self, path: Path) -> None:
        """The settings on disk are those of this run."""
        try:
            there = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CorruptShardError(f"{path} is damaged ({error}): delete {self.folder} to start again") from None
        here = json.loads(json.dumps(self.settings))
        other = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        if other:
            changes = ", ".join(_change(name, there.get(name), here.get(name)) for name in other)
            raise CorruptShardError(
                f"{self.folder} holds an unfinished run with other settings ({changes}): "
                "give another --out, or delete the folder"
            )

    def firsts(self) -> range:
        """Return the number of the first sample of each shard."""
        return range(0, self.n, self.size)

    def missing(self, shard: int = 0, shards: int = 1) -> Iterator[tuple[int, int]]:
        """Yield the shards that are not on disk yet.

        Args:
            shard: The index of this process, from 0.
            shards: The number of processes. Each draws every `shards`-th shard.

        Yields:
            The number of the first sample, and the number of samples.
        """
        for index, first in enumerate(self.firsts()):
            if index % shards == shard and not self._path(first).exists():
                yield first, min(self.size, self.n - first)

    def put(self, first: int, tokens: Int[Tensor, "B L"]) -> None:
        """Write one shard atomically.

        Args:
            first: The number of its first sample.
            tokens: The samples, [B, L].
        """
        with atomic_write(self._path(first)) as temporary:
            np.savez_compressed(temporary, tokens=tokens.cpu().numpy().astype(np.int32))

    def whole(self) -> bool:
        """Return whether all shards are on disk."""
        return all(self._path(first).exists() for first in self.firsts())

    def join(self) -> Int[Tensor, "n L"]:
        """Return all samples, [n, L].

        Raises:
            CorruptShardError: A shard is damaged.
        """
        return torch.cat([self._read(first) for first in self.firsts()])

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, first: int) -> Path:
        """The file of a shard."""
        return self.folder / f"{first:09d}.npz"

    def _read(self, first: int) -> Tensor:
        """The samples of a shard."""
        path, shape = self._path(first), (min(self.size, self.n - first), self.length)
        try:
            with np.load(path, allow_pickle=False) as file:
                tokens = file["tokens"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zipfile.zlib.error) as error:  # type: ignore[attr-defined]
            raise CorruptShardError(f"{path} is damaged ({error}): delete it and run the same command again") from None
        if tokens.shape != shape or tokens.dtype != np.int32:
            raise CorruptShardError(
                f"{path} holds {tokens.dtype} {list(tokens.shape)}, expected int32 {list(shape)}: delete it"
            )
        return torch.from_numpy(tokens).long()


def _change(name: str, there: Any, here: Any) -> str:
    """Describe a setting that differs, without the digits of a checksum."""
    if any(isinstance(value, str) and DIGEST.fullmatch(value) for value in (there, here)):
        return f"other {name}"
    return f"{name} {there!r} there and {here!r} here"
