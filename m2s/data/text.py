"""Text packed into token files, once, so that training reads nothing but memory-mapped numbers.

A prepared folder holds, for each split, a stream of tokens (every document, then the tokenizer's end token) cut into
`train-00000.bin`, ..., a copy of the file that the tokenizer is read from where there is one, and a `meta.json` that is written
last: while it is missing the folder is unfinished. Until then plan.json says what is being prepared and progress.json how far
it is; the latter is replaced, whole, every few seconds, and after an interruption everything beyond it is cut off and done
again. The same call gives the same bytes, interrupted or not.
"""

import contextlib
import errno
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from m2s import validation
from m2s.data.encode import describe, encode_document
from m2s.data.files import BadData, sha256
from m2s.data.shards import TOKEN, Shards
from m2s.data.sources import TEXT, Document, Source, find_sources
from m2s.data.tokenizer import KEPT, Characters, Tokenizer, save_tokenizer_files
from m2s.errors import UserError
from m2s.io import output_folder

FORMAT = "m2s tokens 1"
SPLITS = ("train", "validation", "test")
COMMIT_SECONDS = 5.0


@dataclass
class Progress:
    """How far a preparation is: `document` documents of source `source` are done, and all sources before it."""

    source: int = 0
    document: int = 0
    alone: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    counts: list[dict[str, int]] = field(default_factory=list)


def prepare_text(
    source: Path | str,
    out: Path | str,
    tokenizer: Tokenizer,
    validation_every: int = 100,
    test: str = "*-test.*",
    shard_tokens: int = 2**27,
    text_field: str = TEXT,
) -> dict[str, Any]:
    """Encode every document of `source` and pack them into `out`; returns what is then in its meta.json.

    Documents 0, `validation_every`, 2 `validation_every`, ... of each source go to validation (0: none do) and the others to
    train; a file whose name matches `test` goes to test as a whole. A source is a file, or a split of a hub data set; sources
    of one document are counted together. Where one document is all there is to divide, it is counted in train and its last
    tokens, one in `validation_every` rounded up, are validation. Blank documents are left out and not counted. Killed at any
    time, the same call goes on where it was. A folder that holds anything else is refused. `text_field` is what holds the
    document in a line of .jsonl, a row of .parquet or of the hub.
    """
    validation.positive_int("validation_every", validation_every, 0)
    validation.positive_int("shard_tokens", shard_tokens)
    described = describe(tokenizer)
    out = Path(out).expanduser()
    sources = find_sources(source, test, text_field)
    if not any(_filled(document) for found in sources for document in found.read(0)):
        raise BadData(f"{source} holds no text: it is empty, or white space alone")
    plan = {
        "format": FORMAT,
        **described,
        "validation_every": validation_every,
        "shard_tokens": shard_tokens,
        "sources": [{**found.identity, "split": found.split or "by index"} for found in sources],
    }
    plan = json.loads(json.dumps(plan))
    with _alone(output_folder(out)):
        try:
            progress = _resume(out, plan)
            if progress is not None:
                with _tidy(out):
                    _check_room(out, sources, tokenizer, progress)
                    kept = save_tokenizer_files(tokenizer, out)
                    _pack(out, sources, tokenizer, plan, progress)
                _finish(out, plan, progress, kept)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"{out}: the disk is full. Make room and run the same command: it goes on where it was") from error
        for name in ("progress.json", "plan.json"):
            (out / name).unlink(missing_ok=True)
        return _read_json(out / "meta.json")


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """No other process prepares into the same folder; the lock goes when the process does, however it ends."""
    import fcntl

    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(f"{out} is being prepared by another process: wait for it, or give another folder") from None
    finally:
        os.close(handle)


