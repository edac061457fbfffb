"""Where text comes from: files of a folder, or a data set of the hub. Each source gives its documents in a fixed order.

.txt        documents separated by a line <|endoftext|>; without such a line the file is one document
.jsonl      one JSON object a line, the document in its field `text` or as it is named
.parquet    one row a document, in its column `text` or as it is named (needs pyarrow)
"""

import fnmatch
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from m2s.data.files import BadData, sha256
from m2s.data.hub import HUB_TEXTS, hub_sources
from m2s.errors import UserError

SEPARATOR = b"<|endoftext|>"
TEXT = "text"  # the field of a document, unless another is named
NAME_IT = "say which of them holds the text: m2s data prepare --text-field NAME"


class Document(NamedTuple):
    text: str
    where: str
    """The line or row it starts at."""


@dataclass(frozen=True)
class Source:
    """One file, or one split of a hub data set."""

    name: str
    read: Callable[[int], Iterator[Document]]
    """The documents after the first so many."""
    identity: dict[str, Any]
    """What tells this source from any other: kept in meta.json."""
    split: str | None
    """Where its documents go; None where that is decided by their index."""


def find_sources(source: Path | str, test: str, field: str = TEXT) -> list[Source]:
    """The sources in a folder (at any depth, in the order of their names), of one file, or of a hub data set by name.

    `field` is what holds the document where a file has fields.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.suffix in READERS and file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
        )
        if not files:
            raise BadData(f"{path} holds no file that ends in {', '.join(READERS)}")
        _check_field(path, files, field)
        return [_file_source(file, file.relative_to(path).as_posix(), test, field) for file in files]
    if path.exists():
        if path.suffix not in READERS:
            raise BadData(f"{path} must end in {', '.join(READERS)}, or be a folder of such files")
        _check_field(path, [path], field)
        return [_file_source(path, path.name, test, field)]
    if str(source) in HUB_TEXTS or re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(source)):
        return hub_sources(str(source), field)
    raise UserError(
        f"source {str(source)!r} is neither a file or folder here nor a data set of the hub: "
        f"give a path, {', '.join(HUB_TEXTS)}, or OWNER/NAME"
    )


def _check_field(path: Path, files: list[Path], field: str) -> None:
    if field != TEXT and all(file.suffix == ".txt" for file in files):
        raise UserError(f"the text field is {field!r}, but {path} is plain .txt, which has no fields: leave out --text-field")


def _file_source(path: Path, name: str, test: str, field: str) -> Source:
    reader = READERS[path.suffix]

    def read(skip: int) -> Iterator[Document]:
        try:
            yield from itertools.islice(reader(path, field), skip, None)
        except OSError as error:
            raise BadData(f"{path} cannot be read: {error.strerror or error}") from error

    digest = sha256(path) if path.suffix == ".parquet" else _text_sha256(path)
    identity = {"name": name, "bytes": path.stat().st_size, "sha256": digest, **named_field(field)}
    return Source(name, read, identity, "test" if fnmatch.fnmatch(path.name, test) else None)


def named_field(field: str) -> dict[str, str]:
    """The field as a part of a source's identity: it goes without saying where it is `text`."""
    return {} if field == TEXT else {"field": field}


def _text_sha256(path: Path) -> str:
    """The SHA-256 of a file every line of which is UTF-8: said before any work is done."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                digest.update(raw)
                _decode(raw, path, number)
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _decode(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadData(
            f"{path}, line {line}: byte {raw[error.start]:#04x} at column {error.start + 1} is not UTF-8: "
            f"convert the file (iconv -f latin1 -t utf-8) or mend that line"
        ) from None


def read_txt(path: Path, field: str = TEXT) -> Iterator[Document]:
    """A document is what lies between separators, without the line break before the separator."""
    lines: list[str] = []
    start = 1

    def document() -> Document:
        text = "".join(lines).removesuffix("\n").removesuffix("\r")
        return Document(text, f"line {start}")

    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.rstrip(b"\r\n") == SEPARATOR:
                yield document()
                lines, start = [], number + 1
            else:
                lines.append(_decode(raw, path, number))
    if lines:
        yield document()


def read_jsonl(path: Path, field: str = TEXT) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = _decode(raw, path, number)
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if isinstance(record, dict) and record and field not in record:
                    raise BadData(f"{path}, line {number}: no field {field!r}, but {', '.join(record)}: {NAME_IT}")
                text = record[field]
                if not isinstance(text, str):
                    raise TypeError
                text.encode()
            except json.JSONDecodeError as error:
                raise BadData(f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})") from None
            except (KeyError, TypeError):
                raise BadData(f"{path}, line {number}: expected an object whose field {field!r} is a string") from None
            except UnicodeEncodeError as error:
                raise BadData(f"{path}, line {number}: {field!r} is not valid Unicode ({error.reason})") from None
            yield Document(text, f"line {number}")


def read_parquet(path: Path, field: str = TEXT) -> Iterator[Document]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"{path}: reading parquet needs: pip install pyarrow") from error
    row = 0
    try:
        with pq.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise BadData(f"{path} has columns {', '.join(file.schema_arrow.names)}, expected {field!r}: {NAME_IT}")
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if not isinstance(text, str | None):
                        raise BadData(f"{path}, row {row}: {field!r} is {type(text).__name__}, expected a string")
                    yield Document(text or "", f"row {row}")
    except (pa.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise BadData(f"{path}, after row {row}: not a whole parquet file of text ({reason})") from error


READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
