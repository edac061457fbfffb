"""One split of a prepared text on disk: a stream of little-endian uint16 tokens cut into files of equal length."""

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from m2s.data.files import BadData

TOKEN = np.dtype("<u2")


class Shards:
    """The files of one split, `train-00000.bin` and so on, appended to in order.

    They are opened with the number of tokens that are known to be good: what lies beyond is cut off.
    """

    def __init__(self, folder: Path, split: str, shard_tokens: int, tokens: int) -> None:
        self.folder, self.split, self.shard_tokens, self.tokens = folder, split, shard_tokens, tokens
        self._file: BinaryIO | None = None
        current, within = divmod(tokens, shard_tokens)
        for index in range(current + (within > 0)):
            path, wanted = self.path(index), TOKEN.itemsize * (shard_tokens if index < current else within)
            size = path.stat().st_size if path.is_file() else 0
            if size < wanted:
                raise BadData(f"{path} holds {size:,} bytes, expected at least {wanted:,}: delete {folder} and start again")
            if size > wanted:
                os.truncate(path, wanted)
        for path in folder.glob(f"{split}-*.bin"):
            if path not in self.paths():
                path.unlink()

    def path(self, index: int) -> Path:
        return self.folder / f"{self.split}-{index:05d}.bin"

    def paths(self) -> list[Path]:
        return [self.path(index) for index in range(-(-self.tokens // self.shard_tokens))]

    def append(self, ids: np.ndarray) -> None:
        while len(ids):
            index, within = divmod(self.tokens, self.shard_tokens)
            if self._file is None:
                self._file = self.path(index).open("ab")
            part, ids = ids[: self.shard_tokens - within], ids[self.shard_tokens - within :]
            self._file.write(part.astype(TOKEN).tobytes())
            self.tokens += len(part)
            if self.tokens % self.shard_tokens == 0:
                self.close()

    def flush(self) -> None:
        """Everything appended so far is on the disk when this returns."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with file:
                file.flush()
                os.fsync(file.fileno())
