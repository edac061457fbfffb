"""`m2s data download`, from a server on this machine: resumable, atomic, verified; and the manual route."""

import contextlib
import dataclasses
import gzip
import hashlib
import http.server
import io
import json
import random
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import m2s.data
from m2s.cli import main
from m2s.cli.next_step import next_preset_command
from m2s.data import BadData, download, files, image_set
from m2s.data.download import DOWNLOADS, DownloadError, RemoteFile, fetch


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves the files of `server.files`, with ranges, and breaks connections after `server.breaks` bytes."""

    def do_GET(self) -> None:
        data = self.server.files.get(self.path)
        self.server.requests.append((self.path, self.headers.get("Range")))
        if data is None:
            self.send_error(404)
            return
        start = 0
        if (asked := self.headers.get("Range")) and self.server.ranges:
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
            if start >= len(data):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        part = data[start:]
        if self.server.breaks:
            part = part[: self.server.breaks.pop(0)]
        with contextlib.suppress(OSError):
            self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.HTTPServer]:
    """A server on a free port of this machine."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files, server.requests, server.ranges, server.breaks = {}, [], True, []
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty $M2S_DATA."""
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def serve(
    monkeypatch: pytest.MonkeyPatch, server: http.server.HTTPServer, name: str, contents: dict[str, bytes], **more
) -> None:
    """Let a data set consist of these files on the test server."""
    for file, content in contents.items():
        server.files[f"/{file}"] = content
    remote = tuple(RemoteFile(f"{server.url}/{file}", len(content)) for file, content in contents.items())
    monkeypatch.setitem(DOWNLOADS, name, dataclasses.replace(DOWNLOADS[name], files=remote, **more))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command; return its exit code and what it printed."""
    code = 0
    try:
        main(list(arguments))
    except SystemExit as exit_:
        code = exit_.code
    return code, *capsys.readouterr()


