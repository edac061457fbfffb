"""Download data sets: resumable, verified, and with instructions for machines without a network.

A file is written to NAME.part and renamed when it is complete and verified, so that NAME is never a part of a file. An
interrupted download continues where it stopped, if the server allows it.
"""

import contextlib
import http.client
import json
import os
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from m2s.data.cifar10 import CIFAR10
from m2s.data.files import BadData, root, sha256
from m2s.data.image_set import ImageSet
from m2s.data.mnist import MNIST
from m2s.data.text import prepare_text
from m2s.data.tokenizer import Characters
from m2s.io import atomic_write, fsync, open_file, output_folder, replace
from m2s.network import why_unreachable

TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = 5  # connections that may break before the command gives up
BLOCK = 1 << 18
STARTED = ".downloading"  # a file that says that some files of a listed data set may be missing
TEXT8_BYTES, TEXT8_HELD_OUT = 100_000_000, 5_000_000  # of text8, and of each of its validation and test splits


class DownloadError(BadData):
    """A file could not be downloaded. What has arrived is kept, and the same call continues it."""


@dataclass(frozen=True)
class RemoteFile:
    """A file on a server.

    Args:
        url: Its address.
        size: Its number of bytes; None where it is not known.
        sha256: Its SHA-256; None where the contents are checked in another way.
    """

    url: str
    size: int | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        """The name of the file: the last part of its address."""
        return Path(urllib.parse.urlsplit(self.url).path).name


@dataclass(frozen=True)
class Download:
    """A data set that can be downloaded.

    Args:
        name: The name for `m2s data download`.
        summary: What it is and how large, in one line.
        files: The files, or one file of JSON that lists the addresses of all files (`listed`).
        folder: The folder below `m2s.data.root()` that the files belong into.
        is_complete: Whether a folder has the complete data, verified.
        finish: Checks the files in the folder, and unpacks them where that is needed.
        checked: How the contents are checked, in words.
        next_command: What to run next; "{root}" is replaced. Empty: train the preset of the same name.
        unpacked: The SHA-256 of the files after unpacking, by name.
        listed: Whether the only file is a list of addresses.
    """

    name: str
    summary: str
    files: tuple[RemoteFile, ...]
    folder: str
    is_complete: Callable[[Path], bool]
    finish: Callable[[Path], None]
    checked: str
    next_command: str = ""
    unpacked: Mapping[str, str] = field(default_factory=dict)
    listed: bool = False

    @property
    def path(self) -> Path:
        """The folder of the files on this machine."""
        return root() / self.folder

    def manual(self) -> list[str]:
        """Return how to get the data without a network on this machine, as lines of text."""
        lines = [f"Without a network, download these files elsewhere and put them into {self.path} with these names:"]
        for file in self.files:
            if self.listed:
                lines.append(f"  every file that {file.url} lists, as NUMBER.parquet (0000.parquet, ...)")
                continue
            size = "size not known" if file.size is None else f"{file.size:,} bytes"
            lines.append(f"  {file.name}  ({size}{'' if file.sha256 is None else f', SHA-256 {file.sha256}'})")
            lines.append(f"    from {file.url}")
        lines += [f"  unpacked, {name} has SHA-256 {digest}" for name, digest in self.unpacked.items()]
        return [*lines, f"Then run `m2s data download {self.name}` here. It needs no network then: {self.checked}."]


def fetch(file: RemoteFile, target: Path, report: Callable[[int, int | None], None] = lambda done, total: None) -> None:
    """Download a file. A file that is there already is only verified.

    Args:
        file: The file.
        target: Where to write it. What has arrived is in `target` with the ending .part until it is complete.
        report: Called with the number of bytes that have arrived, and their total where it is known.

    Raises:
        DownloadError: The server cannot be reached, or the connection broke repeatedly.
        BadData: The file has another size or SHA-256 than expected. It is deleted.
    """
    if target.is_file():
        _verify(file, target, target)
        return
    output_folder(target.parent)
    part = target.with_name(f"{target.name}.part")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _continue(file, part, report)
            break
        except (OSError, http.client.HTTPException) as error:
            rejected = isinstance(error, urllib.error.HTTPError) and error.code < 500
            offline = isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError)
            if attempt == ATTEMPTS or rejected or offline:
                reason = getattr(error, "reason", None) or error
                raise DownloadError(f"{file.url} could not be downloaded ({reason}): the same command continues it") from error
    _verify(file, part, target)
    fsync(part)
    replace(part, target)


