"""Repetition and novelty of n-grams: against counts of Python's sets on small texts."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from m2s.data import Bytes
from m2s.evaluation.genppl import PROTOCOLS, Samples
from m2s.evaluation.ngrams import ngram_ids
from m2s.evaluation.text import metric, vocabulary
from m2s.evaluation.text.metric import MeasuredText, TextContext, TrainingText
from m2s.evaluation.text.novelty import NOVELTY
from m2s.evaluation.text.repetition import REPETITION, shared_with_others
from m2s.evaluation.text.vocabulary import VOCABULARY
from m2s.evaluation.text.words import inner_words
from packed_text import prepare, stream


def measured(tokens: np.ndarray) -> MeasuredText:
    return MeasuredText(Samples(Path("x.npz"), PROTOCOLS["paper"], ["" for _ in tokens], tokens, Bytes(), {}))


@pytest.fixture
def training(tmp_path: Path) -> TrainingText:
    """A prepared text of about 1,800 bytes in several files."""
    generator = np.random.default_rng(0)
    words = ["the ", "cat ", "sat ", "on ", "a ", "mat "]
    documents = ["".join(generator.choice(words, 12)) for _ in range(50)]
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(documents))
    prepare(tmp_path / "a.txt", tmp_path / "packed")
    return TrainingText(tmp_path / "packed")


def context(training: TrainingText) -> TextContext:
    return TextContext(measured(np.zeros((2, 4), np.int64)), training, resamples=100)


def grams(row: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(row[at : at + size]) for at in range(len(row) - size + 1)]


def sequences(seed: int, states: int = 4) -> np.ndarray:
    generator = np.random.default_rng(seed)
    rows = generator.integers(0, states, (6, 15))
    rows[1] = rows[0]
    return rows


def test_ids_are_equal_where_ngrams_are() -> None:
    rows = sequences(0, 3) * 1_000_000_007  # far apart, so that products of plain tokens would overflow
    for size, ids in enumerate(ngram_ids(rows, 6), 1):
        of = {}
        for row, numbers in zip(rows.tolist(), ids.tolist(), strict=True):
            for gram, number in zip(grams(row, size), numbers, strict=True):
                assert of.setdefault(gram, number) == number
        assert sorted(of.values()) == list(range(len(of)))


def test_repetition_is_that_of_sets(training: TrainingText) -> None:
    rows = sequences(1)
    found = REPETITION.measure(measured(rows), context(training))
    assert found["distinct_texts"]["value"] == 5 / 6
    for size in range(1, 5):
        all_grams = [grams(row, size) for row in rows.tolist()]
        repeated = [1 - len(set(one)) / len(one) for one in all_grams]
        assert found[f"repeated_{size}"]["value"] == pytest.approx(np.mean(repeated))
        assert found[f"repeated_{size}"]["low"] <= np.mean(repeated) <= found[f"repeated_{size}"]["high"]
        total = sum(map(len, all_grams))
        assert found[f"distinct_{size}"]["value"] == pytest.approx(len(set().union(*all_grams)) / total)
        owners = Counter(gram for one in all_grams for gram in set(one))
        shared = sum(owners[gram] > 1 for one in all_grams for gram in one)
        assert found[f"shared_{size}"]["value"] == pytest.approx(shared / total)


def test_repetition_of_known_texts(training: TrainingText) -> None:
    """One token repeated, and no n-gram twice; equal sequences share everything, different tokens nothing."""
    rows = np.stack([np.zeros(10, np.int64), np.arange(1, 11)])
    found = REPETITION.measure(measured(rows), context(training))
    assert found["repeated_2"]["value"] == pytest.approx((8 / 9 + 0) / 2)
    assert found["distinct_2"]["value"] == 10 / 18 and found["shared_1"]["value"] == 0
    assert shared_with_others(np.array([[0, 1], [1, 2], [2, 2]])).tolist() == [[False, True], [True, True], [True, True]]
    short = REPETITION.measure(measured(np.array([[1, 2], [1, 2]])), context(training))
    assert "repeated_3" not in short and short["shared_2"]["value"] == 1


def test_novelty_is_that_of_sets(training: TrainingText, tmp_path: Path) -> None:
    text = stream(tmp_path / "packed", "train")
    generator = np.random.default_rng(2)
    rows = np.stack([text[at : at + 30] for at in generator.integers(0, len(text) - 30, 5)])
    rows[1:, 10:12] = generator.integers(97, 120, (4, 2))  # breaks all copies but the first
    rows[4] = 200
    found = NOVELTY.measure(measured(rows), context(training))
    for size in range(2, 9):
        known = set(grams(text, size))
        novel = [np.mean([gram not in known for gram in grams(row, size)]) for row in rows.tolist()]
        assert found[f"novel_{size}"]["value"] == pytest.approx(np.mean(novel))
    assert 0 < found["novel_2"]["value"] < found["novel_8"]["value"] < 1
    copies = []
    for row in rows.tolist():
        sizes = [size for size in range(1, 31) if set(grams(row, size)) & set(grams(text, size))]
        copies.append(max(sizes, default=0))
    assert copies[0] == 30 and copies[4] == 0 and found["longest_copy_of_all"]["value"] == 30
    assert found["longest_copy"]["value"] == pytest.approx(np.mean(copies))
    assert found["searched_tokens"] == found["training_tokens"] == len(text)


def test_only_the_start_of_the_training_text_is_searched(training: TrainingText, tmp_path: Path) -> None:
    text = stream(tmp_path / "packed", "train")
    rows = np.array([text[:12], text[90:102]])
    start = TrainingText(tmp_path / "packed", limit=100)
    found = NOVELTY.measure(measured(rows), context(start))
    assert (found["searched_tokens"], found["training_tokens"]) == (100, len(text))
    sizes = [size for size in range(1, 13) if set(grams(text[90:102], size)) & set(grams(text[:100], size))]
    assert found["longest_copy"]["value"] == (12 + max(sizes)) / 2 < 12
    assert start.fingerprint != training.fingerprint


def test_known_words_are_those_of_the_training_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words in any case, also at the ends of documents and across the parts in which the training text is decoded."""
    documents = ["The cat sat", "on a mat", *["a cat"] * 20]
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(documents))
    prepare(tmp_path / "a.txt", tmp_path / "packed")
    tokens = stream(tmp_path / "packed", "train")
    expected = Counter("".join(chr(token) if token < 256 else " " for token in tokens).lower().split())
    assert expected["cat"] > expected["sat"] == 1
    for size in (1, 7, 2**20):
        monkeypatch.setattr(metric, "CHUNK", size)
        training = TrainingText(tmp_path / "packed")
        assert training.words == expected
    texts = ["at the CAT zat on", "he sat.mat mats 4 a cat", "cat"]
    assert [inner_words(one) for one in texts] == [["the", "cat", "zat"], ["sat", "mat", "mats", "a"], []]
    rows = np.zeros((3, 4), np.int64)
    samples = Samples(Path("x.npz"), PROTOCOLS["paper"], texts, rows, Bytes(), {})
    monkeypatch.setattr(vocabulary, "FREQUENT", expected["cat"])
    found = VOCABULARY.measure(MeasuredText(samples), context(training))
    frequent = sum(expected[word] >= expected["cat"] for word in ("the", "cat", "zat", "sat", "mat", "mats", "a"))
    assert found["known_words"]["value"] == 5 / 7 and found["frequent_words"]["value"] == frequent / 7
    assert found["known_words"]["low"] <= 5 / 7 <= found["known_words"]["high"]
    assert VOCABULARY.measure(measured(rows), context(training))["known_words"]["value"] == 0


def test_the_end_of_a_document_is_no_word() -> None:
    assert inner_words("a cat.<|endoftext|>on mats endoftext x") == ["cat", "on", "mats", "endoftext"]
