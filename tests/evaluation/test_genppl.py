"""Generative perplexity: protocols and averages against hand calculations, and files that are read or rejected."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from m2s.data import Bytes, Tokenizer
from m2s.errors import UserError
from m2s.evaluation.genppl import PROTOCOLS, Samples, Scores, decode, entropy, paired_difference, read_samples, score, summarize
from m2s.evaluation.judge import END, Judge
from m2s.report.samples import write_text
from small_judges import LETTERS, directly


def samples_of(path: Path, texts: list[str], protocol: str) -> Samples:
    return Samples(path, PROTOCOLS[protocol], texts, None, None, {})


def test_only_the_first_end_counts_in_mdlm(folders: dict[str, Path], judges: dict[str, Judge], tmp_path: Path) -> None:
    """Tokens a . b . . c with . the end token: only the first of the three is scored, and all other tokens are."""
    texts = [f"a{END}b{END}{END}c", f"{END}a{END}b"]
    got = score(samples_of(tmp_path / "x.txt", texts, "mdlm"), judges["gpt2"])
    for i, kept in enumerate([[0, 1, 4], [0, 2]]):  # predicted tokens: . b . . c and a . b
        ids = judges["gpt2"].tokenizer(texts[i])["input_ids"]
        assert got.nll[i] == pytest.approx(directly(folders["gpt2"], ids)[kept].sum(), abs=1e-4)
        assert got.tokens[i] == len(kept)
    every = score(samples_of(tmp_path / "x.txt", texts, "paper"), judges["gpt2"])
    assert every.tokens.tolist() == [5, 3] and every.bytes.tolist() == [2, 2]


def test_a_bos_is_no_end_of_a_document(judges: dict[str, Judge], tmp_path: Path) -> None:
    both = replace(judges["gpt2"], bos=judges["gpt2"].end)
    got = score(samples_of(tmp_path / "x.txt", [f"a{END}b{END}", "ab"], "mdlm"), both)
    assert got.tokens.tolist() == [3, 2]


def made_scores(nll: list[float], tokens: list[float], protocol: str = "paper", entropies: list[float] | None = None) -> Scores:
    samples = samples_of(Path("x.txt"), [str(i % 2) for i in range(len(nll))], protocol)
    bytes_ = 2 * np.array(tokens)
    nats = np.array(entropies or [0.0] * len(nll))
    states = np.zeros((2, len(nll), 3), np.float32)
    return Scores(samples, {"name": "j"}, np.array(nll), np.array(tokens), bytes_, nats, 0.5, "judge", 2, *states)


def test_averages_of_known_numbers() -> None:
    """Sequences of 1 and 4 tokens with 2 and 6 nats, ten of each, and one with nothing to score."""
    nll, tokens = [2.0, 6.0] * 10 + [0.0], [1.0, 4.0] * 10 + [0.0]
    paper = summarize(made_scores(nll, tokens, "paper", [math.log(2), math.log(4)] * 10 + [math.log(8)]))
    sedd = summarize(made_scores(nll, tokens, "sedd"))
    assert paper["perplexity"]["value"] == pytest.approx(math.exp(8 / 5))
    assert sedd["perplexity"]["value"] == pytest.approx((math.exp(2) + math.exp(1.5)) / 2)
    for result in (paper, sedd):
        assert result["perplexity_over_tokens"]["value"] == pytest.approx(math.exp(8 / 5))
        assert result["perplexity_over_sequences"]["value"] == pytest.approx((math.exp(2) + math.exp(1.5)) / 2)
        assert result["nats_per_token"]["value"] == pytest.approx(8 / 5)
        assert result["nats_per_byte"]["value"] == pytest.approx(8 / 10)
        assert result["bits_per_byte"]["value"] == pytest.approx(0.8 / math.log(2))
        assert (result["samples"], result["unscored"], result["tokens"], result["bytes"]) == (21, 1, 50, 100)
    assert paper["entropy_bits"]["value"] == pytest.approx(33 / 21)
    assert paper["entropy_nats"]["value"] == pytest.approx(math.log(2) * 33 / 21)
    assert paper["entropy_of_all_bits"] == pytest.approx(0.5 / math.log(2))


def test_summary_needs_something_in_every_resample() -> None:
    with np.errstate(invalid="ignore", divide="ignore"), pytest.raises(ValueError, match="too few sequences"):
        summarize(made_scores([2.0, 0.0], [1.0, 0.0]))


def test_differences_are_paired() -> None:
    first, second = made_scores([2.0, 6.0, 3.0], [1.0, 4.0, 2.0]), made_scores([1.0, 8.0, 3.0], [1.0, 4.0, 2.0])
    gap = paired_difference(first, second)
    assert gap["nats_per_token"]["value"] == pytest.approx((11 - 12) / 7)
    assert gap["perplexity"]["value"] == pytest.approx(math.exp(11 / 7) - math.exp(12 / 7))
    assert gap["same_noise"] is None
    shifted = made_scores([2.5, 8.0, 4.0], [1.0, 4.0, 2.0])  # half a nat a token more, in every sequence
    interval = paired_difference(shifted, first)["nats_per_token"]
    assert [interval[name] for name in ("value", "low", "high")] == pytest.approx([0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match="3 and 2 sequences"):
        paired_difference(first, made_scores([1.0, 2.0], [1.0, 1.0]))


def test_entropy_of_known_sequences() -> None:
    assert entropy([5, 5, 7, 7]) == pytest.approx(math.log(2))
    assert entropy([5, 5, 5]) == 0 and entropy([]) == 0
    assert entropy([1, 2, 3, 3]) == pytest.approx(1.5 * math.log(2))


def test_entropy_and_distinct_of_a_file(judges: dict[str, Judge], tmp_path: Path) -> None:
    """The sample's tokens count where the file has them, else the judge's; the corpus entropy pools all sequences."""
    rows = np.array([[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 3, 3]])
    np.savez(tmp_path / "a.npz", tokens=rows)
    got = score(read_samples(tmp_path / "a.npz", PROTOCOLS["paper"], LETTERS), judges["llama"])
    assert got.entropy / math.log(2) == pytest.approx([1, 1, 0])
    assert got.corpus_entropy / math.log(2) == pytest.approx(math.log2(3))
    assert got.distinct == 2 and got.entropy_of == "sample"
    (tmp_path / "a.jsonl").write_text('{"text": "thethe"}\n{"text": "ab"}\n')
    got = score(read_samples(tmp_path / "a.jsonl", PROTOCOLS["paper"]), judges["llama"])
    assert got.entropy / math.log(2) == pytest.approx([0, 1]) and got.entropy_of == "judge"


@pytest.mark.parametrize("tokenizer", [LETTERS, Bytes()], ids=["letters", "bytes"])
def test_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The text that `m2s sample` writes, the tokens it writes, and .jsonl all give the same texts."""
    if isinstance(tokenizer, Bytes):
        texts = ["a b\r\n\nc\n", "", "\n\n--- sample", "é\x85 ", "twelve one\n\n"]
    else:
        texts = ["ab.", "", "c  "]
    width = max(len(tokenizer.encode(text)) for text in texts)
    rows = [tokenizer.encode(text) for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
    assert read_samples(tmp_path / "a.jsonl", PROTOCOLS["mdlm"]).texts == texts
    padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    write_text(tmp_path / "a.txt", padded, tokenizer, start=7)
    expected = [tokenizer.decode(row) for row in padded.tolist()]
    assert read_samples(tmp_path / "a.txt", PROTOCOLS["mdlm"]).texts == expected
    np.savez(tmp_path / "a.npz", tokens=padded.numpy().astype(np.int32), settings=json.dumps({"seed": 3}))
    samples = read_samples(tmp_path / "a.npz", PROTOCOLS["mdlm"], tokenizer)
    assert samples.texts == expected and samples.settings == {"seed": 3}
    assert len(read_samples(tmp_path / "a.npz", PROTOCOLS["mdlm"], tokenizer, 2)) == 2


def test_ends_in_tokens_are_ends_in_text() -> None:
    assert decode(Bytes(), np.array([256, 97, 256, 256, 98])) == f"{END}a{END}{END}b"
    assert decode(LETTERS, np.array([1, 2])) == "ab"


def test_a_protocol_cuts_and_limits(judges: dict[str, Judge], tmp_path: Path) -> None:
    """The first tokens of the sample, and then of the judge; the first samples."""
    np.savez(tmp_path / "a.npz", tokens=np.tile(np.arange(1, 8), (6, 1)))
    protocol = replace(PROTOCOLS["paper"], samples=4, tokens=5)
    samples = read_samples(tmp_path / "a.npz", protocol, LETTERS)
    assert samples.texts == ["abcde"] * 4
    assert score(samples, judges["llama"]).tokens.tolist() == [5] * 4
    assert len(read_samples(tmp_path / "a.npz", protocol, LETTERS, 6)) == 6
    (tmp_path / "a.jsonl").write_text('{"text": "abcdefg"}\n' * 3)
    got = score(read_samples(tmp_path / "a.jsonl", protocol), judges["llama"])
    assert got.tokens.tolist() == [5] * 3 and got.bytes.tolist() == [5] * 3


def test_sedd_scores_the_tokens_themselves(folders: dict[str, Path], judges: dict[str, Judge], tmp_path: Path) -> None:
    """ "the" stays three tokens as drawn, although tokenizing the text again gives one; no BOS."""
    rows = np.array([LETTERS.encode("the cat"), LETTERS.encode("b thes.")])
    np.savez(tmp_path / "a.npz", tokens=rows)
    got = score(read_samples(tmp_path / "a.npz", PROTOCOLS["sedd"], LETTERS), judges["letters"])
    for i, row in enumerate(rows.tolist()):
        assert got.nll[i] == pytest.approx(directly(folders["letters"], row).sum(), abs=1e-4)
    assert got.tokens.tolist() == [6, 6] and got.bytes.tolist() == [6, 6]
    assert summarize(got)["perplexity"]["value"] == pytest.approx(np.exp(got.nll / 6).mean())
    retokenized = score(read_samples(tmp_path / "a.npz", PROTOCOLS["mdlm"], LETTERS), judges["letters"])
    assert retokenized.tokens.tolist() == [4, 4]
    with pytest.raises(UserError, match=r"token 0 of Characters has a different text in .* \(gpt2-large\)"):
        score(read_samples(tmp_path / "a.npz", PROTOCOLS["sedd"], LETTERS), judges["gpt2"])
    with pytest.raises(UserError, match=r"holds text: give the \.npz"):
        score(samples_of(tmp_path / "a.txt", ["a", "b"], "sedd"), judges["letters"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npz", np.zeros((2, 3, 4), np.int64), r"int64 of shape \[2, 3, 4\], expected integers \[samples, length\]"),
        ("a.npz", np.zeros((2, 3)), "float64 of shape"),
        ("a.npz", np.full((2, 3), 99), "sample 0 .* holds the token 99 at 0, but Characters has 0..27"),
        ("a.npz", np.array([[0, 1], [2, -1]]), "sample 1 .* holds the token -1 at 1"),
        ("a.npz", np.zeros((1, 3), np.int64), "gives 1 sample, but"),
        ("a.npz", b"PK\x03\x04 no", "damaged"),
        ("a.txt", b"once upon a time", "does not begin with a line like --- sample 0 ---"),
        ("a.txt", b"--- sample 0 ---\na\n\n--- sample 2 ---\nb\n", "not numbered consecutively"),
        ("a.txt", b"--- sample 0 ---\n\xff\n", "not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', "line 2 of .* is not an object with a text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', "line 2"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1"),
        ("a.jsonl", b'{"text": "a"\n', "line 1"),
        ("a.jsonl", b"", "gives 0 samples"),
        ("a.csv", b"a", "must end in"),
        ("a.npz", None, "there is no file"),
    ],
)
def test_errors_name_the_bad_file(tmp_path: Path, name: str, content: Any, message: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        np.savez(tmp_path / name, tokens=content)
    with pytest.raises(UserError, match=message):
        read_samples(tmp_path / name, PROTOCOLS["paper"], LETTERS)


def test_other_arrays_and_nothing_to_score(judges: dict[str, Judge], tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros(3))
    with pytest.raises(UserError, match="it has no array tokens, only images"):
        read_samples(tmp_path / "a.npz", PROTOCOLS["paper"], LETTERS)
    with pytest.raises(UserError, match="has a token to score"):
        score(samples_of(tmp_path / "a.txt", ["a", ""], "mdlm"), judges["gpt2"])
