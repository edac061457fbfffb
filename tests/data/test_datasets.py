"""Data: image files read or refused, text packed without loss and resumed to the byte, and one order for every reader."""

import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import multiprocessing
import os
import pickle
import random
import signal
import struct
import sys
import time
import types

import numpy as np
import pytest
import torch
import tyro

import m2s.data
from m2s.cli import parse
from m2s.cli.data import Data
from m2s.data import DATASETS, GPT2, BadData, Bytes, Characters, Tokenizer, Tokens, cifar10, shards, sources, text
from m2s.errors import UserError
from merges import write_merges

fork = multiprocessing.get_context("fork")
GOLDEN = [8, 6, 4, 1, 3, 9, 5, 2, 0, 7]


# images


def write_idx(path, array, magic=None):
    header = struct.pack(f">I{array.ndim}I", magic or 0x800 + array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def mnist(tmp_path):
    """Five train and three test images."""
    rng = np.random.default_rng(0)
    for split, n in (("train", 5), ("t10k", 3)):
        write_idx(tmp_path / f"{split}-images-idx3-ubyte", rng.integers(0, 256, (n, 28, 28)))
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte", rng.integers(0, 10, n))
    return tmp_path


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """Six batches of four images, and the planes they hold, [24, 3, 32, 32]."""
    monkeypatch.setattr(cifar10, "RECORDS", 4)
    planes = np.random.default_rng(0).integers(0, 256, (24, 3, 32, 32), dtype=np.uint8)
    for i, name in enumerate(DATASETS["cifar10"].sha256):
        part = planes[4 * i : 4 * i + 4].reshape(4, -1)
        labels = np.full((4, 1), i, dtype=np.uint8)
        (tmp_path / f"{name}.bin").write_bytes(np.concatenate([labels, part], 1).tobytes())
    return tmp_path, planes


def test_digits_are_inside_the_package():
    digits = m2s.data.load("digits")
    assert digits.train.shape == (1541, 64) and digits.test.shape == (256, 64) and digits.train.dtype == torch.uint8
    assert digits.train.max() == 16 and digits.test.max() == 16 and digits.vocab == 17
    assert digits.description == {"kind": "image", "shape": [8, 8], "levels": 17}
    assert digits.train_labels.bincount().min() > 140 and digits.test_labels.bincount().min() > 15
    DATASETS["digits"].verify(DATASETS["digits"].folder)
    assert "CC BY 4.0" in (DATASETS["digits"].folder / "digits.txt").read_text()


def test_mnist_plain_and_packed(mnist, monkeypatch):
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
        m2s.data.load("mnist")  # now below M2S_DATA, where nothing is
    assert DATASETS["mnist"].folder == mnist.parent / "mnist"


def bad_idx(name, change):
    def break_(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return break_


@pytest.mark.parametrize(
    ("break_", "said"),
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
def test_bad_mnist_is_named(mnist, break_, said):
    break_(mnist)
    with pytest.raises(BadData) as error:
        m2s.data.load("mnist", mnist)
    assert all(word in str(error.value) for word in said), error.value
    with pytest.raises(BadData):
        DATASETS["mnist"].verify(mnist)


def test_cifar_is_in_height_width_colour_order(cifar):
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
    """Writes bytes as Python 2 wrote its strings: what the original CIFAR-10 files hold."""

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
    with pytest.raises(BadData, match=r"asks for .*system"):
        m2s.data.load("cifar10", folder)


def test_hub_images_only_when_asked(monkeypatch):
    with pytest.raises(UserError, match="digits, mnist, cifar10"):
        m2s.data.load("imagenet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        m2s.data.load("mnist", hub=True)
    with pytest.raises(UserError, match="not on the hub"):
        m2s.data.load("digits", hub=True)
    split = {"image": [np.full((28, 28), 7, np.uint8)] * 2, "label": [1, 2]}
    fake = types.SimpleNamespace(load_dataset=lambda name, config, revision: {"train": split, "test": split})
    monkeypatch.setitem(sys.modules, "datasets", fake)
    images = m2s.data.load("mnist", hub=True)
    assert images.train.shape == (2, 784) and (images.test == 7).all() and images.train_labels.tolist() == [1, 2]


# text


def make_documents(n, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choices("ab c\néß€\U0001f600", k=rng.randint(1, 60))) + "x" for _ in range(n)]


@pytest.fixture
def corpus(tmp_path):
    """A folder of every kind of file, and the documents of each split when every 10th is for validation."""
    folder = tmp_path / "corpus"
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
    expected = {"train": [], "validation": [], "test": d}
    for documents in (a, b, alone):
        for i, x in enumerate(documents):
            expected["train" if i % 10 else "validation"].append(x)
    return folder, expected


def prepare(source, out, tokenizer=None, **options):
    options = {"validation_every": 10, "shard_tokens": 500} | options
    return m2s.data.prepare_text(source, out, tokenizer or Bytes(), **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def unpack(folder, split, tokenizer):
    """All documents of a split: shards concatenated, cut at the separators, decoded."""
    entry = json.loads((folder / "meta.json").read_text())["splits"][split]
    ids = np.concatenate([np.fromfile(folder / shard["file"], "<u2") for shard in entry["shards"]])
    assert len(ids) == entry["tokens"] and ids[-1] == tokenizer.end
    documents = np.split(ids, np.flatnonzero(ids == tokenizer.end) + 1)[:-1]
    assert len(documents) == entry["documents"]
    return [tokenizer.decode(document[:-1].tolist()) for document in documents]


def test_packing_loses_nothing(corpus, tmp_path):
    folder, expected = corpus
    meta = prepare(folder, tmp_path / "out")
    for split, documents in expected.items():
        assert unpack(tmp_path / "out", split, Bytes()) == documents
        assert meta["splits"][split]["tokens"] == sum(len(x.encode()) + 1 for x in documents)
    assert [source["name"] for source in meta["sources"]][:4] == ["a.txt", "b.jsonl", "d-test.txt", "sub/00.txt"]
    assert meta["counts"]["b.jsonl"]["blank"] == 2 and meta["counts"]["a.txt"]["documents"] == 35
    assert all(shard["tokens"] == 500 for shard in meta["splits"]["train"]["shards"][:-1])
    assert sorted(contents(tmp_path / "out")) == sorted(
        ["meta.json", *(shard["file"] for entry in meta["splits"].values() for shard in entry["shards"])]
    )
    assert m2s.data.check_text(tmp_path / "out") == meta
    before = contents(tmp_path / "out")
    assert prepare(folder, tmp_path / "out") == meta and contents(tmp_path / "out") == before
    prepare(folder, tmp_path / "again")
    assert contents(tmp_path / "again") == before


def test_parquet(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    documents = make_documents(2500)
    pq.write_table(pa.table({"id": range(2501), "text": [*documents, None]}), tmp_path / "a.parquet", row_group_size=700)
    prepare(tmp_path / "a.parquet", tmp_path / "out", validation_every=0, shard_tokens=2**20)
    assert unpack(tmp_path / "out", "train", Bytes()) == documents
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-100])
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    for name, said in (("a", "not a whole parquet"), ("b", "columns body, expected 'text'")):
        with pytest.raises(BadData, match=said):
            prepare(tmp_path / f"{name}.parquet", tmp_path / name)


def test_characters_have_no_separator(tmp_path):
    (tmp_path / "a.txt").write_text("abc\n<|endoftext|>\nb a\n")
    meta = prepare(tmp_path / "a.txt", tmp_path / "out", Characters("abc "), validation_every=0)
    assert np.fromfile(tmp_path / "out" / "train-00000.bin", "<u2").tolist() == [0, 1, 2, 1, 3, 0]
    assert meta["end"] is None and Tokens(tmp_path / "out", "train", 2).tokenizer == Characters("abc ")
    (tmp_path / "a.txt").write_text("abc\n<|endoftext|>\nb\n\nd\n")
    with pytest.raises(BadData, match=r"a\.txt, document at line 3 cannot be encoded: .*alphabet"):
        prepare(tmp_path / "a.txt", tmp_path / "out2", Characters("abc "), validation_every=0)


def stream(folder, split):
    """All tokens of a split, in the order of its files."""
    return [i for path in sorted(folder.glob(f"{split}-*.bin")) for i in np.fromfile(path, "<u2").tolist()]


@pytest.mark.parametrize("every", [2, 3, 10, 100, 10**6])
@pytest.mark.parametrize("size", [2, 9, 10, 99, 100, 101, 1234])
def test_one_document_is_cut_and_loses_nothing(tmp_path, every, size):
    """Its last ceil(n / every) tokens are validation; with the end token n = size + 1."""
    raw = bytes(random.Random(size).choices(b"abc\n ", k=size - 1)) + b"x"
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_bytes(raw)
    (tmp_path / "one" / "b.txt").write_bytes(b" \n<|endoftext|>\n\n")  # blank, so not counted
    (tmp_path / "one" / "c-test.txt").write_bytes(b"held out\n<|endoftext|>\nand more")  # of another split, so not either
    meta = prepare(tmp_path / "one", tmp_path / "out", validation_every=every, shard_tokens=7)
    train, validation, n = stream(tmp_path / "out", "train"), stream(tmp_path / "out", "validation"), size + 1
    assert train + validation == [*raw, 256] and len(validation) == (n + every - 1) // every
    assert {split: entry["tokens"] for split, entry in meta["splits"].items()} == {
        "train": len(train),
        "validation": len(validation),
        "test": 18,
    }
    assert [entry["documents"] for entry in meta["splits"].values()] == [1, 0, 2]
    assert meta["counts"]["a.txt"] == {"documents": 1, "blank": 0, "tokens": n}
    assert m2s.data.check_text(tmp_path / "out") == meta


def test_a_second_document_is_not_cut(tmp_path):
    """Nor is any with --validation-every 0; and blank documents do not make a file one of several."""
    (tmp_path / "two").mkdir()
    for name, raw in (("a.txt", "one\n<|endoftext|>\n\n"), ("b.txt", "\n<|endoftext|>\ntwo"), ("c.txt", "three")):
        (tmp_path / "two" / name).write_text(raw)
    prepare(tmp_path / "two", tmp_path / "out", validation_every=2)
    assert unpack(tmp_path / "out", "validation", Bytes()) == ["one", "three"]
    assert unpack(tmp_path / "out", "train", Bytes()) == ["two"]
    prepare(tmp_path / "two" / "c.txt", tmp_path / "whole", validation_every=0)
    assert unpack(tmp_path / "whole", "train", Bytes()) == ["three"] and not stream(tmp_path / "whole", "validation")


def test_what_cannot_be_encoded_leaves_nothing_unless_a_part_was_packed(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("abc\n<|endoftext|>\nabd\n")
    out, way_out = tmp_path / "out", r"not in the alphabet.* --alphabet, or take --tokenizer bytes"
    with pytest.raises(BadData, match=way_out) as error:
        prepare(tmp_path / "a.txt", out, Characters("abc"))
    assert contents(out) == {} and str(out) not in str(error.value)
    with pytest.raises(BadData, match="no prepared text"):
        Tokens(out, "train", 1)
    prepare(tmp_path / "a.txt", out, Characters("abcd"))  # mended, into the same folder
    assert stream(out, "validation") == [0, 1, 2] and stream(out, "train") == [0, 1, 3]

    monkeypatch.setattr(text, "COMMIT_SECONDS", 0.0)
    kept = tmp_path / "kept"
    for _ in range(2):  # the same command says the same again
        with pytest.raises(BadData, match=rf"{way_out}. {kept} keeps what was packed .* delete it or give another folder"):
            prepare(tmp_path / "a.txt", kept, Characters("abc"))
    assert "progress.json" in contents(kept)
    with pytest.raises(BadData, match=r"not finished: .* goes on or says what stopped it, or delete the folder"):
        Tokens(kept, "train", 1)
    with pytest.raises(UserError, match=r"different preparation .* give another folder, or delete it"):
        prepare(tmp_path / "a.txt", kept, Characters("abcd"))


def test_hub_text(tmp_path, monkeypatch):
    class Rows(list):
        column_names, _fingerprint = ("text",), "f"

    data = {split: Rows({"text": f"{split} {i}"} for i in range(25)) for split in ("train", "test")}
    calls = []
    fake = types.SimpleNamespace(load_dataset=lambda *given, **more: calls.append((given, more)) or data)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    meta = prepare("lm1b", tmp_path / "out")
    assert calls == [(("billion-word-benchmark/lm1b", None), {"revision": "refs/convert/parquet"})]
    assert unpack(tmp_path / "out", "validation", Bytes()) == ["train 0", "train 10", "train 20"]
    assert {split: entry["documents"] for split, entry in meta["splits"].items()} == {"train": 22, "validation": 3, "test": 25}
    data["validation"] = Rows([{"text": "own"}])
    prepare("some/thing", tmp_path / "own")
    assert unpack(tmp_path / "own", "validation", Bytes()) == ["own"]


@dataclasses.dataclass(frozen=True)
class Slow(Bytes):
    def encode(self, text):
        time.sleep(0.001)
        return super().encode(text)


@pytest.fixture
def eager(monkeypatch):
    """Progress is written after every document."""
    monkeypatch.setattr(text, "COMMIT_SECONDS", 0.0)


def kill_until_done(*arguments):
    """Prepare in processes that are killed later and later, until one has done all; how many were killed."""
    out, rng, killed = arguments[1], random.Random(0), 0
    for attempt in range(200):
        child = fork.Process(target=prepare, args=arguments)
        child.start()
        child.join(rng.uniform(0, 0.02 * attempt))
        if child.exitcode is None:
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        if (out / "meta.json").exists():  # written last
            break
        assert child.exitcode != 0
        with pytest.raises(BadData, match=r"not finished|no prepared text"):
            Tokens(out, "train", 8)
    prepare(*arguments)  # the last may have been killed when all was in place, before it had tidied up
    return killed


def test_killed_at_random_moments_the_result_is_the_same(corpus, tmp_path, eager):
    folder, _ = corpus
    prepare(folder, tmp_path / "whole", Slow())
    assert kill_until_done(folder, tmp_path / "out", Slow()) >= 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_one_document_killed_at_random_moments_gives_the_same_result(tmp_path, eager, monkeypatch):
    """Writing takes a while, so that a process is killed between the files of the document too."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("".join(make_documents(60)))
    (tmp_path / "one" / "b-test.txt").write_text("held out")
    prepare(tmp_path / "one", tmp_path / "whole")
    append = shards.Shards.append

    def slow(self, ids):
        for part in np.array_split(ids, max(1, len(ids) // 40)):
            append(self, part)
            self.flush()
            time.sleep(0.001)

    monkeypatch.setattr(shards.Shards, "append", slow)
    assert kill_until_done(tmp_path / "one", tmp_path / "out") >= 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("name", ["fsync", "replace", "truncate", "unlink"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("separator", ["\n<|endoftext|>\n", "\n"], ids=["documents", "one"])
def test_killed_at_every_call_the_result_is_the_same(tmp_path, eager, name, after, separator):
    source, options = tmp_path / "a.txt", {"validation_every": 3, "shard_tokens": 50}
    source.write_text(separator.join(make_documents(5)))
    prepare(source, tmp_path / "whole", **options)
    real = getattr(os, name)

    def dying(out, fatal):
        count = itertools.count()

        def call(*given, **more):
            now = next(count)
            result = real(*given, **more) if now != fatal or after else None
            if now == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(os, name, call)
        prepare(source, out, **options)

    for fatal in itertools.count():
        out = tmp_path / f"out{fatal}"
        child = fork.Process(target=dying, args=(out, fatal))
        child.start()
        child.join()
        finished = child.exitcode == 0
        prepare(source, out, **options)
        assert contents(out) == contents(tmp_path / "whole"), fatal
        if finished:
            break
    assert fatal > 0 or name in ("truncate", "unlink")


def test_a_different_or_foreign_folder_is_refused(corpus, tmp_path):
    folder, _ = corpus
    out = tmp_path / "out"
    prepare(folder, out)
    before = contents(out)
    (folder / "a.txt").write_text("changed\n")
    for options, said in (({}, "a.txt"), ({"validation_every": 7}, "validation_every: 10 there, 7 now")):
        with pytest.raises(UserError, match=said):
            prepare(folder, out, **options)
    with pytest.raises(UserError, match=r"different preparation .tokenizer"):
        prepare(folder, out, Characters())
    assert contents(out) == before
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        prepare(folder, tmp_path / "foreign")
    assert contents(tmp_path / "foreign") == {"thesis.tex": b"mine"}


def test_two_processes_do_not_share_a_folder(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    with text._alone(tmp_path / "out"), pytest.raises(UserError, match="another process"):
        prepare(corpus[0], tmp_path / "out")


@dataclasses.dataclass(frozen=True)
class Odd(Tokenizer):
    vocab: int = 10
    end: int = 9
    ids: tuple[int, ...] = (1,)

    def encode(self, text):
        return list(self.ids)

    def decode(self, ids):
        return str(ids)


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (Odd(vocab=70_000), "70,000 tokens.*uint16"),
        (Odd(end=10), "end token is 10"),
        (Odd(ids=(1, 10)), r"a\.txt, document at line 1 encodes to ids from 1 to 10, but the vocabulary is 0\.\.9"),
        (Odd(ids=(-1,)), "ids from -1"),
        (Odd(ids=(3, 9)), "end-of-text token 9 itself"),
        (GPT2("/nowhere"), "GPT-2's merges are not at"),
    ],
)
def test_a_bad_tokenizer_is_refused(corpus, tmp_path, tokenizer, said):
    with pytest.raises(UserError, match=said):
        prepare(corpus[0], tmp_path / "out", tokenizer)


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("a.txt", b"fine\n\ncaf\xe9\n", r"a\.txt, line 3: byte 0xe9 at column 4 is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2: not JSON"),
        (
            "a.jsonl",
            b'{"body": "x", "n": 1}\n',
            "a.jsonl, line 1: no field 'text', but body, n: say .* prepare --text-field NAME$",
        ),
        ("a.jsonl", b'{"text": 1}\n', "line 1: expected an object whose field 'text'"),
        ("a.jsonl", b"{}", "line 1: expected an object whose field 'text'"),
        ("a.jsonl", b'\n["text"]\n', "line 2: expected an object"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: 'text' is not valid Unicode"),
        ("a.parquet", b"PAR1", r"parquet"),
        ("a.txt", b"\n \n", r"a\.txt holds no text: it is empty, or white space alone$"),
        ("a.txt", b"", r"a\.txt holds no text"),
        ("a.jsonl", b'{"text": " "}\n', r"a\.jsonl holds no text"),
        ("a.doc", b"word", "must end in .txt"),
    ],
)
def test_bad_text_is_named(tmp_path, name, raw, said):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError, match=said):
        prepare(tmp_path / name, tmp_path / "out")
    if "line 2: not JSON" not in said:  # found before any work
        assert not (tmp_path / "out").exists()


def test_the_text_is_in_the_field_that_is_named(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    documents = make_documents(12)
    folder, out = tmp_path / "texts", tmp_path / "out"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": "not this", "body": x}) + "\n" for x in documents))
    pq.write_table(pa.table({"body": documents, "text": [1] * 12}), folder / "b.parquet")
    prepare(folder, out, text_field="body")
    assert unpack(out, "validation", Bytes()) == 2 * documents[::10]
    assert unpack(out, "train", Bytes()) == 2 * [x for i, x in enumerate(documents) if i % 10]
    with pytest.raises(UserError, match=r"different preparation .sources: .*\"field\": \"body\""):
        prepare(folder / "a.jsonl", out)
    with pytest.raises(BadData, match=r"has columns body, text, expected 'title': say .* --text-field NAME"):
        prepare(folder / "b.parquet", tmp_path / "title", text_field="title")
    (tmp_path / "a.txt").write_text("plain")
    with pytest.raises(UserError, match=r"a\.txt is plain \.txt, which has no fields: leave out --text-field"):
        prepare(tmp_path / "a.txt", tmp_path / "plain", text_field="body")
    assert not (tmp_path / "plain").exists() and not (tmp_path / "title").exists()


def test_the_merges_are_kept_with_the_tokens(tmp_path, monkeypatch):
    """Wherever they were given, the tokens can be read without them: here, in another place, and from a checkpoint."""
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    given, out = write_merges(tmp_path / "given.txt"), tmp_path / "out"
    (tmp_path / "a.txt").write_text("some words " * 9)
    said = command("prepare", tmp_path / "a.txt", "--out", out, "--merges", given, "--validation-every", "5")
    assert "50,257 tokens" in said
    given.unlink()
    meta = m2s.data.check_text(out)
    assert meta["tokenizer"] == {"kind": "GPT2"} and meta["tokenizer_file"]["file"] == "merges.txt"
    moved = out.rename(tmp_path / "moved")
    tokens = Tokens(moved, "train", 8)
    assert tokens.tokenizer.decode(tokens[0].tolist()) == "some words so"
    assert tokens.description["tokenizer"] == {"kind": "GPT2"}
    changed = (moved / "merges.txt").read_bytes()[:-1]
    (moved / "merges.txt").write_bytes(changed)
    with pytest.raises(BadData, match=r"merges\.txt has SHA-256"):
        m2s.data.check_text(moved)
    with pytest.raises(
        UserError, match=r"not at \S+data/gpt2: put .*\. --merges FILE says where the merges are; --tokenizer bytes"
    ):
        command("prepare", tmp_path / "a.txt", "--out", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    write_merges(given)
    with pytest.raises(UserError, match="all text went to validation"):
        prepare(tmp_path / "a.txt", tmp_path / "none", GPT2(str(given)), validation_every=1)
    assert contents(tmp_path / "none") == {}


@pytest.mark.parametrize(("raw", "tokenizer", "every"), [("a\n<|endoftext|>\nb", Bytes(), 1), ("a", Characters("ab"), 2)])
def test_nothing_left_to_train_on_is_refused(tmp_path, raw, tokenizer, every):
    (tmp_path / "a.txt").write_text(raw)
    with pytest.raises(
        UserError, match=f"--validation-every {every} all text went to validation .* greater one .* or more text"
    ):
        prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer, validation_every=every)
    assert contents(tmp_path / "out") == {}


def test_no_source_and_no_room(corpus, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadData, match=r"holds no file that ends in \.txt"):
        prepare(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(UserError, match="openwebtext, lm1b, text8"):
        prepare(tmp_path / "nowhere", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(text.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=100))
        with pytest.raises(UserError, match=r"disk has 0\.00 GB left"):
            prepare(corpus[0], tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(shards.Shards, "flush", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(UserError, match="disk is full"):
            prepare(corpus[0], tmp_path / "out")
    prepare(corpus[0], tmp_path / "out")
    assert m2s.data.check_text(tmp_path / "out")["splits"]["test"]["documents"] == 13


# readers


def test_windows_are_the_stream(corpus, tmp_path):
    meta = prepare(corpus[0], tmp_path / "out", shard_tokens=37)
    tokens = Tokens(tmp_path / "out", "train", 50, verify=True)  # longer than a file
    stream = np.concatenate([np.fromfile(tmp_path / "out" / s["file"], "<u2") for s in meta["splits"]["train"]["shards"]])
    assert len(tokens) == len(stream) // 50 and tokens.vocab == 257
    assert np.array_equal(np.concatenate(list(tokens)), stream[: len(tokens) * 50])
    assert tokens[3].dtype == torch.int64 and torch.equal(tokens[torch.tensor([3, 1])], torch.stack([tokens[3], tokens[1]]))
    assert torch.equal(pickle.loads(pickle.dumps(tokens))[2], tokens[2]) and len(pickle.dumps(tokens)) < 1000
    assert tokens.description == {"kind": "text", "length": 50, "vocab": 257, "tokenizer": {"kind": "Bytes"}}
    for index in (-1, len(tokens)):
        with pytest.raises(IndexError, match=f"index is {index}"):
            tokens[index]


def test_bad_folders_are_named_at_opening(corpus, tmp_path):
    out = tmp_path / "out"
    prepare(corpus[0], out)
    for arguments, said in (
        (("dev", 8), "train, validation, test"),
        (("train", 0), "length"),
        (("train", 10**6), r"too few .*: take a smaller length .m2s train: --data\.length., or take more text and prepare"),
        (("validation", 10**6), "or take more text or a --validation-every below 10 and prepare"),
        (("test", 10**6), "too few .* in files whose names --test matches, and prepare"),
    ):
        with pytest.raises(ValueError, match=said):
            Tokens(out, *arguments)
    prepare(corpus[0], tmp_path / "none", validation_every=0)
    with pytest.raises(BadData, match=r"validation holds 0 tokens, too few .* --validation-every 100 or so \(it was 0\)"):
        Tokens(tmp_path / "none", "validation", 8)
    shard, raw = out / "train-00001.bin", (out / "train-00001.bin").read_bytes()
    shard.write_bytes(raw[:-2])
    with pytest.raises(BadData, match=r"train-00001.bin holds 998 bytes, expected 1,000"):
        Tokens(out, "train", 8)
    shard.write_bytes(raw[:-2] + b"\1\0")
    Tokens(out, "train", 8)
    with pytest.raises(BadData, match=r"train-00001.bin has SHA-256"):
        Tokens(out, "train", 8, verify=True)
    shard.unlink()
    with pytest.raises(BadData, match=r"train-00001.bin is missing"):
        Tokens(out, "train", 8)
    for raw_meta, said in ((b"{", "damaged"), (b'{"format": "other", "splits": {}}', "format 'other'"), (b"[]", "damaged")):
        (out / "meta.json").write_bytes(raw_meta)
        with pytest.raises(BadData, match=said):
            Tokens(out, "train", 8)
    with pytest.raises(BadData, match="no prepared text"):
        Tokens(tmp_path / "nowhere", "train", 8)
    with pytest.raises(BadData, match=r"`m2s data prepare text8 --out \S+/text8 --tokenizer chars`"):
        Tokens(tmp_path / "text8", "train", 8)


# order


@pytest.mark.parametrize("size", [*range(1, 35), 1000, 4097])
def test_every_epoch_is_a_permutation(size):
    epochs = m2s.data.batch_indices(size, 3 * size, 0, seed=1).reshape(3, size)
    assert torch.equal(epochs.sort(1).values, torch.arange(size).expand(3, size))
    if size > 10:
        assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[0], torch.arange(size))
        assert not torch.equal(epochs[0], m2s.data.batch_indices(size, size, 0, seed=2))


def test_the_order_depends_on_seed_and_step_alone():
    whole = m2s.data.batch_indices(100, 12 * 30, 0, seed=5).reshape(30, 12)
    for start, world in ((0, 1), (17, 1), (3, 2), (8, 3), (29, 12)):
        readers = [m2s.data.batches(100, 12, seed=5, start=start, rank=rank, world=world) for rank in range(world)]
        for step in range(start, 30):
            assert torch.equal(torch.cat([next(reader) for reader in readers]), whole[step])
    assert m2s.data.batch_indices(10, 10, 0, seed=0).tolist() == GOLDEN  # a run is resumed by a later version too
    huge = m2s.data.batch_indices(10**12, 8, 10**11, seed=3)
    assert len(huge.unique()) == 8 and huge.min() >= 0 and huge.max() < 10**12


def test_every_item_is_as_likely_everywhere():
    orders = torch.stack([m2s.data.batch_indices(6, 6, 0, seed=seed) for seed in range(1800)])
    counts = torch.nn.functional.one_hot(orders, 6).sum(0)  # [position, item], 300 each
    assert (counts - 300).abs().max() < 5 * (1800 * 5 / 36) ** 0.5
    pairs = torch.bincount(6 * orders[:, 0] + orders[:, 1], minlength=36).reshape(6, 6)
    assert pairs.diagonal().sum() == 0 and (pairs[~torch.eye(6).bool()] - 60).abs().max() < 40


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 1, 0), "size"),
        ((5, 0, 0), "global_batch"),
        ((5, 4, -1), "step"),
        ((5, 4, 0, -1), "seed"),
        ((5, 4, 0, 0, 2, 2), "rank"),
        ((5, 4, 0, 0, 0, 3), "multiple of world = 3"),
    ],
)
def test_bad_orders_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        m2s.data.batch_indices(*arguments)


# the command


def command(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        tyro.cli(Data, args=[str(argument) for argument in arguments]).run()
    return out.getvalue()


def test_command(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("M2S_DATA", str(tmp_path))
    out = tmp_path / "packed"
    said = command("prepare", corpus[0], "--out", out, "--tokenizer", "bytes", "--validation-every", "10")
    assert "documents" in said and "13" in said and str(out) in said
    assert said.splitlines()[-1] == f"m2s train owt --data.folder {out} --out runs/packed"
    none = command("prepare", corpus[0], "--out", tmp_path / "none", "--tokenizer", "bytes", "--validation-every", "0")
    assert none.splitlines()[-1] == f"m2s evaluate bpd RUN --data {tmp_path / 'none'}"
    assert "every file" in command("check", out) and "1,541 train and 256 test" in command("check", "digits")
    listed = command("list")
    assert "here     digits" in listed and "missing  mnist" in listed and str(out) in listed and "openwebtext" in listed
    assert "is one document" not in said
    (tmp_path / "one.txt").write_text("x" * 1049)
    said = command("prepare", tmp_path / "one.txt", "--out", tmp_path / "one", "--tokenizer", "bytes")
    assert "the text is one document: its last 11 tokens, one in 100, are validation" in said
    assert "its last 11 tokens" in command("check", tmp_path / "one")
    assert said.splitlines()[-1] == f"m2s train owt --data.folder {tmp_path / 'one'} --data.length 8 --out runs/one"
    preset = parse(said.splitlines()[-1].split()[1:]).preset
    assert len(Tokens(preset.data.folder, "validation", preset.data.length)) == 1
    (out / "test-00000.bin").write_bytes(b"xx")
    for arguments, word in (
        (("check", out), "test-00000.bin"),
        (("check", "cifar10"), "data_batch_1.bin"),
        (("prepare", corpus[0], "--out", out, "--tokenizer", "words"), "gpt2, bytes, chars"),
        (("prepare", corpus[0], "--out", out, "--tokenizer", "bytes", "--alphabet", "ab"), "--alphabet is for"),
        (("prepare", corpus[0], "--out", out, "--tokenizer", "chars", "--alphabet", "aa"), "alphabet"),
        (("prepare", corpus[0], "--out", out, "--shard-tokens", "0"), "--shard-tokens"),
        (("prepare", corpus[0], "--out", out, "--validation-every", "-1"), "--validation-every"),
    ):
        with pytest.raises(UserError, match=word):
            command(*arguments)


# the real files, where they are


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_real_images(name):
    entry = DATASETS[name]
    if entry.missing(entry.folder):
        pytest.skip(f"no {name} in {entry.folder}")
    images = entry.load()
    assert len(images.train) == {"mnist": 60_000, "cifar10": 50_000}[name] and len(images.test) == 10_000
    assert images.train_labels[:5].tolist() == {"mnist": [5, 0, 4, 1, 9], "cifar10": [6, 9, 9, 4, 1]}[name]
    assert images.test_labels.bincount().shape == (10,) and images.train.max() == 255


def test_real_text(tmp_path):
    pytest.importorskip("tiktoken")
    source, merges = m2s.data.root() / "text" / "imdb-test.txt", m2s.data.root() / "gpt2"
    if not source.exists() or not merges.exists():
        pytest.skip("no text or no GPT-2 merges")
    documents = [document.text for document in itertools.islice(sources.read_txt(source), 250)]
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    prepare(tmp_path / "a.txt", tmp_path / "out", GPT2(), validation_every=100, shard_tokens=2**20)
    assert unpack(tmp_path / "out", "validation", GPT2()) == documents[::100]
    assert unpack(tmp_path / "out", "train", GPT2()) == [x for i, x in enumerate(documents) if i % 100]
