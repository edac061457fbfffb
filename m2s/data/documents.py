"""Documents of a text corpus, from the files of a folder or from a data set of the hub, in a fixed order.

.txt        documents separated by a line <|endoftext|>; without such a line the file is one document
.jsonl      one JSON object per line, with the document in the field `text` or another that is named
.parquet    one document per row, in the column `text` or another that is named (needs pyarrow)
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
from m2s.data.hub import HUB_TEXTS, PACKAGE, HubSplit, hub_splits, is_installed
from m2s.errors import UserError
from m2s.io import is_likely_local
from m2s.remote import if_on_the_hub

SEPARATOR = b"<|endoftext|>"
TEXT = "text"  # the default field of a document
NAME_THE_FIELD = "name the one that holds the text: m2s data prepare --text-field NAME"


class Document(NamedTuple):
    """One document.

    Args:
        text: Its text.
        where: The line or row at which it starts, for error messages.
    """

    text: str
    where: str


def is_filled(document: Document) -> bool:
    """Return whether a document has more than white space.

    Args:
        document: The document.
    """
    return bool(document.text.strip())


@dataclass(frozen=True)
class DocumentSource:
    """The documents of one file, or of one split of a hub data set.

    Args:
        name: The name for messages and for meta.json.
        read: `read(skip)` yields the documents after the first `skip`.
        identity: For meta.json: two sources with the same identity have the same documents.
        split: The split of all its documents; None where the index of a document decides.
    """

    name: str
    read: Callable[[int], Iterator[Document]]
    identity: dict[str, Any]
    split: str | None


def require_source(source: Path | str) -> None:
    """Check that a text exists, without reading it.

    Args:
        source: A folder, a file, or the name of a hub data set. The hub is not asked.

    Raises:
        UserError: There is no such file or folder, and it is no name of a data set, or the package to ask the hub is missing.
        BadData: The file has another ending than those of text, or the folder has no text.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if not _text_files(path):
            raise BadData(f"{path} holds no file that ends in {', '.join(READERS)}")
    elif path.exists():
        if path.suffix not in READERS:
            raise BadData(f"{path} must end in {', '.join(READERS)}, or be a folder of such files")
    elif not _is_hub_name(str(source)):
        raise UserError(
            f"there is no folder or file {source}: check the path, or give a data set of the Hugging Face hub "
            f"({', '.join(HUB_TEXTS)}, or any OWNER/NAME)"
        )
    elif str(source) not in HUB_TEXTS and not is_installed():
        raise UserError(f"there is no folder or file {source}; {if_on_the_hub('data set', str(source), PACKAGE)}")


def _is_hub_name(name: str) -> bool:
    """Whether a source that does not exist as a file can be a data set of the hub, and not a mistyped path."""
    return name in HUB_TEXTS or bool(re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not is_likely_local(name))


def _text_files(folder: Path) -> list[Path]:
    """The files of text in a folder, at any depth. Hidden ones do not count."""
    return sorted(
        file
        for file in folder.rglob("*")
        if file.suffix in READERS and file.is_file() and not any(p.startswith(".") for p in file.relative_to(folder).parts)
    )


def find_sources(source: Path | str, test: str, field: str = TEXT) -> list[DocumentSource]:
    """Find the text of a folder, a file or a hub data set.

    Args:
        source: A folder (searched at any depth, in the order of file names), a file, or the name of a hub data set.
        test: A pattern: files with a matching name belong to the test split.
        field: The field of the document, for .jsonl, .parquet and the hub.

    Returns:
        One source for each file, or for each split of a hub data set.

    Raises:
        UserError: There is no such file, folder or data set.
        BadData: A file is empty, damaged or not UTF-8.
    """
    require_source(source)
    path = Path(source).expanduser()
    if path.is_dir():
        files = _text_files(path)
        _check_field(path, files, field)
        return [_file_source(file, file.relative_to(path).as_posix(), test, field) for file in files]
    if path.exists():
        _check_field(path, [path], field)
        return [_file_source(path, path.name, test, field)]
    return [_hub_source(split) for split in hub_splits(str(source), field)]


