"""Files of packed tokens: little-endian uint16 or uint32, cut into files of equal length."""

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from m2s.data.files import BadData
from m2s.io import open_file

DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
"""The types of a packed token, by their names in meta.json."""


def dtype_name(vocab: int) -> str:
    """Return the name of the smallest type that can store every id of a vocabulary.

    Args:
        vocab: The number of tokens.

    Returns:
        "uint16" or "uint32", a key of `DTYPES`.
    """
    return "uint16" if vocab <= 2**16 else "uint32"


class Shards:
    """The files of one split, `train-00000.bin` and so on. Tokens are appended in order.

    Opening cuts off everything after the first `tokens` tokens, which an interrupted run may have written.

    Args:
        folder: The folder of the files.
        split: train, validation or test.
        shard_tokens: The number of tokens of every file but the last.
        tokens: The number of tokens that are already on the disk.
        dtype: The type of a token.

    Raises:
        BadData: The files have fewer than `tokens` tokens.
    """

    def __init__(self, folder: Path, split: str, shard_tokens: int, tokens: int, dtype: np.dtype) -> None:
        self.folder, self.split, self.shard_tokens, self.tokens, self.dtype = folder, split, shard_tokens, tokens, dtype
        self._file: BinaryIO | None = None
        current, within = divmod(tokens, shard_tokens)
        for index in range(current + (within > 0)):
            path, wanted = self._path(index), dtype.itemsize * (shard_tokens if index < current else within)
            if path.is_symlink():
                raise BadData(f"{path} is a link, and nothing is written through links: delete {folder} and start again")
            size = path.stat().st_size if path.is_file() else 0
            if size < wanted:
                raise BadData(f"{path} holds {size:,} bytes, expected at least {wanted:,}: delete {folder} and start again")
            if size > wanted:
                os.truncate(path, wanted)
        for path in folder.glob(f"{split}-*.bin"):
            if path not in self.paths():
                path.unlink()

    def _path(self, index: int) -> Path:
        """Return the path of file `index`."""
        return self.folder / f"{self.split}-{index:05d}.bin"

    def paths(self) -> list[Path]:
        """Return the paths of all files."""
        return [self._path(index) for index in range(-(-self.tokens // self.shard_tokens))]

    def append(self, ids: np.ndarray) -> None:
        """Append tokens, and start a new file whenever one is full.

        Args:
            ids: Tokens, [n], of any integer dtype. They are stored as `dtype`.
        """
        while len(ids):
            index, within = divmod(self.tokens, self.shard_tokens)
            if self._file is None:
                self._file = os.fdopen(open_file(self._path(index), os.O_WRONLY | os.O_APPEND), "ab")
            part, ids = ids[: self.shard_tokens - within], ids[self.shard_tokens - within :]
            self._file.write(part.astype(self.dtype).tobytes())
            self.tokens += len(part)
            if self.tokens % self.shard_tokens == 0:
                self.close()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens that are on the disk. Call `flush` first.

        Args:
            start: The index of the first token.
            stop: The index after the last token, at most `tokens`.

        Returns:
            The tokens, [stop - start].
        """
        parts = [np.zeros(0, self.dtype)]
        while start < stop:
            index, within = divmod(start, self.shard_tokens)
            count = min(stop - start, self.shard_tokens - within)
            parts.append(np.fromfile(self._path(index), self.dtype, count, offset=within * self.dtype.itemsize))
            start += count
        return np.concatenate(parts)

    def flush(self) -> None:
        """Write everything appended so far to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write everything to the disk and close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            with file:
                file.flush()
                os.fsync(file.fileno())