def _continue(file: RemoteFile, part: Path, report: Callable[[int, int | None], None]) -> None:
    """Append to `part` until the file is complete."""
    done = part.stat().st_size if part.is_file() else 0
    if file.size is not None and done == file.size:
        return
    request = urllib.request.Request(file.url, headers={"User-Agent": "m2s", **({"Range": f"bytes={done}-"} if done else {})})
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not done:  # 416: the server has fewer bytes than `part`
            raise
        part.unlink()
        return _continue(file, part, report)
    with answer:
        if answer.status != 206:  # the server sends everything again
            done = 0
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length and length.isdecimal() else file.size
        flags = os.O_WRONLY | (os.O_APPEND if done else os.O_TRUNC)
        with os.fdopen(open_file(part, flags), "ab" if done else "wb") as out:
            report(done, total)
            while block := answer.read(BLOCK):
                out.write(block)
                done += len(block)
                report(done, total)
    if total is not None and done < total:
        raise http.client.IncompleteRead(b"", total - done)


def _verify(file: RemoteFile, path: Path, target: Path) -> None:
    """Raise BadData and delete the file if its size or SHA-256 is wrong."""
    wrong = None
    if file.size is not None and path.stat().st_size != file.size:
        wrong = f"{path.stat().st_size:,} bytes, expected {file.size:,}"
    elif file.sha256 is not None and (found := sha256(path)) != file.sha256:
        wrong = f"SHA-256 {found}, expected {file.sha256}"
    if wrong is not None:
        path.unlink()
        raise BadData(f"{target.name} from {file.url} has {wrong}: it was deleted; run the same command again")


def download(data: Download, report: Callable[[str, int, int | None], None] = lambda name, done, total: None) -> bool:
    """Download and check a data set. What is there already is not downloaded again.

    Args:
        data: The data set.
        report: Called with the name of a file, the bytes that have arrived, and their total where it is known.

    Returns:
        False where the data was complete already.

    Raises:
        DownloadError: There is no network. `Download.manual` says what to do.
        BadData: A file is damaged.
    """
    folder = data.path
    if data.is_complete(folder):
        return False
    files = {file: folder / file.name for file in data.files}
    missing = [file for file, path in files.items() if not path.is_file()]
    if missing and (reason := why_unreachable(missing[0].url)) is not None:
        if data.listed and any(folder.glob("*.parquet")) and not (folder / STARTED).exists():  # files that were copied by hand
            data.finish(folder)
            return True
        raise DownloadError(f"{data.name} cannot be downloaded: {reason}")
    if data.listed:
        (output_folder(folder) / STARTED).touch()
        files = {file: folder / f"{i:04d}.parquet" for i, file in enumerate(_addresses(data.files[0]))}
    for file, path in files.items():
        fetch(file, path, lambda done, total, path=path: report(path.name, done, total))  # type: ignore[misc]
    data.finish(folder)
    (folder / STARTED).unlink(missing_ok=True)
    return True


def _addresses(file: RemoteFile) -> list[RemoteFile]:
    """Read the list of addresses of a data set on the Hugging Face hub."""
    try:
        with urllib.request.urlopen(urllib.request.Request(file.url, headers={"User-Agent": "m2s"}), timeout=TIMEOUT) as answer:
            addresses = json.loads(answer.read(1 << 22))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DownloadError(f"{file.url} could not be read ({error})") from error
    if not isinstance(addresses, list) or not addresses or not all(isinstance(one, str) for one in addresses):
        raise DownloadError(f"{file.url} is no list of addresses")
    return [RemoteFile(one) for one in addresses]


def _verified(images: ImageSet) -> Callable[[Path], bool]:
    """Return a function that says whether a folder has all files of an image data set, with their SHA-256."""

    def is_complete(folder: Path) -> bool:
        try:
            images.verify(folder)
        except BadData:
            return False
        return True

    return is_complete


def _finish_mnist(folder: Path) -> None:
    """Verify the decompressed files, and delete a file that is damaged."""
    try:
        MNIST.verify(folder)
    except BadData:
        for name, path in MNIST.locate(folder).items():
            one = ImageSet(**{**vars(MNIST), "sha256": {name: MNIST.sha256[name]}})
            if not _verified(one)(folder):
                path.unlink()
        raise


def _finish_cifar10(folder: Path) -> None:
    """Unpack the six batches, verify them, and delete the archive."""
    archive = folder / CIFAR10_ARCHIVE.name
    with _damaged(archive), tarfile.open(archive) as tar:
        for name in CIFAR10.sha256:
            member = tar.extractfile(f"cifar-10-batches-bin/{name}.bin")
            if member is None:
                raise BadData(f"{archive} has no {name}.bin")
            with member, atomic_write(folder / f"{name}.bin") as temporary:
                temporary.write_bytes(member.read())
    CIFAR10.verify(folder)
    archive.unlink()


@contextlib.contextmanager
def _damaged(archive: Path) -> Iterator[None]:
    """Report an archive that cannot be read, and delete it."""
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, KeyError, EOFError, OSError, BadData) as error:
        archive.unlink(missing_ok=True)
        raise BadData(f"{archive} is damaged ({error}): it was deleted; run the same command again") from error


