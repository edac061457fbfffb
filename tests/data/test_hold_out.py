"""Tokens that are held out for validation: an exact number, spread over the text, and nothing is lost."""

import random
from pathlib import Path

import pytest

import m2s.data
from m2s.data import Bytes, Characters, hold_out
from m2s.data.encode import encode_document
from m2s.data.hold_out import held_out, spacing
from packed_text import divide, encoded, make_documents, prepare, stream


@pytest.mark.parametrize("fraction", [0.5, 0.3, 0.1, 0.01, 1e-6])
@pytest.mark.parametrize("size", [2, 9, 10, 99, 100, 101, 1234])
def test_one_document_is_cut_and_loses_nothing(tmp_path: Path, fraction: float, size: int) -> None:
    """Its last tokens are validation; with the end token there are n = size + 1."""
    raw = bytes(random.Random(size).choices(b"abc\n ", k=size - 1)) + b"x"
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_bytes(raw)
    (tmp_path / "one" / "b.txt").write_bytes(b" \n<|endoftext|>\n\n")  # blank: not counted
    (tmp_path / "one" / "c-test.txt").write_bytes(b"held out\n<|endoftext|>\nand more")  # another split: not counted
    meta = prepare(tmp_path / "one", tmp_path / "out", validation_fraction=fraction, shard_tokens=7)
    train, validation, n = stream(tmp_path / "out", "train"), stream(tmp_path / "out", "validation"), size + 1
    assert train + validation == [*raw, 256] and len(validation) == max(1, round(fraction * n))
    assert {split: entry["tokens"] for split, entry in meta["splits"].items()} == {
        "train": len(train),
        "validation": len(validation),
        "test": 18,
    }
    assert sum(meta["splits"][split]["documents"] for split in ("train", "validation")) == 1
    assert meta["counts"]["a.txt"] == {"documents": 1, "blank": 0, "tokens": n}
    assert m2s.data.check_text(tmp_path / "out") == meta


def test_two_texts_share_nothing_but_the_count(tmp_path: Path) -> None:
    """A second document is not lost to validation; a text of one token is training text."""
    (tmp_path / "a.txt").write_text("a" * 700 + "\n<|endoftext|>\n" + "b" * 297)
    meta = m2s.data.prepare_text(tmp_path / "a.txt", tmp_path / "out", Bytes())
    assert stream(tmp_path / "out", "validation") == [ord("b")] * 99 + [256]
    assert [meta["splits"][split]["documents"] for split in ("train", "validation")] == [2, 0]
    (tmp_path / "b.txt").write_text("a")
    meta = m2s.data.prepare_text(tmp_path / "b.txt", tmp_path / "one", Characters("ab"))
    assert stream(tmp_path / "one", "train") == [0] and meta["splits"]["validation"]["tokens"] == 0


@pytest.mark.parametrize("seed", range(12))
def test_the_number_of_tokens_is_exact_and_no_token_is_lost(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of very different length, of which the longest may fall to validation; copied in small parts."""
    rng = random.Random(seed)
    monkeypatch.setattr(hold_out, "_MOVED_AT_ONCE", rng.choice([1, 7, 1000]))
    fraction = rng.choice([0.01, 0.05, 0.1, 0.25, 0.5])
    documents = [x * int(1 / rng.uniform(0.01, 1)) for x in make_documents(rng.randint(1, 60), seed)]
    cut = rng.randint(0, len(documents))
    (tmp_path / "text").mkdir()
    for name, part in (("a", documents[:cut]), ("b", documents[cut:])):
        (tmp_path / "text" / f"{name}.txt").write_bytes("\n<|endoftext|>\n".join(part).encode())
    meta = prepare(tmp_path / "text", tmp_path / "out", validation_fraction=fraction, shard_tokens=rng.choice([97, 500]))
    every, tokens = round(1 / fraction), [encoded(x) for x in documents]
    target = max(1, round(fraction * sum(map(len, tokens))))
    for split, ids in divide(tokens, every, target).items():
        assert stream(tmp_path / "out", split) == ids
    # A document counts for the split in which its first token is.
    first = divide([[True] + [False] * (len(ids) - 1) for ids in tokens], every, target)
    assert {split: meta["splits"][split]["documents"] for split in first} == {split: sum(x) for split, x in first.items()}


@pytest.mark.parametrize(("tokens", "share"), [(99_999, 0.1), (100_000, 0.01), (250_000, 0.01), (5000, 0.1)])
@pytest.mark.parametrize("count", [1, 3, 400])
def test_the_default_is_one_percent_or_ten_of_a_small_text(tmp_path: Path, tokens: int, share: float, count: int) -> None:
    sizes = [tokens // count] * count
    sizes[-1] += tokens - sum(sizes)
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join("x" * (size - 1) for size in sizes))  # and an end token
    (tmp_path / "b-test.txt").write_text("y" * 200_000)  # not divided: it does not make the text large
    (tmp_path / "text").mkdir()
    for name in ("a.txt", "b-test.txt"):
        (tmp_path / name).rename(tmp_path / "text" / name)
    meta = m2s.data.prepare_text(tmp_path / "text", tmp_path / "out", Bytes())
    assert meta["validation_fraction"] == share
    assert meta["splits"]["validation"]["tokens"] == round(share * tokens)
    assert meta["splits"]["train"]["tokens"] == tokens - round(share * tokens)


def test_a_large_text_is_not_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To choose the default, as many documents are encoded as have 100,000 tokens, and only the beginning of a long one."""
    lengths: list[int] = []

    def encode(tokenizer: Bytes, text: str) -> object:
        lengths.append(len(text))
        return encode_document(tokenizer, text)

    monkeypatch.setattr(hold_out, "encode_document", encode)
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join("x" * 999 for _ in range(1000)))
    (tmp_path / "b.txt").write_text("x" * 3_000_000)
    assert m2s.data.prepare_text(tmp_path / "a.txt", tmp_path / "a", Bytes())["validation_fraction"] == 0.01
    assert lengths == [999] * 100
    lengths.clear()
    assert m2s.data.prepare_text(tmp_path / "b.txt", tmp_path / "b", Bytes())["validation_fraction"] == 0.01
    assert len(lengths) == 1 and lengths[0] < 1_100_000


def test_validation_is_spread_over_a_text_of_equal_documents(tmp_path: Path) -> None:
    documents = [f"{i:04}" for i in range(1000)]
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(documents))
    prepare(tmp_path / "a.txt", tmp_path / "out", validation_fraction=0.01)
    held = bytes(i for i in stream(tmp_path / "out", "validation") if i < 256).decode()
    assert [held[i : i + 4] for i in range(0, len(held), 4)] == documents[99::100]


@pytest.mark.parametrize(("fraction", "every"), [(0.0, 0), (0.01, 100), (0.1, 10), (0.3, 3), (0.99, 1), (5e-324, 2**62)])
def test_spacing(fraction: float, every: int) -> None:
    assert spacing(fraction) == every


@pytest.mark.parametrize(
    ("tokens", "fraction", "expected"),
    [(100, 0.0, 0), (100, 0.01, 1), (30, 0.1, 3), (7, 0.01, 1), (2, 0.999, 1), (1, 0.1, 0), (10**10, 0.01, 10**8)],
)
def test_the_number_of_tokens(tokens: int, fraction: float, expected: int) -> None:
    assert held_out(tokens, fraction) == expected
