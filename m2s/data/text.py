"""Prepare text: pack it into token files once, so that training only reads memory-mapped numbers.

A prepared folder holds, for each split, a stream of tokens (every document, then the tokenizer's end token) cut into
`train-00000.bin`, ...; a copy of the tokenizer's file, where there is one; and `meta.json`, which is written last. While
meta.json is missing, the preparation is unfinished: plan.json says what is being prepared, progress.json how much is done.
progress.json is replaced atomically every few seconds. After an interruption everything after it is cut off and done again.
So the same call gives the same bytes, interrupted or not.
"""

import contextlib
import errno
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from m2s import validation
from m2s.data.documents import TEXT, DocumentSource, find_sources, is_filled, require_source
from m2s.data.encode import describe, encode_document
from m2s.data.files import BadData, sha256
from m2s.data.hold_out import default_fraction
from m2s.data.meta import FORMAT, check_meta, is_count, read_object
from m2s.data.pack import SPLITS, Progress, checksum, pack
from m2s.data.shards import DTYPES, Shards, dtype_name
from m2s.data.tokenizer import KEPT, Tokenizer, save_tokenizer_files
from m2s.errors import UserError
from m2s.io import output_folder, write_json

PLAN, PROGRESS, META = "plan.json", "progress.json", "meta.json"


def prepare_text(
    source: Path | str,
    out: Path | str,
    tokenizer: Tokenizer,
    validation_fraction: float | None = None,
    test: str = "*-test.*",
    shard_tokens: int = 2**27,
    text_field: str = TEXT,
) -> dict[str, Any]:
    """Encode every document of a text and pack the tokens into files.

    Some tokens are held out for validation: 1 %, or 10 % of fewer than 100,000 tokens. Every 100th or 10th document goes
    to validation. At the end some tokens are moved between validation and the end of train, so that the number is exact. One
    document may be cut there (`m2s.data.hold_out`). Blank documents are left out.

    If the call is interrupted at any time, the same call resumes it.

    Args:
        source: A folder, a file, or the name of a data set on the hub (`m2s.data.documents`).
        out: The folder to write: a new or empty one, or that of the same call.
        tokenizer: The tokenizer.
        validation_fraction: The fraction of the tokens that is held out, in [0, 1); None: 0.01, or 0.1 below 100,000 tokens.
        test: A pattern: files with a matching name are the test split.
        shard_tokens: The number of tokens of a file. A token takes 2 bytes, or 4 where the vocabulary exceeds 65,536.
        text_field: The field of the document in .jsonl, .parquet and on the hub.

    Returns:
        The contents of meta.json: the plan, counts, and the SHA-256 of every file.

    Raises:
        UserError: The source, the tokenizer or the folder cannot be used.
        BadData: A file of the source is damaged, or a document cannot be encoded.
    """
    if validation_fraction is not None:
        validation.in_interval("validation_fraction", validation_fraction, "[0, 1)")
    validation.positive_int("shard_tokens", shard_tokens)
    require_source(source)  # before the tokenizer reads its files: a mistyped path is the more likely error
    described = describe(tokenizer)
    out = Path(out).expanduser()
    sources = find_sources(source, test, text_field)
    if not any(is_filled(document) for found in sources for document in found.read(0)):
        raise BadData(f"{source} holds no text: it is empty, or white space alone")
    if validation_fraction is None:
        validation_fraction = default_fraction(sources, tokenizer)
    plan = {
        "format": FORMAT,
        **described,
        "dtype": dtype_name(tokenizer.vocab),
        "validation_fraction": float(validation_fraction),
        "shard_tokens": shard_tokens,
        "sources": [{**found.identity, "split": found.split or "by index"} for found in sources],
    }
    plan = json.loads(json.dumps(plan))  # as it reads from a file, to be compared with one
    with _exclusive(output_folder(out)):
        try:
            progress = _resume(out, plan)
            if progress is not None:
                with _clean_on_error(out):
                    _check_disk_space(out, sources, tokenizer, plan, progress)
                    tokenizer_file = save_tokenizer_files(tokenizer, out)
                    pack(out, sources, tokenizer, plan, progress)
                _finish(out, plan, progress, tokenizer_file)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"{out}: the disk is full. Free some space and run the same command: it resumes") from error
        for name in (PROGRESS, PLAN):
            (out / name).unlink(missing_ok=True)
        return _read_json(out / META)


@contextlib.contextmanager
def _exclusive(out: Path) -> Iterator[None]:
    """Lock the folder against other processes. The operating system releases the lock when the process ends."""
    import fcntl  # imported late: Windows does not have it

    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(f"{out} is being prepared by another process: wait for it, or give another folder") from None
    finally:
        os.close(handle)


@contextlib.contextmanager
def _clean_on_error(out: Path) -> Iterator[None]:
    """Empty the folder if the text cannot be prepared, unless part of it is already packed."""
    try:
        yield
    except UserError as error:
        if not (out / PROGRESS).exists():
            _clear(out)
            raise
        raise type(error)(
            f"{error}. {out} keeps what was packed before that, for the same command alone: to change the text or the "
            f"tokenizer, delete it or give another folder"
        ) from error