CONTENT = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def test_a_file_arrives_and_is_reported(server, tmp_path) -> None:
    server.files["/a.bin"] = CONTENT
    seen: list[tuple[int, int | None]] = []
    fetch(RemoteFile(f"{server.url}/a.bin", len(CONTENT), SHA256), tmp_path / "x" / "a.bin", lambda *given: seen.append(given))
    assert (tmp_path / "x" / "a.bin").read_bytes() == CONTENT and [p.name for p in (tmp_path / "x").iterdir()] == ["a.bin"]
    assert seen[0] == (0, 300_000) and seen[-1] == (300_000, 300_000) and seen == sorted(seen)
    fetch(RemoteFile(f"{server.url}/a.bin", len(CONTENT), SHA256), tmp_path / "x" / "a.bin")
    assert len(server.requests) == 1  # a complete file is not requested again


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_continued(server, tmp_path, ranges) -> None:
    """Where the server allows it, only the missing bytes are requested."""
    server.files["/a.bin"], server.ranges, server.breaks = CONTENT, ranges, [100_000, 50_000]
    fetch(RemoteFile(f"{server.url}/a.bin", None, SHA256), tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and len(server.requests) == 3
    starts = [int(asked[6:-1]) for _, asked in server.requests if asked]
    assert starts == ([100_000, 150_000] if ranges else [100_000, 50_000])


def test_an_interrupted_download_continues_in_the_next_call(server, tmp_path, monkeypatch) -> None:
    server.files["/a.bin"] = CONTENT
    monkeypatch.setattr(download, "BLOCK", 1000)

    def interrupt(done: int, total: int | None) -> None:
        if done >= 120_000:
            raise KeyboardInterrupt

    remote = RemoteFile(f"{server.url}/a.bin", len(CONTENT), SHA256)
    with pytest.raises(KeyboardInterrupt):
        fetch(remote, tmp_path / "a.bin", interrupt)
    assert not (tmp_path / "a.bin").exists() and (tmp_path / "a.bin.part").stat().st_size == 120_000
    fetch(remote, tmp_path / "a.bin")
    assert server.requests[-1] == ("/a.bin", "bytes=120000-") and (tmp_path / "a.bin").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_a_part_of_another_file_does_not_pass(server, tmp_path) -> None:
    server.files["/a.bin"] = CONTENT
    remote = RemoteFile(f"{server.url}/a.bin", len(CONTENT), SHA256)
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    with pytest.raises(BadData, match=r"a\.bin from .* has SHA-256 .*: it was deleted; run the same command again"):
        fetch(remote, tmp_path / "a.bin")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.bin.part").write_bytes(b"x" * 400_000)  # longer than the file: the server answers 416
    fetch(remote, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


@pytest.mark.parametrize(("size", "digest"), [(299_999, None), (300_000, "0" * 64)])
def test_wrong_contents_are_deleted(server, tmp_path, size, digest) -> None:
    server.files["/a.bin"] = CONTENT
    with pytest.raises(BadData, match="expected"):
        fetch(RemoteFile(f"{server.url}/a.bin", size, digest), tmp_path / "a.bin")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_not_requested_again(server, tmp_path) -> None:
    with pytest.raises(DownloadError, match=r"nothing could not be downloaded \(Not Found\)"):
        fetch(RemoteFile(f"{server.url}/nothing"), tmp_path / "a.bin")
    assert len(server.requests) == 1


def idx(array: np.ndarray) -> bytes:
    """An array as the contents of an idx file."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return (0x800 + array.ndim).to_bytes(4, "big") + sizes + array.tobytes()


def test_mnist(server, data, monkeypatch, capsys) -> None:
    """With small files in place of MNIST's, and their checksums."""
    rng = np.random.default_rng(0)
    arrays = {
        f"{split}-{kind}": rng.integers(0, 10, shape, np.uint8)
        for split, count in (("train", 5), ("t10k", 3))
        for kind, shape in (("images-idx3-ubyte", (count, 28, 28)), ("labels-idx1-ubyte", (count,)))
    }
    sums = {name: hashlib.sha256(idx(array)).hexdigest() for name, array in arrays.items()}
    small = dataclasses.replace(image_set.DATASETS["mnist"], sha256=sums)
    monkeypatch.setattr(download, "MNIST", small)
    monkeypatch.setattr(m2s.data.mnist, "MNIST", small)
    contents = {f"{name}.gz": gzip.compress(idx(array)) for name, array in arrays.items()}
    serve(monkeypatch, server, "mnist", contents, is_complete=download._verified(small))
    code, out, err = run(capsys, "data", "download", "mnist")
    assert (
        code == 0
        and err == ""
        and f"mnist is now in {data}, verified" in out
        and out.splitlines()[-1] == next_preset_command("mnist")
    )
    assert np.array_equal(small.load().train.numpy(), arrays["train-images-idx3-ubyte"].reshape(5, -1))
    requests = len(server.requests)
    assert "already" in run(capsys, "data", "download", "mnist")[1] and len(server.requests) == requests
    path = data / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(b"x", mtime=0).ljust(len(contents[path.name]), b"\0"))  # damaged, and of the right size
    code, _, err = run(capsys, "data", "download", "mnist")
    assert (code == 2 and "damaged" in err + "") or "SHA-256" in err
    assert not path.exists() and len(list((data / "mnist").iterdir())) == 3
    assert run(capsys, "data", "download", "mnist")[0] == 0 and len(server.requests) == requests + 1


def test_cifar10(server, data, monkeypatch, capsys) -> None:
    batches = {name: random.Random(name).randbytes(3073 * 10) for name in image_set.DATASETS["cifar10"].sha256}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in batches.items()}
    small = dataclasses.replace(image_set.DATASETS["cifar10"], sha256=sums)
    monkeypatch.setattr(download, "CIFAR10", small)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in (*batches.items(), ("../../evil", b"x")):
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    archive = {"cifar-10-binary.tar.gz": packed.getvalue()}
    serve(monkeypatch, server, "cifar10", archive, is_complete=download._verified(small))
    assert run(capsys, "data", "download", "cifar10")[0] == 0
    assert {path.name: path.read_bytes() for path in (data / "cifar10").iterdir()} == {
        f"{name}.bin": content for name, content in batches.items()
    }
    (data / "cifar10" / "test_batch.bin").unlink()
    serve(monkeypatch, server, "cifar10", {"cifar-10-binary.tar.gz": b"no archive"}, is_complete=download._verified(small))
    code, _, err = run(capsys, "data", "download", "cifar10")
    assert code == 2 and "is damaged" in err and not (data / "cifar10" / "cifar-10-binary.tar.gz").exists()


