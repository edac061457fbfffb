"""Packing text: nothing is lost, documents go to their splits, and errors name the file and the line."""

import dataclasses
import itertools
import json
import sys
import types

import numpy as np
import pytest

import m2s.data
from m2s.data import GPT2, BadData, Bytes, Characters, Tokenizer, Tokens, pack, shards, text
from m2s.data.documents import read_txt
from m2s.errors import UserError
from packed_text import contents, divide, encoded, make_documents, prepare, stream, unpack


def test_packing_loses_nothing(corpus, tmp_path):
    folder, expected = corpus
    meta = prepare(folder, tmp_path / "out")
    documents = [encoded(x) for x in expected["divided"]]
    for split, ids in divide(documents, 10, round(sum(map(len, documents)) / 10)).items():
        assert stream(tmp_path / "out", split) == ids and meta["splits"][split]["tokens"] == len(ids)
    assert unpack(tmp_path / "out", "test", Bytes()) == expected["test"]
    assert sum(meta["splits"][split]["documents"] for split in ("train", "validation")) == len(documents)
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
    prepare(tmp_path / "a.parquet", tmp_path / "out", validation_fraction=0.0, shard_tokens=2**20)
    assert unpack(tmp_path / "out", "train", Bytes()) == documents
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-100])
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    for name, message in (("a", "not a complete parquet"), ("b", "columns body, expected 'text'")):
        with pytest.raises(BadData, match=message):
            prepare(tmp_path / f"{name}.parquet", tmp_path / name)


def test_characters_have_no_separator(tmp_path):
    (tmp_path / "a.txt").write_text("abc\n<|endoftext|>\nb a\n")
    meta = prepare(tmp_path / "a.txt", tmp_path / "out", Characters("abc "), validation_fraction=0.0)
    assert np.fromfile(tmp_path / "out" / "train-00000.bin", "<u2").tolist() == [0, 1, 2, 1, 3, 0]
    assert meta["end"] is None and Tokens(tmp_path / "out", "train", 2).tokenizer == Characters("abc ")
    (tmp_path / "a.txt").write_text("abc\n<|endoftext|>\nb\n\nd\n")
    with pytest.raises(BadData, match=r"a\.txt, document at line 3 cannot be encoded: .*alphabet"):
        prepare(tmp_path / "a.txt", tmp_path / "out2", Characters("abc "), validation_fraction=0.0)


