"""Adversaries: each has the property of the text that it is made from, and none of the others."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from m2s.cli import main
from m2s.data import Tokens
from m2s.errors import UserError
from m2s.evaluation.text import ADVERSARIES, AdversarySource, make_adversary
from packed_text import prepare, stream

LENGTH, N = 24, 12


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared text of sentences of bytes; a tenth is held out."""
    folder = tmp_path_factory.mktemp("text")
    generator = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "dog"]
    documents = [" ".join([*generator.choice(words, 3), "ran.", *generator.choice(words, 2), "sat."]) for _ in range(400)]
    (folder / "a.txt").write_text("\n<|endoftext|>\n".join(documents))
    prepare(folder / "a.txt", folder / "packed", shard_tokens=3000)
    return folder / "packed"


@pytest.fixture(scope="module")
def source(packed: Path) -> AdversarySource:
    return AdversarySource(packed, LENGTH, "validation")


def windows(packed: Path, split: str) -> set[bytes]:
    tokens = Tokens(packed, split, LENGTH)
    return {tokens[at].numpy().tobytes() for at in range(len(tokens))}


def test_the_stream_is_that_of_the_files(packed: Path) -> None:
    text = stream(packed, "train")
    tokens = Tokens(packed, "train", LENGTH)
    assert len(list(packed.glob("train-*.bin"))) > 2
    for limit in (None, 0, 1, 2999, 3000, 3001, len(text) - 1, len(text), 10**9):
        assert tokens.stream(limit).tolist() == text[:limit]


@pytest.mark.parametrize("name", ADVERSARIES)
def test_samples_depend_on_the_seed(name: str, source: AdversarySource) -> None:
    tokens = make_adversary(name, source, N, 3)
    assert tokens.shape == (N, LENGTH) and tokens.dtype == np.int64
    assert np.array_equal(tokens, make_adversary(name, source, N, 3))
    assert not np.array_equal(tokens, make_adversary(name, source, N, 4))
    assert len(np.unique(tokens, axis=0)) == N


def test_unigram_has_the_frequencies_of_the_training_text(source: AdversarySource) -> None:
    drawn = make_adversary("unigram", source, 400, 0)
    counts = np.bincount(source.training)
    used = counts > 0
    found = np.bincount(drawn.ravel(), minlength=len(counts))
    assert found[~used].sum() == 0
    expected = counts[used] / counts.sum() * drawn.size
    assert stats.chisquare(found[used], expected).pvalue > 1e-3
    pairs = stats.contingency.crosstab(drawn[:, :-1:2].ravel(), drawn[:, 1::2].ravel()).count
    assert stats.chi2_contingency(pairs[pairs.sum(1) > 300][:, pairs.sum(0) > 300]).pvalue > 1e-3  # neighbors are independent


def test_bigram_has_the_transitions_of_the_training_text(source: AdversarySource) -> None:
    text, drawn = source.training.astype(np.int64), make_adversary("bigram", source, 600, 0)
    known = set(zip(text[:-1].tolist(), text[1:].tolist(), strict=True))
    assert set(zip(drawn[:, :-1].ravel().tolist(), drawn[:, 1:].ravel().tolist(), strict=True)) <= known
    for token in (ord("a"), ord(" "), ord("t")):
        after = np.bincount(text[1:][text[:-1] == token], minlength=257)
        found = np.bincount(drawn[:, 1:][drawn[:, :-1] == token], minlength=257)
        used = after > 0
        assert stats.chisquare(found[used], after[used] / after.sum() * found.sum()).pvalue > 1e-3


def test_a_token_that_only_ends_the_text_has_no_successor(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abababababab" * 4 + "z")
    prepare(tmp_path / "a.txt", tmp_path / "packed", validation_fraction=0.0)
    drawn = make_adversary("bigram", AdversarySource(tmp_path / "packed", 8, "train"), 64, 0)
    assert set(drawn.ravel().tolist()) <= {97, 98, 122, 256} and (drawn == 256).any()
    for first, second in zip(drawn[:, :-1].ravel().tolist(), drawn[:, 1:].ravel().tolist(), strict=True):
        assert (first, second) in {(97, 98), (98, 97), (98, 122), (122, 256)} or first == 256


def test_shuffled_is_held_out_text_in_another_order(source: AdversarySource, packed: Path) -> None:
    drawn = make_adversary("shuffled", source, N, 0)
    held_out = {np.sort(np.frombuffer(row, np.int64)).tobytes() for row in windows(packed, "validation")}
    assert {np.sort(row).tobytes() for row in drawn} <= held_out
    assert not {row.tobytes() for row in drawn} & windows(packed, "validation")


def test_repeated_is_one_sentence_of_held_out_text(source: AdversarySource, packed: Path) -> None:
    text = bytes(token % 256 for token in stream(packed, "validation"))
    complete = 0
    for row in make_adversary("repeated", source, N, 0).tolist():
        period = next(size for size in range(1, LENGTH + 1) if row[size:] == row[:-size])
        assert period <= LENGTH // 2
        sentence = bytes(token % 256 for token in row[:period])
        assert sentence in text
        complete += sentence.endswith(b".") and sentence.count(b".") == 1
    assert complete > N / 3, "most windows have a sentence of 5 to 12 bytes"


def test_copied_is_training_text(source: AdversarySource, packed: Path) -> None:
    assert {row.tobytes() for row in make_adversary("copied", source, N, 0)} <= windows(packed, "train")


def test_too_little_text_is_an_error(source: AdversarySource) -> None:
    with pytest.raises(UserError, match=r"validation has \d+ windows of 24 tokens, and 5,000 samples need"):
        make_adversary("shuffled", source, 5000, 0)
    with pytest.raises(UserError, match="there is no adversary 'shufled': did you mean shuffled"):
        make_adversary("shufled", source, 2, 0)


def test_command(packed: Path, source: AdversarySource, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "adversaries", str(packed), "--n", "5", "--length", "24", "--out", str(tmp_path / "out")]
    main([*arguments, "--seed", "7"])
    assert "5 samples of 24 tokens each" in capsys.readouterr().out
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == sorted(ADVERSARIES)
    for name in ADVERSARIES:
        with np.load(tmp_path / "out" / f"{name}.npz") as held:
            settings = json.loads(str(held["settings"]))
            assert np.array_equal(held["tokens"], make_adversary(name, source, 5, 7))
        assert settings["adversary"] == name and settings["data"]["tokenizer"] == {"kind": "Bytes"}
    for more, message in (
        ([], "unigram.npz is there already"),
        (["--names", "bigrams", "--overwrite"], "did you mean bigram"),
        (["--n", "1", "--overwrite"], "--n is 1"),
        (["--length", "5000", "--overwrite"], "windows of 5000 tokens"),
        (["--split", "test", "--overwrite"], "test has 0 windows"),
    ):
        with pytest.raises(SystemExit) as exit_:
            main([*arguments, *more])
        assert exit_.value.code == 2 and message in capsys.readouterr().err
    main([*arguments[:-1], str(tmp_path / "two"), "--names", "copied", "shuffled"])
    assert sorted(path.stem for path in (tmp_path / "two").iterdir()) == ["copied", "shuffled"]