def _resume(out: Path, plan: dict[str, Any]) -> Progress | None:
    """Return where to start: at 0, or where an earlier call with the same plan stopped; None if everything is done."""
    for name in (PLAN, PROGRESS, META, *KEPT):  # temporary files of a killed process (m2s.io.atomic_write)
        for leftover in out.glob(f".{Path(name).stem}-*[0-9]{Path(name).suffix}"):
            leftover.unlink(missing_ok=True)
    for leftover in out.glob(".m2s-*.tmp"):
        leftover.unlink(missing_ok=True)
    if (out / META).exists():
        _check_same_plan(out, check_meta(out / META, _read_json(out / META)), plan)
        return None
    if (out / PLAN).exists():
        _check_same_plan(out, _read_json(out / PLAN), plan)
        return _read_progress(out / PROGRESS) if (out / PROGRESS).exists() else Progress()
    found = next(out.iterdir(), None)
    if found is not None:
        raise UserError(f"{out} already holds {found.name}, which no preparation wrote: give an empty or a new folder")
    write_json(out / PLAN, plan)
    return Progress()


def _check_same_plan(out: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise UserError if the folder holds a preparation with another plan."""
    old = {"dtype": "uint16", **old}  # folders of m2s 0.1 have no such field
    for key, value in new.items():
        there = old.get(key)
        if there != value:
            if key == "sources" and isinstance(there, list):
                pairs = itertools.zip_longest(there, value)
                there, value = next(((a, b) for a, b in pairs if a != b), (there, value))
            raise UserError(
                f"{out} holds a different preparation ({key}: {json.dumps(there):.300} there, {json.dumps(value):.300} now): "
                f"give another folder, or delete it"
            )


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    return read_object(path, f"delete {path.parent} and prepare it again")


def _read_progress(path: Path) -> Progress:
    """Read progress.json."""
    value = _read_json(path)
    hint = f"delete {path.parent} and prepare it again"
    stored = value.pop("sha256", None)  # version 0.1 did not write it
    if set(value) != {part.name for part in fields(Progress)}:
        raise BadData(f"{path} is damaged (it has other names than expected): {hint}")
    numbers = [value[name] for name in ("source", "document", "divided", "divided_tokens")]
    for name in ("tokens", "documents"):
        splits = value[name]
        numbers += (
            [splits.get(split) for split in SPLITS] if isinstance(splits, dict) and set(splits) == set(SPLITS) else [None]
        )
    rows = value["counts"] if isinstance(value["counts"], list) else [None]
    for row in rows:
        numbers += [row.get(name) for name in ("documents", "blank", "tokens")] if isinstance(row, dict) else [None]
    if not all(is_count(number) for number in numbers):
        raise BadData(f"{path} is damaged (a count is missing or impossible): {hint}")
    if stored not in (None, checksum(value)):
        raise BadData(f"{path} is damaged (its SHA-256 differs): {hint}")
    return Progress(**value)


def _check_disk_space(
    out: Path, sources: list[DocumentSource], tokenizer: Tokenizer, plan: dict[str, Any], progress: Progress
) -> None:
    """Raise UserError if the result, estimated from the first document, does not fit on the disk."""
    sample = next((document.text[:20_000] for document in sources[0].read(0) if document.text.strip()), "")
    ids = encode_document(tokenizer, sample)
    if isinstance(ids, str) or not sample:
        return  # `pack` reports the document that cannot be encoded, with its place
    size = sum(int(source.identity.get("bytes", 0)) for source in sources)
    itemsize = DTYPES[plan["dtype"]].itemsize
    need = int(itemsize * (size * len(ids) / len(sample.encode()) - sum(progress.tokens.values())))
    free = shutil.disk_usage(out).free
    if need > free:
        raise UserError(
            f"{out} would take about {need / 1e9:.2f} GB, but its disk has {free / 1e9:.2f} GB left: free some space first"
        )


def _finish(out: Path, plan: dict[str, Any], progress: Progress, tokenizer_file: Path | None) -> None:
    """Write meta.json: the plan, the counts, and the SHA-256 of every shard and of the tokenizer's file."""
    splits: dict[str, Any] = {}
    dtype = DTYPES[plan["dtype"]]
    for split in SPLITS:
        paths = Shards(out, split, plan["shard_tokens"], progress.tokens[split], dtype).paths()
        files = [{"file": p.name, "tokens": p.stat().st_size // dtype.itemsize, "sha256": sha256(p)} for p in paths]
        splits[split] = {"documents": progress.documents[split], "tokens": progress.tokens[split], "shards": files}
    empty = {"documents": 0, "blank": 0, "tokens": 0}
    counts = progress.counts + [empty] * (len(plan["sources"]) - len(progress.counts))
    names = [entry["name"] for entry in plan["sources"]]
    file = {} if tokenizer_file is None else {"tokenizer_file": {"file": tokenizer_file.name, "sha256": sha256(tokenizer_file)}}
    write_json(out / META, {**plan, **file, "counts": dict(zip(names, counts, strict=True)), "splits": splits})


def _clear(out: Path) -> None:
    """Delete everything that a preparation wrote."""
    for path in (out / PROGRESS, *out.glob("*-*.bin"), *(out / name for name in KEPT), out / PLAN):
        path.unlink(missing_ok=True)
