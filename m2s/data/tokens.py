"""Read a prepared text: windows of tokens from memory-mapped files."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor

from m2s import validation
from m2s.data.files import BadData, inside, root, sha256
from m2s.data.hub import HUB_TEXTS
from m2s.data.meta import check_meta, read_object
from m2s.data.shards import DTYPES
from m2s.data.tokenizer import Tokenizer, from_dict
from m2s.remote import folders_beside


class Tokens:
    """One split of a prepared text, as consecutive windows of `length` tokens without overlap.

    A window may span documents and files. The tokens after the last full window are not used. `tokens[i]` is window i, [length]
    int64; `tokens[indices]` are several windows, [n, length]. Opening checks meta.json and the sizes of the files.

    Args:
        folder: The folder that `m2s.data.prepare_text` made.
        split: train, validation or test.
        length: The number of tokens of a window.
        verify: Read every file and compare its SHA-256.

    Raises:
        ValueError: There is no such split.
        BadData: The folder is no prepared text, a file is damaged, or the split has less than one window.
    """

    def __init__(self, folder: Path | str, split: str, length: int, verify: bool = False) -> None:
        validation.positive_int("length", length)
        self.folder, self.split, self.length = Path(folder).expanduser(), split, length
        self.meta = read_meta(self.folder)
        if split not in self.meta["splits"]:
            raise ValueError(f"split is {split!r}, but it must be one of {', '.join(self.meta['splits'])}")
        entry = self.meta["splits"][split]
        if entry["tokens"] < length:
            raise BadData(
                f"{self.folder}: {split} holds {entry['tokens']} tokens, too few for one window of length = {length}: take a "
                f"smaller length (m2s train: --data.length), or {self._how_to_get_more_text()} and prepare it into a new folder"
            )
        check_shards(self.folder, split, self.meta, verify)
        dtype = DTYPES[self.meta["dtype"]]
        self._shards = [np.memmap(self.folder / shard["file"], dtype=dtype, mode="r") for shard in entry["shards"]]
        self._ends = np.cumsum([shard["tokens"] for shard in entry["shards"]])

    def _how_to_get_more_text(self) -> str:
        """Say how to prepare the text with more tokens in this split."""
        fraction = self.meta.get("validation_fraction")  # folders of m2s 0.1 do not say it
        if self.split == "validation" and fraction == 0:
            return "leave out --validation-fraction (it was 0)"
        if self.split == "validation":
            return f"take more text or a greater --validation-fraction{'' if fraction is None else f' than {fraction:g}'}"
        return "take more text" + (", in files whose names --test matches," if self.split == "test" else "")

    @property
    def vocab(self) -> int:
        """The number of tokens of the tokenizer."""
        return int(self.meta["vocab"])

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that encoded the text.

        Raises:
            BadData: meta.json does not describe a tokenizer.
        """
        try:
            return from_dict(self.meta["tokenizer"], self.folder)
        except (ValueError, TypeError, AttributeError) as error:
            raise BadData(f"{self.folder / 'meta.json'} is damaged ({error}): prepare the text again") from error

    @property
    def description(self) -> dict[str, Any]:
        """The entry "data" of a checkpoint's config.json."""
        return {"kind": "text", "length": self.length, "vocab": self.vocab, "tokenizer": self.meta["tokenizer"]}

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the training and validation tokens and of the tokenizer, from the checksums in meta.json."""
        splits = {name: [shard["sha256"] for shard in self.meta["splits"][name]["shards"]] for name in ("train", "validation")}
        described = [splits, self.vocab, self.meta["dtype"], self.meta.get("tokenizer_sha256")]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def verify(self) -> None:
        """Compare the SHA-256 of every file with meta.json, and the tokens with the vocabulary. Every token is read.

        Raises:
            BadData: A file was changed, or has a token outside the vocabulary.
        """
        check_shards(self.folder, self.split, self.meta, verify=True)
        for shard in self._shards:
            if (largest := int(shard.max())) >= self.vocab:
                raise BadData(f"{shard.filename} has the token {largest}, expected less than {self.vocab}: prepare it again")

    def __len__(self) -> int:
        return int(self._ends[-1]) // self.length

    def __getitem__(self, index: int | Int[Tensor, "n"]) -> Int[Tensor, "*n L"]:
        """Return one window, [length], or several, [n, length], int64."""
        if isinstance(index, Tensor):
            return torch.stack([self[int(i)] for i in index])
        if not 0 <= index < len(self):
            raise IndexError(f"index is {index}, but {self.split} of {self.folder} has windows 0..{len(self) - 1}")
        start, parts, missing = index * self.length, [], self.length
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while missing:
            within = start - int(self._ends[shard]) + len(self._shards[shard])
            parts.append(self._shards[shard][within : within + missing])
            start, missing, shard = start + len(parts[-1]), missing - len(parts[-1]), shard + 1
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    def stream(self, limit: int | None = None) -> Integer[np.ndarray, "N"]:
        """Return the tokens of the split as one array in memory, also those after the last full window.

        Args:
            limit: The greatest number of tokens, from the start; None: all.

        Returns:
            The tokens, [N], uint16 or uint32.
        """
        count = int(self._ends[-1]) if limit is None else min(limit, int(self._ends[-1]))
        parts = [shard[: max(0, count - int(end) + len(shard))] for shard, end in zip(self._shards, self._ends, strict=True)]
        return np.concatenate(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokens, (self.folder, self.split, self.length)  # another process maps the files itself


def read_meta(folder: Path) -> dict[str, Any]:
    """Read meta.json of a prepared text.

    Args:
        folder: The folder that `m2s.data.prepare_text` made.

    Returns:
        The contents. "dtype" is "uint16" where an older file does not name it.

    Raises:
        BadData: The preparation is unfinished, the file is damaged, or the folder is no prepared text.
    """
    path = folder / "meta.json"
    if not path.is_file():
        if (folder / "plan.json").is_file():
            raise BadData(
                f"{folder} is not finished: run the same `m2s data prepare` command again, which resumes or reports what "
                f"stopped it, or delete the folder"
            )
        if folder in (root() / "text8", root() / "openwebtext"):
            raise BadData(f"{folder} has no prepared text: run `m2s data download {folder.name}`, which says what is next")
        source = folder.name if folder.name in HUB_TEXTS else "SOURCE"
        tokenizer = " --tokenizer chars" if source == "text8" else ""
        missing, advice = f"{folder} has no meta.json, so it is no prepared text", "make one with"
        if not folder.exists():
            missing = f"there is no folder {folder}{folders_beside(folder)}, so no prepared text"
            advice = "check the path, or make one with"
        raise BadData(
            f"{missing}: {advice} `m2s data prepare {source} --out {folder}{tokenizer}` (see m2s data prepare --help)"
        )
    return check_meta(path, read_object(path, "prepare the text again"))


def check_shards(folder: Path, split: str, meta: dict[str, Any], verify: bool) -> None:
    """Check that every file of a split exists and has its size.

    Args:
        folder: The folder of the files.
        split: The split.
        meta: The contents of meta.json.
        verify: Also compare the SHA-256 of every file.

    Raises:
        BadData: A file is missing or has been changed.
    """
    entry, itemsize = meta["splits"][split], DTYPES[meta["dtype"]].itemsize
    if sum(shard["tokens"] for shard in entry["shards"]) != entry["tokens"]:
        raise BadData(
            f"{folder / 'meta.json'}: the shards of {split} do not add up to its {entry['tokens']} tokens: prepare again"
        )
    for shard in entry["shards"]:
        path, expected = inside(folder, shard["file"]), shard["tokens"] * itemsize
        if not path.is_file():
            raise BadData(f"{path} is missing: prepare the text again into a new folder")
        if path.stat().st_size != expected:
            raise BadData(f"{path} holds {path.stat().st_size:,} bytes, expected {expected:,}: prepare the text again")
        if verify:
            check_sha256(path, shard["sha256"])


def check_text(folder: Path | str) -> dict[str, Any]:
    """Verify the SHA-256 of every file of a prepared text.

    Args:
        folder: The folder that `m2s.data.prepare_text` made.

    Returns:
        The contents of meta.json.

    Raises:
        BadData: A file is missing or has been changed.
    """
    folder = Path(folder).expanduser()
    meta = read_meta(folder)
    for split in meta["splits"]:
        check_shards(folder, split, meta, verify=True)
    if file := meta.get("tokenizer_file"):
        check_sha256(inside(folder, file["file"]), file["sha256"])
    return meta


def check_sha256(path: Path, expected: str) -> None:
    """Compare the SHA-256 of a file.

    Args:
        path: The file.
        expected: Its SHA-256 in hexadecimal digits.

    Raises:
        BadData: It is another one.
    """
    if (found := sha256(path)) != expected:
        raise BadData(f"{path} has SHA-256 {found}, expected {expected}: it was changed; prepare the text again")