@contextlib.contextmanager
def _tidy(out: Path) -> Iterator[None]:
    """What cannot be prepared leaves nothing in the folder, unless a part of it was packed for good."""
    try:
        yield
    except UserError as error:
        if not (out / "progress.json").exists():
            _clear(out)
            raise
        raise type(error)(
            f"{error}. {out} keeps what was packed before that, for the same command alone: to change the text or the "
            f"tokenizer, delete it or give another folder"
        ) from error


def _resume(out: Path, plan: dict[str, Any]) -> Progress | None:
    """Where to start: from nothing, where an earlier call with the same plan stopped, or None where all is done."""
    names = ("progress.json", "plan.json", "meta.json", *KEPT)
    for leftover in (*out.glob(".m2s-*.tmp"), *(out / f"{name}.tmp" for name in names)):
        leftover.unlink(missing_ok=True)
    if (out / "meta.json").exists():
        _same(out, _read_json(out / "meta.json"), plan)
        return None
    if (out / "plan.json").exists():
        _same(out, _read_json(out / "plan.json"), plan)
        return Progress(**_read_json(out / "progress.json")) if (out / "progress.json").exists() else Progress()
    found = next(out.iterdir(), None)
    if found is not None:
        raise UserError(f"{out} already holds {found.name}, which no preparation wrote: give an empty or a new folder")
    _replace(out / "plan.json", plan)
    return Progress()