def test_text_that_cannot_be_encoded_leaves_an_empty_folder_unless_a_part_was_packed(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("abc\n<|endoftext|>\nabd\n")
    out, way_out = tmp_path / "out", r"not in the alphabet.* --alphabet, or take --tokenizer bytes"
    with pytest.raises(BadData, match=way_out) as error:
        prepare(tmp_path / "a.txt", out, Characters("abc"))
    assert contents(out) == {} and str(out) not in str(error.value)
    with pytest.raises(BadData, match="no prepared text"):
        Tokens(out, "train", 1)
    prepare(tmp_path / "a.txt", out, Characters("abcd"))  # corrected, into the same folder
    assert stream(out, "train") == [0, 1, 2, 0, 1] and stream(out, "validation") == [3]

    monkeypatch.setattr(pack, "COMMIT_SECONDS", 0.0)
    kept = tmp_path / "kept"
    for _ in range(2):  # the same command gives the same error again
        with pytest.raises(BadData, match=rf"{way_out}. {kept} keeps what was packed .* delete it or give another folder"):
            prepare(tmp_path / "a.txt", kept, Characters("abc"))
    assert "progress.json" in contents(kept)
    path = kept / "progress.json"
    good = json.loads(path.read_text())
    path.write_text(json.dumps(good | {"document": good["document"] + 1}))  # possible, but not what was written
    with pytest.raises(BadData, match=r"its SHA-256 differs"):
        prepare(tmp_path / "a.txt", kept, Characters("abc"))
    path.write_text(json.dumps({name: value for name, value in good.items() if name != "sha256"}))  # as version 0.1 writes it
    with pytest.raises(BadData, match=way_out):
        prepare(tmp_path / "a.txt", kept, Characters("abc"))
    with pytest.raises(BadData, match=r"not finished: .* resumes or reports what stopped it, or delete the folder"):
        Tokens(kept, "train", 1)
    with pytest.raises(UserError, match=r"different preparation .* give another folder, or delete it"):
        prepare(tmp_path / "a.txt", kept, Characters("abcd"))


def test_hub_text(tmp_path, monkeypatch):
    class HubTexts(list):
        column_names, _fingerprint = ("text",), "f"

    data = {split: HubTexts({"text": f"{split} {i}"} for i in range(25)) for split in ("train", "test")}
    calls = []
    fake = types.SimpleNamespace(load_dataset=lambda *given, **more: calls.append((given, more)) or data, __version__="4.0.0")
    monkeypatch.setitem(sys.modules, "datasets", fake)
    meta = prepare("lm1b", tmp_path / "out")
    assert calls == [(("billion-word-benchmark/lm1b", None), {"revision": "refs/convert/parquet"})]
    rows = [encoded(f"train {i}") for i in range(25)]
    expected = divide(rows, 10, round(sum(map(len, rows)) / 10))
    assert expected == {split: stream(tmp_path / "out", split) for split in ("train", "validation")}
    assert meta["splits"]["test"]["documents"] == 25
    data["validation"] = HubTexts([{"text": "own"}])
    prepare("some/thing", tmp_path / "own")
    assert unpack(tmp_path / "own", "validation", Bytes()) == ["own"]


def test_a_folder_with_other_contents_is_rejected(corpus, tmp_path):
    folder, _ = corpus
    out = tmp_path / "out"
    prepare(folder, out)
    before = contents(out)
    (folder / "a.txt").write_text("changed\n")
    for options, message in (({}, "a.txt"), ({"validation_fraction": 0.143}, "validation_fraction: 0.1 there, 0.143 now")):
        with pytest.raises(UserError, match=message):
            prepare(folder, out, **options)
    with pytest.raises(UserError, match=r"different preparation .tokenizer"):
        prepare(folder, out, Characters())
    assert contents(out) == before
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        prepare(folder, tmp_path / "foreign")
    assert contents(tmp_path / "foreign") == {"thesis.tex": b"mine"}


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
    ("tokenizer", "message"),
    [
        (Odd(vocab=2**31 + 1), "2,147,483,649 tokens, but at most"),
        (Odd(end=10), "end token is 10"),
        (Odd(ids=(1, 10)), r"a\.txt, document at line 1 encodes to ids from 1 to 10, but the vocabulary is 0\.\.9"),
        (Odd(ids=(-1,)), "ids from -1"),
        (Odd(ids=(3, 9)), "end-of-text token 9 itself"),
        (GPT2("/nowhere"), "GPT-2's merges are not at"),
    ],
)
def test_an_invalid_tokenizer_is_rejected(corpus, tmp_path, tokenizer, message):
    with pytest.raises(UserError, match=message):
        prepare(corpus[0], tmp_path / "out", tokenizer)


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("a.txt", b"fine\n\ncaf\xe9\n", r"a\.txt, line 3: byte 0xe9 at column 4 is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2: not JSON"),
        (
            "a.jsonl",
            b'{"body": "x", "n": 1}\n',
            "a.jsonl, line 1: no field 'text', but body, n: name .* prepare --text-field NAME$",
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
def test_errors_name_the_line_of_bad_text(tmp_path, name, raw, message):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / name, tmp_path / "out")
    if "line 2: not JSON" not in message:  # found before any work
        assert not (tmp_path / "out").exists()


def test_the_text_field_option(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    documents = make_documents(12)
    folder, out = tmp_path / "texts", tmp_path / "out"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": "not this", "body": x}) + "\n" for x in documents))
    pq.write_table(pa.table({"body": documents, "text": [1] * 12}), folder / "b.parquet")
    prepare(folder, out, text_field="body")
    tokens = 2 * [encoded(x) for x in documents]
    expected = divide(tokens, 10, round(sum(map(len, tokens)) / 10))
    assert expected == {split: stream(out, split) for split in ("train", "validation")}
    with pytest.raises(UserError, match=r"different preparation .sources: .*\"field\": \"body\""):
        prepare(folder / "a.jsonl", out)
    with pytest.raises(BadData, match=r"has columns body, text, expected 'title': name .* --text-field NAME"):
        prepare(folder / "b.parquet", tmp_path / "title", text_field="title")
    (tmp_path / "a.txt").write_text("plain")
    with pytest.raises(UserError, match=r"a\.txt is plain \.txt, which has no fields: leave out --text-field"):
        prepare(tmp_path / "a.txt", tmp_path / "plain", text_field="body")
    assert not (tmp_path / "plain").exists() and not (tmp_path / "title").exists()


def test_no_source_and_a_full_disk(corpus, tmp_path, monkeypatch):
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


def test_real_text(tmp_path):
    pytest.importorskip("tiktoken")
    source, merges = m2s.data.root() / "text" / "imdb-test.txt", m2s.data.root() / "gpt2"
    if not source.exists() or not merges.exists():
        pytest.skip("no text or no GPT-2 merges")
    texts = [document.text for document in itertools.islice(read_txt(source), 250)]
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    prepare(tmp_path / "a.txt", tmp_path / "out", GPT2(), validation_fraction=0.0, shard_tokens=2**20)
    assert unpack(tmp_path / "out", "train", GPT2()) == texts
