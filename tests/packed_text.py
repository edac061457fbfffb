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
    """Write a folder of every kind of file; return the documents to divide, in order, and those of the test split."""
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
    return {"divided": [*a, *b, *alone], "test": d}


def encoded(document: str) -> list[int]:
    """Return the tokens of a document for `Bytes`, with the end token."""
    return [*document.encode(), 256]


def divide(documents: list[list[Any]], every: int, held_out: int) -> dict[str, list[Any]]:
    """Return the tokens of each split: every so many documents are validation, and the count is corrected at the end."""
    streams: dict[str, list[Any]] = {"train": [], "validation": []}
    for i, document in enumerate(documents, 1):
        streams["train" if i % every else "validation"] += document
    train, validation = streams["train"], streams["validation"]
    if len(validation) > held_out:
        train, validation = train + validation[held_out:], validation[:held_out]
    elif missing := held_out - len(validation):
        train, validation = train[:-missing], validation + train[-missing:]
    return {"train": train, "validation": validation}


def prepare(source: Path | str, out: Path, tokenizer: Tokenizer | None = None, **options: Any) -> dict[str, Any]:
    """Pack a text with a tenth of its tokens for validation, into small files."""
    options = {"validation_fraction": 0.1, "shard_tokens": 500} | options
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