def _same(out: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        there = old.get(key)
        if there != value:
            if key == "sources" and isinstance(there, list):
                pairs = itertools.zip_longest(there, value)
                there, value = next((a, b) for a, b in pairs if a != b)
            raise UserError(
                f"{out} holds a different preparation ({key}: {json.dumps(there)} there, {json.dumps(value)} now): "
                f"give another folder, or delete it"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadData(f"{path} cannot be read ({error}): delete {path.parent} and prepare it again") from error
    if not isinstance(value, dict):
        raise BadData(f"{path} is not a JSON object: delete {path.parent} and prepare it again")
    return value


def _replace(path: Path, value: dict[str, Any]) -> None:
    """`path` holds either what it held or all of `value`, whenever the process or the machine stops."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _check_room(out: Path, sources: list[Source], tokenizer: Tokenizer, progress: Progress) -> None:
    """An estimate of the size of the result, from the first document, must fit on the disk."""
    sample = next((document.text[:20_000] for document in sources[0].read(0) if document.text.strip()), "")
    ids = encode_document(tokenizer, sample)
    if isinstance(ids, str) or not sample:
        return  # said, with its place, when its turn comes
    size = sum(int(source.identity.get("bytes", 0)) for source in sources)
    need = int(TOKEN.itemsize * (size * len(ids) / len(sample.encode()) - sum(progress.tokens.values())))
    free = shutil.disk_usage(out).free
    if need > free:
        raise UserError(
            f"{out} would take about {need / 1e9:.2f} GB, but its disk has {free / 1e9:.2f} GB left: make room first"
        )


def _documents(sources: list[Source], start: int, skip: int) -> Iterator[tuple[int, Document, bool]]:
    """Every document from document `skip` of source `start` on: the index of its source, and whether all others there are
    blank. A source is never taken up again before its first document that is not."""
    for index in range(start, len(sources)):
        documents = sources[index].read(skip)
        seen: list[Document] = []
        filled = 0
        while filled < 2 and (document := next(documents, None)) is not None:
            seen.append(document)
            filled += _filled(document)
        alone = skip == 0 and filled < 2
        for document in itertools.chain(seen, documents):
            yield index, document, alone
        skip = 0


def _filled(document: Document) -> bool:
    return bool(document.text.strip())


def _single(sources: list[Source]) -> bool:
    """Whether there is no more than one document to divide between train and validation."""
    documents = (document for source in sources if source.split is None for document in source.read(0))
    return len(list(itertools.islice(filter(_filled, documents), 2))) < 2


def _pack(out: Path, sources: list[Source], tokenizer: Tokenizer, plan: dict[str, Any], progress: Progress) -> None:
    """Append every document that `progress` does not yet count, keeping `progress` and its file up to date."""
    from tqdm import tqdm

    every, length = plan["validation_every"], plan["shard_tokens"]
    single = every > 0 and _single(sources)
    shards = {split: Shards(out, split, length, progress.tokens[split]) for split in SPLITS}

    def commit() -> None:
        for stream in shards.values():
            stream.flush()
        _replace(out / "progress.json", asdict(progress))

    committed = time.monotonic()
    bar = tqdm(unit=" tokens", unit_scale=True, initial=sum(progress.tokens.values()), disable=None, leave=False)
    with bar, contextlib.ExitStack() as stack:
        for stream in shards.values():
            stack.callback(stream.close)
        for index, document, alone in _documents(sources, progress.source, progress.document):
            if index != progress.source:
                progress.source, progress.document = index, 0
            while len(progress.counts) <= index:
                progress.counts.append({"documents": 0, "blank": 0, "tokens": 0})
            bar.set_description(f"{index + 1}/{len(sources)} {sources[index].name}", refresh=False)
            progress.document += 1
            count = progress.counts[index]
            if not _filled(document):
                count["blank"] += 1
                continue
            ids = encode_document(tokenizer, document.text)
            if isinstance(ids, str):
                raise BadData(f"{sources[index].name}, document at {document.where} {ids}{_way_out(tokenizer)}")
            position = progress.alone if alone else count["documents"]
            progress.alone += alone
            if sources[index].split is None and single:
                split, cut = "train", len(ids) - -(-len(ids) // every)
                parts = {"train": ids[:cut], "validation": ids[cut:]}
            else:
                split = sources[index].split or ("validation" if every and position % every == 0 else "train")
                parts = {split: ids}
            for name, part in parts.items():
                shards[name].append(part)
                progress.tokens[name] = shards[name].tokens
            progress.documents[split] += 1
            count["documents"] += 1
            count["tokens"] += len(ids)
            bar.update(len(ids))
            if time.monotonic() - committed >= COMMIT_SECONDS:
                commit()
                committed = time.monotonic()
        commit()


def _way_out(tokenizer: Tokenizer) -> str:
    """What to do about a text that cannot be encoded."""
    return ", give every character of it by --alphabet, or take --tokenizer bytes" if isinstance(tokenizer, Characters) else ""


def _finish(out: Path, plan: dict[str, Any], progress: Progress, kept: Path | None) -> None:
    """Write meta.json: the plan, the counts, and the SHA-256 of every shard and of the tokenizer's file."""
    if not progress.tokens["train"] and progress.tokens["validation"]:
        _clear(out)
        raise UserError(
            f"{out}: with --validation-every {plan['validation_every']} all text went to validation and none to train: give a "
            f"greater one (0: none goes to validation), or more text"
        )
    splits: dict[str, Any] = {}
    for split in SPLITS:
        shards = Shards(out, split, plan["shard_tokens"], progress.tokens[split])
        files = [{"file": p.name, "tokens": p.stat().st_size // TOKEN.itemsize, "sha256": sha256(p)} for p in shards.paths()]
        splits[split] = {"documents": progress.documents[split], "tokens": progress.tokens[split], "shards": files}
    empty = {"documents": 0, "blank": 0, "tokens": 0}
    counts = progress.counts + [empty] * (len(plan["sources"]) - len(progress.counts))
    names = [entry["name"] for entry in plan["sources"]]
    of_tokenizer = {} if kept is None else {"tokenizer_file": {"file": kept.name, "sha256": sha256(kept)}}
    _replace(out / "meta.json", {**plan, **of_tokenizer, "counts": dict(zip(names, counts, strict=True)), "splits": splits})


def _clear(out: Path) -> None:
    for path in (out / "progress.json", *out.glob("*-*.bin"), *(out / name for name in KEPT), out / "plan.json"):
        path.unlink(missing_ok=True)