def test_text8_is_prepared_with_the_standard_split(server, data, monkeypatch, capsys) -> None:
    monkeypatch.setattr(download, "TEXT8_BYTES", 10_000)
    monkeypatch.setattr(download, "TEXT8_HELD_OUT", 500)
    text = "".join(random.Random(0).choices(" abcdefghijklmnopqrstuvwxyz", k=10_000))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("text8", text)
    other = (RemoteFile(f"{server.url}/text8.zip", len(packed.getvalue()), SHA256),)
    serve(monkeypatch, server, "text8", {"text8.zip": packed.getvalue()})
    with monkeypatch.context() as patch:
        patch.setitem(DOWNLOADS, "text8", dataclasses.replace(DOWNLOADS["text8"], files=other))
        code, _, err = run(capsys, "data", "download", "text8")
    assert code == 2 and f"expected {SHA256}" in err and not list((data / "raw" / "text8").iterdir())
    printed = run(capsys, "data", "download", "text8")[1].splitlines()[-1]
    assert printed == next_preset_command("text8")
    ids = {c: i for i, c in enumerate(" abcdefghijklmnopqrstuvwxyz")}
    for split, part in (("train", text[:9000]), ("validation", text[9000:9500]), ("test", text[9500:])):
        stored = np.fromfile(data / "text8" / f"{split}-00000.bin", "<u2").tolist()
        assert stored == [ids[c] for c in part], split
    assert "already" in run(capsys, "data", "download", "text8")[1] and list((data / "raw" / "text8").iterdir()) == []


def test_openwebtext_follows_the_list_of_the_hub(server, data, monkeypatch, capsys) -> None:
    parts = [b"PAR1" + random.Random(i).randbytes(100) + b"PAR1" for i in range(3)]
    for i, part in enumerate(parts):
        server.files[f"/train/{i}.parquet"] = part
    listing = json.dumps([f"{server.url}/train/{i}.parquet" for i in range(3)]).encode()
    serve(monkeypatch, server, "openwebtext", {"train": listing})
    _, out, _ = run(capsys, "data", "download", "openwebtext")
    folder = data / "raw" / "openwebtext"
    assert [path.read_bytes() for path in sorted(folder.glob("*.parquet"))] == parts
    expected = f"m2s data prepare {data}/raw/openwebtext --out {data}/openwebtext --tokenizer gpt2"
    assert out.splitlines()[-1] == expected and "already" in run(capsys, "data", "download", "openwebtext")[1]
    (folder / "complete").unlink()
    (folder / "0001.parquet").write_bytes(b"PAR1 and no end")
    assert run(capsys, "data", "download", "openwebtext")[0] == 2 and not (folder / "0001.parquet").exists()
    assert run(capsys, "data", "download", "openwebtext")[0] == 0


def test_gpt2_checks_the_sum(server, data, monkeypatch, capsys) -> None:
    server.files["/vocab.bpe"] = CONTENT
    good, bad = (RemoteFile(f"{server.url}/vocab.bpe", 300_000, digest) for digest in (SHA256, "0" * 64))
    monkeypatch.setattr(download, "GPT2_MERGES", good)
    monkeypatch.setitem(DOWNLOADS, "gpt2", dataclasses.replace(DOWNLOADS["gpt2"], files=(bad,)))
    assert run(capsys, "data", "download", "gpt2")[0] == 2 and not list((data / "gpt2").iterdir())
    monkeypatch.setitem(DOWNLOADS, "gpt2", dataclasses.replace(DOWNLOADS["gpt2"], files=(good,)))
    assert run(capsys, "data", "download", "gpt2")[0] == 0 and (data / "gpt2" / "vocab.bpe").read_bytes() == CONTENT
    assert "already" in run(capsys, "data", "download", "gpt2")[1]


