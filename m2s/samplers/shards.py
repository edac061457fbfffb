"""Samples drawn in parts on disk, so that a run can be killed, resumed, or shared out among processes.

Beside the file to be written stands a folder `<name>.parts`: `settings.json`, and one .npz for each batch, which appears whole
or not at all. When the last part is there, whoever wrote it joins them and the folder goes.
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
    """A part that cannot be trusted, or parts of another run."""


class SampleShards:
    """`n` samples of `length` tokens in batches of `size`, under settings that every part shares."""

    def __init__(self, out: Path, n: int, length: int, size: int, settings: dict[str, Any]) -> None:
        self.out, self.n, self.length, self.size = out, n, length, size
        self.folder = out.with_name(out.name + ".parts")
        self.settings = {**settings, "n": n, "length": length, "part": size}

    def open(self) -> int:
        """Make the folder, or take up the one that is there; how many samples it holds already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "settings.json"
        if path.exists():
            self._same(path)
        else:
            write_json(path, self.settings)
        return sum(min(self.size, self.n - first) for first in self.firsts() if self._path(first).exists())

    def _same(self, path: Path) -> None:
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
        """The number of the first sample of each part."""
        return range(0, self.n, self.size)

    def missing(self, shard: int = 0, shards: int = 1) -> Iterator[tuple[int, int]]:
        """First number and count of each part that is yet to be drawn, of those that fall to this shard."""
        for index, first in enumerate(self.firsts()):
            if index % shards == shard and not self._path(first).exists():
                yield first, min(self.size, self.n - first)

    def put(self, first: int, tokens: Int[Tensor, "B L"]) -> None:
        with atomic_write(self._path(first)) as temporary:
            np.savez_compressed(temporary, tokens=tokens.cpu().numpy().astype(np.int32))

    def whole(self) -> bool:
        return all(self._path(first).exists() for first in self.firsts())

    def join(self) -> Int[Tensor, "n L"]:
        return torch.cat([self._read(first) for first in self.firsts()])

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, first: int) -> Path:
        return self.folder / f"{first:09d}.npz"

    def _read(self, first: int) -> Tensor:
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
    """What became of a setting, but no digits of a checksum, by which weights and files are known."""
    if any(isinstance(value, str) and DIGEST.fullmatch(value) for value in (there, here)):
        return f"other {name}"
    return f"{name} {there!r} there and {here!r} here"
