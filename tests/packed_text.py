"""A text corpus with every kind of file, and helpers that pack it and read it back."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

import m2s.data
from m2s.data import Bytes, Tokenizer


def make_documents(count: int, seed: int = 0) -> list[str]:
    """Return random documents with characters of one to four bytes."""
    rng = random.Random(seed)
    return ["".join(rng.choices("ab c\néß€\U0001f600", k=rng.randint(1, 60))) + "x" for _ in range(count)]


def write_corpus(folder: Path) -> dict[str, list[str]]:
    """Write a folder of every kind of file; return the documents of each split when every 10th is for validation."""
    (folder / "sub").mkdir(parents=True)
    a, b, d = (make_documents(n, n) for n in (35, 21, 13))
    (folder / "a.txt").write_bytes("".join(f"{x}\n<|endoftext|>\n" for x in a).encode())
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"text": x}) for x in [*b, "", " "]) + "\n\n")
    (folder / "d-test.txt").write_bytes("\r\n<|endoftext|>\r\n".join(d).encode())  # no separator at the end
    alone = make_documents(12, 5)
    for i, x in enumerate(alone):
        (folder / "sub" / f"{i:02}.txt").write_bytes(x.encode() + b"\n")
    (folder / "readme.md").write_text("not text to train on")
    (folder / ".hidden.txt").write_text("nor this")
    expected: dict[str, list[str]] = {"train": [], "validation": [], "test": d}
    for documents in (a, b, alone):
        for i, x in enumerate(documents):
            expected["train" if i % 10 else "validation"].append(x)
    return expected


def prepare(source: Path | str, out: Path, tokenizer: Tokenizer | None = None, **options: Any) -> dict[str, Any]:
    """Pack a text with every 10th document for validation, into small files."""
    options = {"validation_every": 10, "shard_tokens": 500} | options
    return m2s.data.prepare_text(source, out, tokenizer or Bytes(), **options)


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def unpack(folder: Path, split: str, tokenizer: Tokenizer) -> list[str]:
    """Return all documents of a split: shards concatenated, cut at the end tokens, decoded."""
    meta = json.loads((folder / "meta.json").read_text())
    entry, dtype = meta["splits"][split], {"uint16": "<u2", "uint32": "<u4"}[meta["dtype"]]
    ids = np.concatenate([np.fromfile(folder / shard["file"], dtype) for shard in entry["shards"]])
    assert len(ids) == entry["tokens"] and ids[-1] == tokenizer.end
    documents = np.split(ids, np.flatnonzero(ids == tokenizer.end) + 1)[:-1]
    assert len(documents) == entry["documents"]
    return [tokenizer.decode(document[:-1].tolist()) for document in documents]


def stream(folder: Path, split: str) -> list[int]:
    """Return all tokens of a split, in the order of its files."""
    return [i for path in sorted(folder.glob(f"{split}-*.bin")) for i in np.fromfile(path, "<u2").tolist()]