@pytest.mark.parametrize("name", DOWNLOADS)
def test_without_a_network_the_manual_route_is_printed(data, monkeypatch, capsys, name) -> None:
    monkeypatch.setattr(download, "why_unreachable", lambda url: "the name server does not answer")
    monkeypatch.setattr(download.urllib.request, "urlopen", lambda *_, **__: pytest.fail("there is no network"))
    code, out, err = run(capsys, "data", "download", name)
    assert code == 2 and err == f"m2s: {name} cannot be downloaded: the name server does not answer\n"
    entry = DOWNLOADS[name]
    assert str(entry.path) in out and f"m2s data download {name}" in out
    for file in entry.files:
        assert file.url in out
        assert entry.listed or (file.name in out and f"{file.size:,} bytes" in out)
        assert file.sha256 is None or file.sha256 in out
    if name in m2s.data.image_sets():
        assert all(digest in out for digest in m2s.data.image_sets()[name].sha256.values())
    assert not data.exists()


def test_files_that_were_copied_by_hand_need_no_network(data, monkeypatch, capsys) -> None:
    monkeypatch.setattr(download, "why_unreachable", lambda url: "away")
    folder = data / "raw" / "openwebtext"
    folder.mkdir(parents=True)
    (folder / "0000.parquet").write_bytes(b"PAR1 PAR1")
    (folder / download.STARTED).touch()  # an interrupted download, whose other files are missing
    assert run(capsys, "data", "download", "openwebtext")[0] == 2
    (folder / download.STARTED).unlink()
    assert run(capsys, "data", "download", "openwebtext")[0] == 0
    (data / "gpt2").mkdir()
    (data / "gpt2" / "vocab.bpe").write_bytes(b"x")
    code, _, err = run(capsys, "data", "download", "gpt2")
    assert code == 2 and "has 1 bytes, expected 456,318" in err


@pytest.mark.parametrize("name", [name for name, entry in DOWNLOADS.items() if not entry.listed])
def test_every_file_has_a_size_and_a_checksum(name) -> None:
    """Before or after unpacking. Without one an attacker may change what http delivers."""
    entry = DOWNLOADS[name]
    digests = [*entry.unpacked.values(), *filter(None, (file.sha256 for file in entry.files))]
    assert digests and all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert entry.unpacked or all(file.sha256 for file in entry.files)
    assert all(file.size for file in entry.files) and "SHA-256" in entry.checked


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_the_checksums_are_those_of_real_files(name) -> None:
    entry = m2s.data.image_sets()[name]
    if entry.missing(files.root() / name):
        pytest.skip(f"no {name} here")
    entry.verify(files.root() / name)


@pytest.mark.parametrize(
    ("words", "name"),
    [("mnist", "mnist"), ("cifar10", "cifar10"), ("text8", "text8"), ("owt", "openwebtext")],
)
def test_training_without_data_names_the_command(data, tmp_path, capsys, words, name) -> None:
    code, _, err = run(capsys, "train", words, "--out", str(tmp_path / "run"), "--device", "cpu")
    assert code == 2 and f"run `m2s data download {name}`" in err and err.count("\n") == 1
    assert err.count("from the hub") == (name in m2s.data.image_sets())
    assert not (tmp_path / "run").exists()


def test_unknown_names_and_the_tokenizer(data, tmp_path, capsys) -> None:
    code, _, err = run(capsys, "data", "download", "mnst")
    assert code == 2 and "there is no data set 'mnst' to download: did you mean mnist?" in err
    (tmp_path / "a.txt").write_text("text")
    assert "run `m2s data download gpt2`" in run(capsys, "data", "prepare", str(tmp_path / "a.txt"), "--out", "x")[2]
