"""Image data sets: files that are read, files that are rejected, and the hub."""

import gzip
import os
import pickle
import struct
import sys
import types

import numpy as np
import pytest
import torch

import m2s.data
from m2s.data import DATASETS, BadData, cifar10
from m2s.errors import UserError


def write_idx(path, array, magic=None):
    header = struct.pack(f">I{array.ndim}I", magic or 0x800 + array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """Return a folder with five training and three test images. There is no other MNIST on the machine."""
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "none"))
    rng = np.random.default_rng(0)
    for split, n in (("train", 5), ("t10k", 3)):
        write_idx(tmp_path / f"{split}-images-idx3-ubyte", rng.integers(0, 256, (n, 28, 28)))
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte", rng.integers(0, 10, n))
    return tmp_path


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """Return a folder with six batches of four images, and the pixels, [24, 3, 32, 32]."""
    monkeypatch.setattr(cifar10, "RECORDS", 4)
    planes = np.random.default_rng(0).integers(0, 256, (24, 3, 32, 32), dtype=np.uint8)
    for i, name in enumerate(DATASETS["cifar10"].sha256):
        part = planes[4 * i : 4 * i + 4].reshape(4, -1)
        labels = np.full((4, 1), i, dtype=np.uint8)
        (tmp_path / f"{name}.bin").write_bytes(np.concatenate([labels, part], 1).tobytes())
    return tmp_path, planes


def test_digits_are_part_of_the_package():
    digits = m2s.data.load("digits")
    assert digits.train.shape == (1541, 64) and digits.test.shape == (256, 64) and digits.train.dtype == torch.uint8
    assert digits.train.max() == 16 and digits.test.max() == 16 and digits.vocab == 17
    assert digits.description == {"kind": "image", "shape": [8, 8], "levels": 17}
    assert digits.train_labels.bincount().min() > 140 and digits.test_labels.bincount().min() > 15
    DATASETS["digits"].verify(DATASETS["digits"].folder)
    assert "CC BY 4.0" in (DATASETS["digits"].folder / "digits.txt").read_text()


