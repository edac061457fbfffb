"""Data and samples that are damaged or that others wrote: one line of error, no traceback, no file outside the folder."""

import gzip
import io
import json
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import m2s.data
from m2s.cli.evaluate.images import ImageTokens, load_split, read
from m2s.data import Bytes, Tokens, check_text, prepare_text
from m2s.data.cifar10 import read_binary, read_python
from m2s.data.digits import read as read_digits
from m2s.data.files import BadData, inside, read_bytes
from m2s.data.mnist import read_idx
from m2s.errors import UserError
from m2s.npz import read_npy, read_npz

pytestmark = pytest.mark.usefixtures("without_shape_hook")


def npz_header(shape: str, descr: str = "'<i4'", data: bytes = b"") -> bytes:
    """An .npz whose array `tokens` has a header of its own."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(118) + b"\n"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tokens.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data)
    return out.getvalue()


def test_sizes_are_checked_before_reading(tmp_path: Path) -> None:
    """A header that asks for a petabyte, and an array that decompresses to more than the limit."""
    path = tmp_path / "a.npz"
    for shape in ("(1000000000, 1000000)", "(-1, 4)", "(2, 2)", "(True, 4)"):
        path.write_bytes(npz_header(shape))
        with pytest.raises(ValueError, match=r"bytes, expected|its shape is"):
            read_npz(path, ["tokens"])
    path.write_bytes(npz_header("(2,)", "'|O'", bytes(16)))
    with pytest.raises(ValueError, match="Python objects"):
        read_npz(path, ["tokens"])
    np.savez_compressed(path, tokens=np.zeros((1000, 1000), np.int32))
    assert path.stat().st_size < 10_000
    with pytest.raises(ValueError, match=r"its arrays take 4,000,128 bytes, and at most 1,000,000 are read"):
        read_npz(path, ["tokens"], limit=1_000_000)
    assert read_npz(path, ["tokens"], optional=["settings"])["tokens"].shape == (1000, 1000)
    with pytest.raises(ValueError, match="it has no array settings, only tokens"):
        read_npz(path, ["settings"])
    (tmp_path / "b.gz").write_bytes(gzip.compress(bytes(1_000_000)))
    with pytest.raises(BadData, match="more than 1,000 bytes"):
        read_bytes(tmp_path / "b.gz", limit=1000)


def mutate(content: bytes, rng: random.Random) -> bytes:
    """One of six kinds of damage."""
    flipped = bytearray(content)
    for _ in range(rng.randrange(1, 12)):
        near = rng.choice([0, max(0, len(content) - 300), rng.randrange(len(content))])  # headers are at both ends of a zip
        at = min(len(content) - 1, near + rng.randrange(200))
        flipped[at] = rng.randrange(256)
    at = rng.randrange(len(content))
    kinds: list[Callable[[], bytes]] = [
        lambda: content[:at],
        lambda: bytes(flipped),
        lambda: content[:at] + rng.randbytes(rng.randrange(1, 50)) + content[at:],
        lambda: rng.randbytes(rng.randrange(300)),
        lambda: content + content,
        lambda: npz_header(
            rng.choice(["(2, 64)", "(", "()", "(2.5,)", "'a'", "(10**9,)"]), rng.choice(["'<i4'", "'|O'", "5", "'x'"])
        ),
    ]
    return rng.choice(kinds)()


def test_mutated_images_give_one_line(tmp_path: Path) -> None:
    """Samples, clamps, idx files, CIFAR batches and the digits, 100 times each: values, or a UserError or ValueError."""
    rng, errors = random.Random(19), []
    tokens = np.random.default_rng(0).integers(0, 17, (5, 64)).astype(np.int32)
    np.savez_compressed(tmp_path / "plain.npz", tokens=tokens, settings=json.dumps({"seed": 1}))
    np.save(tmp_path / "plain.npy", tokens)
    idx = struct.pack(">IIII", 0x803, 5, 8, 8) + tokens.astype(np.uint8).tobytes()
    reference = load_split("digits:test")
    batch = {"data": np.zeros((4, 3072), np.uint8), "labels": [0, 1, 2, 3]}
    cases: dict[str, tuple[bytes, Callable[[Path], Any]]] = {
        "a.npz": ((tmp_path / "plain.npz").read_bytes(), lambda path: read(str(path), reference)),
        "a.npy": ((tmp_path / "plain.npy").read_bytes(), read_npy),
        "idx": (idx, lambda path: read_idx(path, 3)),
        "idx.gz": (gzip.compress(idx), lambda path: read_idx(path, 3)),
        "a.bin": (bytes(3073 * 3), read_binary),
        "batch": (__import__("pickle").dumps(batch), read_python),
        "digits.npz": ((Path(m2s.data.__file__).parent / "digits.npz").read_bytes(), lambda path: read_digits(path.parent)),
    }
    for name, (content, reads) in cases.items():
        for _ in range(100):
            (tmp_path / name).write_bytes(mutate(content, rng))
            try:
                reads(tmp_path / name)
            except (UserError, ValueError) as error:
                errors.append(error)
    assert len(errors) > 400 and all(str(error).isprintable() for error in errors if isinstance(error, UserError))


def test_settings_of_another_form(tmp_path: Path) -> None:
    reference = ImageTokens("digits:test", load_split("digits:test").tokens, (8, 8), 17)
    for settings in ("[]", "5", '{"data": 5}', '{"data": [1]}', "{", "[" * 100_000):
        np.savez(tmp_path / "a.npz", tokens=np.zeros((2, 64), np.int32), settings=settings)
        assert read(str(tmp_path / "a.npz"), reference).tokens.shape == (2, 64)


# --- prepared text ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("some text, and more of it\n" * 20)
    prepare_text(tmp_path / "a.txt", tmp_path / "packed", Bytes(), validation_fraction=0.2)
    return tmp_path / "packed"


def change(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/passwd", "sub/../../secret.bin", "..", "", "a\0b"])
def test_files_outside_the_folder_are_not_read(text: Path, name: str) -> None:
    shard = text / "train-00000.bin"
    shutil.copy(shard, text.parent / "secret.bin")
    change(text, lambda meta: meta["splits"]["train"]["shards"][0].update(file=name))
    for reads in (lambda: Tokens(text, "train", 4), lambda: check_text(text)):
        with pytest.raises(BadData, match="expected a name without folders"):
            reads()


def test_links_out_of_the_folder_are_not_followed(text: Path) -> None:
    shard = text / "train-00000.bin"
    shard.rename(text.parent / "elsewhere.bin")
    shard.symlink_to(text.parent / "elsewhere.bin")
    with pytest.raises(BadData, match="is a link out of its folder"):
        Tokens(text, "train", 4)
    (text.parent / "link").symlink_to(text)  # a link to the folder itself is fine
    assert inside(text.parent / "link", "meta.json").is_file()


def test_preparation_does_not_write_through_links(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    secret, out = tmp_path / "secret", tmp_path / "out"
    secret.write_text("unchanged")
    prepare_text(tmp_path / "a.txt", out, Bytes(), validation_fraction=0.0)
    plan = {key: value for key, value in json.loads((out / "meta.json").read_text()).items() if key not in ("counts", "splits")}
    shutil.rmtree(out)
    out.mkdir()
    (out / "plan.json").write_text(json.dumps(plan))  # an interrupted preparation, from others
    (out / "train-00000.bin").symlink_to(secret)
    try:
        prepare_text(tmp_path / "a.txt", out, Bytes(), validation_fraction=0.0)
    except UserError as error:
        print(error)
    assert secret.read_text() == "unchanged"


def test_mutated_descriptions_give_one_line(text: Path) -> None:
    """300 damaged meta.json: tokens, or a UserError of one line."""
    rng, content, errors = random.Random(21), (text / "meta.json").read_text(), []
    values = [None, True, -1, 0, 2**70, 1.5, "x", "\x1b[2J", [], {}, [1], {"file": "../a"}]
    for case in range(300):
        meta = json.loads(content)
        place: Any = meta
        while isinstance(place, dict | list) and place:
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or rng.random() < 0.3:
                place[key] = rng.choice(values)
                break
            place = place[key]
        changed = json.dumps(meta)
        if case % 4 == 0:
            at = rng.randrange(len(content))
            changed = content[:at] + chr(rng.randrange(1, 256)) + content[at + 1 :]
        (text / "meta.json").write_text(changed)
        try:
            tokens = Tokens(text, "train", 4)
            _ = tokens[0], tokens.description, tokens.tokenizer
        except (UserError, ValueError) as error:
            errors.append(str(error))
    assert len(errors) > 50


def test_lines_that_are_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + "[" * 100_000 + "\n")
    with pytest.raises(BadData, match=r"a.jsonl, line 2: not JSON \(nested too deeply\)"):
        prepare_text(tmp_path / "a.jsonl", tmp_path / "packed", Bytes())


def test_an_archive_of_zeros_is_rejected_by_its_index(tmp_path: Path) -> None:
    """300 MB of zeros in less than two: the size is in the index of the archive, so nothing is decompressed."""
    import zipfile

    from m2s.npz import read_npz

    header = np.lib.format.magic(1, 0) + (118).to_bytes(2, "little")
    text = b"{'descr': '<i4', 'fortran_order': False, 'shape': (500000, 1000), }".ljust(117) + b"\n"
    with (
        zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("tokens.npy", "w", force_zip64=True) as file,
    ):
        file.write(header + text)
        for _ in range(300):
            file.write(bytes(1 << 20))
    with pytest.raises(ValueError, match="they are not samples"):
        read_npz(tmp_path / "a.npz", ["tokens"])