def _check_field(path: Path, files: list[Path], field: str) -> None:
    """Reject a field name for files that have no fields."""
    if field != TEXT and all(file.suffix == ".txt" for file in files):
        raise UserError(f"the text field is {field!r}, but {path} is plain .txt, which has no fields: leave out --text-field")


def _file_source(path: Path, name: str, test: str, field: str) -> DocumentSource:
    """Check a file and return its documents."""
    reader = READERS[path.suffix]

    def read(skip: int) -> Iterator[Document]:
        try:
            yield from itertools.islice(reader(path, field), skip, None)
        except OSError as error:
            raise BadData(f"{path} cannot be read: {error.strerror or error}") from error

    digest = sha256(path) if path.suffix == ".parquet" else _text_sha256(path)
    identity = {"name": name, "bytes": path.stat().st_size, "sha256": digest, **_field_identity(field)}
    return DocumentSource(name, read, identity, "test" if fnmatch.fnmatch(path.name, test) else None)


def _hub_source(split: HubSplit) -> DocumentSource:
    """Return the documents of a split of a hub data set."""

    def read(skip: int) -> Iterator[Document]:
        return (Document(text, where) for text, where in split.read(skip))

    identity = {
        "name": split.name,
        "rows": len(split.texts),
        "fingerprint": split.texts._fingerprint,
        **_field_identity(split.column),
    }
    return DocumentSource(split.name, read, identity, split.split)


def _field_identity(field: str) -> dict[str, str]:
    """Return the part of a source's identity that names its field. The default field is not named."""
    return {} if field == TEXT else {"field": field}


def _text_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, and raise BadData before any document is packed if a line is not UTF-8."""
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
    """Decode a line of UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadData(
            f"{path}, line {line}: byte {raw[error.start]:#04x} at column {error.start + 1} is not UTF-8: "
            f"convert the file (iconv -f latin1 -t utf-8) or correct that line"
        ) from None


def read_txt(path: Path, field: str = TEXT) -> Iterator[Document]:
    """Read a .txt file.

    Args:
        path: The file. A document ends before the line break that precedes a separator line.
        field: Not used: plain text has no fields.

    Yields:
        The documents, in the order of the file.
    """
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
    """Read a .jsonl file.

    Args:
        path: The file: one JSON object per line. Blank lines are skipped.
        field: The field of the document.

    Yields:
        The documents, in the order of the file.

    Raises:
        BadData: A line is not JSON, or its field is missing or not a string.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = _decode(raw, path, number)
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if isinstance(record, dict) and record and field not in record:
                    raise BadData(f"{path}, line {number}: no field {field!r}, but {', '.join(record)}: {NAME_THE_FIELD}")
                text = record[field]
                if not isinstance(text, str):
                    raise TypeError
                text.encode()
            except json.JSONDecodeError as error:
                raise BadData(f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})") from None
            except RecursionError:
                raise BadData(f"{path}, line {number}: not JSON (nested too deeply)") from None
            except (KeyError, TypeError):
                raise BadData(f"{path}, line {number}: expected an object whose field {field!r} is a string") from None
            except UnicodeEncodeError as error:
                raise BadData(f"{path}, line {number}: {field!r} is not valid Unicode ({error.reason})") from None
            yield Document(text, f"line {number}")


def read_parquet(path: Path, field: str = TEXT) -> Iterator[Document]:
    """Read a .parquet file.

    Args:
        path: The file: one document per row.
        field: The column of the document. A null is an empty document.

    Yields:
        The documents, in the order of the file.

    Raises:
        UserError: The package pyarrow is not installed.
        BadData: The file is damaged, or the column is missing or not of strings.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"{path}: reading parquet needs: pip install pyarrow") from error
    row = 0
    try:
        with pq.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                columns = ", ".join(file.schema_arrow.names)
                raise BadData(f"{path} has columns {columns}, expected {field!r}: {NAME_THE_FIELD}")
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if not isinstance(text, str | None):
                        raise BadData(f"{path}, row {row}: {field!r} is {type(text).__name__}, expected a string")
                    yield Document(text or "", f"row {row}")
    except (pa.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise BadData(f"{path}, after row {row}: not a complete parquet file of text ({reason})") from error


READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