def test_mnist_plain_and_compressed(mnist, monkeypatch):
    plain = m2s.data.load("mnist", mnist)
    assert plain.train.shape == (5, 784) and plain.test_labels.shape == (3,) and plain.shape == (28, 28)
    for path in list(mnist.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    monkeypatch.setenv("M2S_DATA", str(mnist.parent))
    packed = m2s.data.load("mnist", mnist)
    with pytest.raises(BadData, match=r"train-images-idx3-ubyte.gz has SHA-256"):
        DATASETS["mnist"].verify(mnist)
    assert torch.equal(packed.train, plain.train) and torch.equal(packed.test_labels, plain.test_labels)
    with pytest.raises(BadData, match="train-images-idx3-ubyte"):
        m2s.data.load("mnist")  # the default folder below M2S_DATA is empty
    assert DATASETS["mnist"].folder == mnist.parent / "mnist"


def bad_idx(name, change):
    def break_(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return break_


@pytest.mark.parametrize(
    ("break_", "message"),
    [
        (lambda f: (f / "t10k-labels-idx1-ubyte").unlink(), ["t10k-labels-idx1-ubyte", "cvdf-datasets", "hub=True"]),
        (bad_idx("train-images-idx3-ubyte", lambda b: b""), ["train-images-idx3-ubyte", "empty"]),
        (bad_idx("train-images-idx3-ubyte", lambda b: b[:-1]), ["3,935 bytes", "3,936", "[5, 28, 28]"]),
        (bad_idx("train-images-idx3-ubyte", lambda b: b[:7]), ["magic number", "2051"]),
        (bad_idx("t10k-labels-idx1-ubyte", lambda b: b"\0\0\x08\x03" + b[4:]), ["00 00 08 03", "2049"]),
        (bad_idx("t10k-labels-idx1-ubyte", lambda b: b[:-1] + b"\x0a"), ["label 10"]),
        (lambda f: write_idx(f / "train-labels-idx1-ubyte", np.zeros(4)), ["4 labels", "5 images"]),
        (lambda f: write_idx(f / "train-images-idx3-ubyte", np.zeros((5, 27, 28))), ["[27, 28]", "[28, 28]"]),
        (
            lambda f: (f / "train-labels-idx1-ubyte").rename(f / "train-labels-idx1-ubyte.gz"),
            ["train-labels-idx1-ubyte.gz", "gzip"],
        ),
    ],
)
def test_errors_name_the_bad_mnist_file(mnist, break_, message):
    break_(mnist)
    with pytest.raises(BadData) as error:
        m2s.data.load("mnist", mnist)
    assert all(word in str(error.value) for word in message), error.value
    with pytest.raises(BadData):
        DATASETS["mnist"].verify(mnist)


def test_cifar_is_in_height_width_color_order(cifar):
    folder, planes = cifar
    images = m2s.data.load("cifar10", folder)
    assert images.train.shape == (20, 3072) and images.test_labels.tolist() == [5] * 4
    assert images.train_labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert torch.equal(images.train.reshape(-1, 32, 32, 3), torch.from_numpy(planes[:20]).permute(0, 2, 3, 1))
    (folder / "cifar-10-batches-bin").mkdir()
    for path in folder.glob("*.bin"):
        path.rename(folder / "cifar-10-batches-bin" / path.name)
    assert torch.equal(m2s.data.load("cifar10", folder).test, images.test)
    first = folder / "cifar-10-batches-bin" / "data_batch_1.bin"
    first.write_bytes(first.read_bytes()[:-3073])
    with pytest.raises(BadData, match=r"data_batch_1.bin holds 9,219 bytes, expected 12,292 .*cs.toronto.edu"):
        m2s.data.load("cifar10", folder)


class Python2(pickle._Pickler):
    """Writes bytes as Python 2 wrote strings, as in the original CIFAR-10 files."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_string(self, value):
        raw = value if isinstance(value, bytes) else value.encode("latin1")
        self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)

    dispatch[bytes] = dispatch[str] = save_string


@pytest.mark.parametrize("pickler", [Python2, pickle.Pickler])
def test_cifar_python_batches(cifar, pickler):
    folder, _ = cifar
    binary = m2s.data.load("cifar10", folder)
    for path in list(folder.glob("*.bin")):
        rows = np.frombuffer(path.read_bytes(), np.uint8).reshape(4, 3073)
        with path.with_suffix("").open("wb") as file:
            pickler(file, 2).dump({"data": rows[:, 1:].copy(), "labels": rows[:, 0].tolist(), "batch_label": "one"})
        path.unlink()
    assert torch.equal(m2s.data.load("cifar10", folder).train, binary.train)
    for bad in (b"", b"\x80", pickle.dumps([1]), pickle.dumps({"data": np.zeros((3, 3072), np.uint8), "labels": [0] * 3})):
        (folder / "test_batch").write_bytes(bad)
        with pytest.raises(BadData, match="test_batch"):
            m2s.data.load("cifar10", folder)


def test_a_python_batch_runs_no_code(cifar):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch hacked",)

    folder, _ = cifar
    (folder / "test_batch.bin").unlink()
    (folder / "test_batch").write_bytes(pickle.dumps({"data": Evil(), "labels": []}))
    with pytest.raises(BadData, match=r"it calls .*system, which is not allowed"):
        m2s.data.load("cifar10", folder)


def test_hub_images_are_downloaded_only_on_request(monkeypatch):
    with pytest.raises(UserError, match="digits, mnist, cifar10"):
        m2s.data.load("imagenet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install 'datasets>=4'"):
        m2s.data.load("mnist", hub=True)
    with pytest.raises(UserError, match="not on the hub"):
        m2s.data.load("digits", hub=True)
    split = {"image": [np.full((28, 28), 7, np.uint8)] * 2, "label": [1, 2]}
    given = []

    def load_dataset(name, config, **options):
        given.append(options)
        return {"train": split, "test": split}

    for version in ("3.6.0", "4.1.0"):
        fake = types.SimpleNamespace(load_dataset=load_dataset, __version__=version)
        monkeypatch.setitem(sys.modules, "datasets", fake)
        images = m2s.data.load("mnist", hub=True)
    assert given == [{"revision": None, "trust_remote_code": False}, {"revision": None}]  # no script of a repository runs
    assert images.train.shape == (2, 784) and (images.test == 7).all() and images.train_labels.tolist() == [1, 2]


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_real_images(name):
    entry = DATASETS[name]
    if entry.missing(entry.folder):
        pytest.skip(f"no {name} in {entry.folder}")
    images = entry.load()
    assert len(images.train) == {"mnist": 60_000, "cifar10": 50_000}[name] and len(images.test) == 10_000
    assert images.train_labels[:5].tolist() == {"mnist": [5, 0, 4, 1, 9], "cifar10": [6, 9, 9, 4, 1]}[name]
    assert images.test_labels.bincount().shape == (10,) and images.train.max() == 255
