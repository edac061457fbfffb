"""Encode documents and append them to the shards of their split."""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from m2s.data.documents import Document, DocumentSource, is_filled
from m2s.data.encode import encode_document
from m2s.data.files import BadData
from m2s.data.hold_out import held_out, move_tokens, spacing
from m2s.data.shards import DTYPES, Shards
from m2s.data.tokenizer import Characters, Tokenizer
from m2s.io import write_json
from m2s.progress import bar_class

SPLITS = ("train", "validation", "test")
COMMIT_SECONDS = 5.0  # how often the progress is written to the disk


@dataclass
class Progress:
    """How many documents are packed. It is stored in progress.json.

    Args:
        source: The index of the current source. All sources before it are done.
        document: The number of documents of the current source that are done.
        divided: The number of documents so far that the index divides between train and validation.
        divided_tokens: Their tokens.
        tokens: Tokens written, by split.
        documents: Documents written, by split.
        counts: For each source: documents, blank documents and tokens.
    """

    source: int = 0
    document: int = 0
    divided: int = 0
    divided_tokens: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    counts: list[dict[str, int]] = field(default_factory=list)


def checksum(counts: dict[str, Any]) -> str:
    """Return the SHA-256 of the contents of progress.json. One wrong count would repeat or skip documents without an error.

    Args:
        counts: The fields of `Progress`.
    """
    return hashlib.sha256(json.dumps(counts, sort_keys=True).encode()).hexdigest()


def pack(out: Path, sources: list[DocumentSource], tokenizer: Tokenizer, plan: dict[str, Any], progress: Progress) -> None:
    """Append every document that `progress` does not count yet. `progress` and progress.json are updated on the way.

    Args:
        out: The folder of the shards.
        sources: All sources, in order.
        tokenizer: The tokenizer.
        plan: The contents of plan.json.
        progress: Where to start. It is changed in place.

    Raises:
        BadData: A document cannot be read or encoded.
    """
    every = spacing(plan["validation_fraction"])
    dtype = DTYPES[plan["dtype"]]
    shards = {split: Shards(out, split, plan["shard_tokens"], progress.tokens[split], dtype) for split in SPLITS}

    def commit() -> None:
        for shard in shards.values():
            shard.flush()
        counts = asdict(progress)
        write_json(out / "progress.json", {**counts, "sha256": checksum(counts)})

    committed = time.monotonic()
    bar = bar_class()(unit=" tokens", unit_scale=True, initial=sum(progress.tokens.values()), disable=None, leave=False)
    with bar, contextlib.ExitStack() as stack:
        for shard in shards.values():
            stack.callback(shard.close)
        for index, document in _documents(sources, progress.source, progress.document):
            count = _advance(progress, index)
            bar.set_description(f"{index + 1}/{len(sources)} {sources[index].name}", refresh=False)
            if not is_filled(document):
                count["blank"] += 1
                continue
            ids = _encode(tokenizer, sources[index], document)
            split = sources[index].split
            if split is None:
                progress.divided += 1
                progress.divided_tokens += len(ids)
                split = "validation" if every and progress.divided % every == 0 else "train"
            shards[split].append(ids)
            progress.tokens[split] = shards[split].tokens
            progress.documents[split] += 1
            count["documents"] += 1
            count["tokens"] += len(ids)
            bar.update(len(ids))
            if time.monotonic() - committed >= COMMIT_SECONDS:
                commit()
                committed = time.monotonic()
        commit()
        if every and progress.divided:
            target = held_out(progress.divided_tokens, plan["validation_fraction"])
            move_tokens(shards, target, plan["end"], progress.tokens, progress.documents)
            commit()


def _advance(progress: Progress, index: int) -> dict[str, int]:
    """Count one more document of source `index`, and return the counts of that source."""
    if index != progress.source:
        progress.source, progress.document = index, 0
    while len(progress.counts) <= index:
        progress.counts.append({"documents": 0, "blank": 0, "tokens": 0})
    progress.document += 1
    return progress.counts[index]


def _encode(tokenizer: Tokenizer, source: DocumentSource, document: Document) -> np.ndarray:
    """Encode a document, or raise BadData with its place."""
    ids = encode_document(tokenizer, document.text)
    if isinstance(ids, str):
        hint = ", give every character of it by --alphabet, or take --tokenizer bytes"
        remedy = hint if isinstance(tokenizer, Characters) else ""
        raise BadData(f"{source.name}, document at {document.where} {ids}{remedy}")
    return ids


def _documents(sources: list[DocumentSource], start: int, skip: int) -> Iterator[tuple[int, Document]]:
    """Yield every document from document `skip` of source `start` on, with the index of its source."""
    for index in range(start, len(sources)):
        for document in sources[index].read(skip):
            yield index, document
        skip = 0