def _finish_text8(folder: Path) -> None:
    """Unpack text8 and prepare its standard split: 90, 5 and 5 million characters."""
    archive = folder / TEXT8_ARCHIVE.name
    with _damaged(archive), zipfile.ZipFile(archive) as zipped, zipped.open("text8") as file:
        text = file.read(TEXT8_BYTES + 1)
        if len(text) != TEXT8_BYTES or text.translate(None, b" abcdefghijklmnopqrstuvwxyz"):
            raise BadData(f"it has {len(text):,} characters, expected {TEXT8_BYTES:,} of a to z and spaces")
    train, test = folder / "text8-train.txt", folder / "text8-test.txt"
    for path, part in ((train, text[:-TEXT8_HELD_OUT]), (test, text[-TEXT8_HELD_OUT:])):
        with atomic_write(path) as temporary:
            temporary.write_bytes(part)
    fraction = TEXT8_HELD_OUT / (TEXT8_BYTES - TEXT8_HELD_OUT)
    prepare_text(folder, root() / "text8", Characters(), validation_fraction=fraction)
    for path in (archive, train, test):
        path.unlink()


def _finish_parquet(folder: Path) -> None:
    """Check that there are files, and that each is a complete parquet file."""
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        raise BadData(f"{folder} has no .parquet file")
    for path in paths:
        with path.open("rb") as file:
            first = file.read(4)
            file.seek(-min(4, path.stat().st_size), os.SEEK_END)
            if first != b"PAR1" or file.read(4) != b"PAR1":
                path.unlink()
                raise BadData(f"{path} is not a complete parquet file: it was deleted; run the same command again")
    (folder / "complete").touch()


MNIST_FILES = (
    RemoteFile(f"{MNIST.origin}train-images-idx3-ubyte.gz", 9_912_422),
    RemoteFile(f"{MNIST.origin}train-labels-idx1-ubyte.gz", 28_881),
    RemoteFile(f"{MNIST.origin}t10k-images-idx3-ubyte.gz", 1_648_877),
    RemoteFile(f"{MNIST.origin}t10k-labels-idx1-ubyte.gz", 4_542),
)
CIFAR10_ARCHIVE = RemoteFile(CIFAR10.origin, 170_052_171)
TEXT8_ARCHIVE = RemoteFile(
    "http://mattmahoney.net/dc/text8.zip",
    31_344_016,
    "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
)
GPT2_MERGES = RemoteFile(
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
    456_318,
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
)
OPENWEBTEXT_LIST = RemoteFile("https://huggingface.co/api/datasets/Skylion007/openwebtext/parquet/plain_text/train")

DOWNLOADS: dict[str, Download] = {
    "mnist": Download(
        name="mnist",
        summary="MNIST, 70,000 images of 28 x 28 pixels, 12 MB",
        files=MNIST_FILES,
        folder="mnist",
        is_complete=_verified(MNIST),
        finish=_finish_mnist,
        checked="the SHA-256 of the decompressed files is compared",
        unpacked=MNIST.sha256,
    ),
    "cifar10": Download(
        name="cifar10",
        summary="CIFAR-10, 60,000 images of 32 x 32 pixels, 170 MB",
        files=(CIFAR10_ARCHIVE,),
        folder="cifar10",
        is_complete=_verified(CIFAR10),
        finish=_finish_cifar10,
        checked="the archive is unpacked, and the SHA-256 of its six batches is compared",
        unpacked={f"{name}.bin": digest for name, digest in CIFAR10.sha256.items()},
    ),
    "text8": Download(
        name="text8",
        summary="text8, 100 million characters of Wikipedia, 31 MB; prepared as 90, 5 and 5 million characters",
        files=(TEXT8_ARCHIVE,),
        folder="raw/text8",
        is_complete=lambda folder: (root() / "text8" / "meta.json").is_file(),
        finish=_finish_text8,
        checked="the SHA-256 of the archive is compared, and it must hold 100,000,000 characters, a to z and spaces",
    ),
    "openwebtext": Download(
        name="openwebtext",
        summary="OpenWebText, 8 million documents, about 24 GB, as .parquet files of the Hugging Face hub",
        files=(OPENWEBTEXT_LIST,),
        folder="raw/openwebtext",
        is_complete=lambda folder: (folder / "complete").is_file(),
        finish=_finish_parquet,
        checked="each file must be a complete parquet file; no checksum is known",
        next_command="m2s data prepare {root}/raw/openwebtext --out {root}/openwebtext --tokenizer gpt2",
        listed=True,
    ),
    "gpt2": Download(
        name="gpt2",
        summary="the list of merges of GPT-2's tokenizer, 0.5 MB",
        files=(GPT2_MERGES,),
        folder="gpt2",
        is_complete=lambda folder: (
            (folder / GPT2_MERGES.name).is_file() and sha256(folder / GPT2_MERGES.name) == GPT2_MERGES.sha256
        ),
        finish=lambda folder: None,
        checked="the SHA-256 of the file is compared",
        next_command="m2s data prepare TEXT --out FOLDER --tokenizer gpt2",
    ),
}
"""What `m2s data download` knows, by name."""
