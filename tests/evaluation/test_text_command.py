"""`m2s evaluate text`."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from m2s.cli import main
from m2s.data import Bytes, Tokens
from m2s.evaluation import TEXT_METRICS
from m2s.evaluation.genppl import PROTOCOLS, read_samples, score, summarize
from m2s.evaluation.judge import Judge
from m2s.evaluation.text import embedding_distance, mauve_score
from m2s.evaluation.text.held_out import held_out_split, load_held_out
from packed_text import prepare
from small_judges import directly

pytest.importorskip("transformers", reason="no transformers here: pip install transformers gguf accelerate")
N, LENGTH = 8, 24


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prepared text, adversaries of it, and two files of samples."""
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "dog"]
    documents = [" ".join([*generator.choice(words, 3), "ran.", *generator.choice(words, 2), "sat."]) for _ in range(300)]
    (folder / "a.txt").write_text("\n<|endoftext|>\n".join(documents))
    prepare(folder / "a.txt", folder / "packed")
    main(["data", "adversaries", str(folder / "packed"), "--n", str(N), "--length", str(LENGTH), "--out", str(folder / "adv")])
    for name, high in (("good", 110), ("bad", 123)):
        write_samples(folder / f"{name}.npz", generator.integers(97, high, (N, LENGTH)))
    return folder


@pytest.fixture
def here(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, and an empty $M2S_DATA."""
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    return Path(shutil.copytree(texts, tmp_path / "texts"))


def write_samples(path: Path, tokens: np.ndarray, tokenizer: str = "Bytes") -> Path:
    settings = {"temperature": 1.0, "seed": 0, "data": {"kind": "text", "tokenizer": {"kind": tokenizer}}}
    np.savez(path, tokens=tokens.astype(np.int32), settings=json.dumps(settings))
    return path


def run(here: Path, *arguments: object) -> dict[str, Any]:
    """Run the command on the adversaries and two files of samples; return what it writes."""
    files = [here / "good.npz", here / "bad.npz", *sorted((here / "adv").glob("*.npz"))]
    words = ["evaluate", "text", *files, "--against", here / "packed", "--device", "cpu", "--resamples", 100]
    main([str(word) for word in (*words, "--out", here / "out", *arguments)])
    return json.loads((here / "out" / "text.json").read_text())


def error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["evaluate", "text", *map(str, arguments)])
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and said.count("\n") == 1
    return said


def test_command(here: Path, folders: dict[str, Path], judges: dict[str, Judge], capsys: pytest.CaptureFixture[str]) -> None:
    """Two judges. Every number is that of the function that computes it, and the table and the marks are those of the file."""
    found = run(here, "--judge", folders["llama"], folders["gpt2"])
    printed = capsys.readouterr().out
    names = ["good", "bad", "bigram", "copied", "repeated", "shuffled", "unigram", "held-out text"]
    assert [entry["name"] for entry in found["files"]] == names
    assert [entry["kind"] for entry in found["files"]] == ["samples"] * 2 + ["adversary"] * 5 + ["held-out"]
    assert [judge["name"] for judge in found["judges"]] == [str(folders["llama"]), str(folders["gpt2"])]
    by_name = {entry["name"]: entry["values"] for entry in found["files"]}
    assert by_name["copied"]["text"]["novelty"]["novel_8"]["value"] == 0
    assert by_name["copied"]["text"]["novelty"]["longest_copy"]["value"] == LENGTH
    assert by_name["bad"]["text"]["novelty"]["novel_2"]["value"] > 0.3
    for key, folder in (("llama", folders["llama"]), ("gpt2", folders["gpt2"])):
        values = by_name["good"][str(folder)]
        samples = read_samples(here / "good.npz", PROTOCOLS["paper"], Bytes())
        scores = score(samples, judges[key])
        assert values["perplexity"]["perplexity"] == pytest.approx(summarize(scores, 100)["perplexity"])
        nll = [directly(folder, judges[key].tokenize(text).ids) for text in samples.texts]
        assert values["perplexity"]["perplexity"]["value"] == pytest.approx(math.exp(np.concatenate(nll).mean()), rel=1e-4)
        (file,) = (here.parent / "data" / "judged").glob(f"packed-validation-reference-*-{key}.safetensors")
        windows = load_file(file)
        assert values["frechet"]["frechet"]["value"] == pytest.approx(embedding_distance(scores.mean, windows["mean"]))
        assert values["mauve"]["mauve"]["value"] == pytest.approx(mauve_score(scores.last, windows["last"]).value)
        assert f"{values['perplexity']['perplexity']['value']:.2f} ±" in printed
    assert f"protocol paper; not as in the protocol: the judge is {folders['gpt2']}, not google/gemma-2-9b" in printed
    assert "judge llama" in printed and "without a judge" in printed and f"{N} windows of {LENGTH} tokens" in printed
    for ranking in found["rankings"]:
        first = ranking["adversaries_before_all_samples"] or ranking["adversaries_above_held_out_text"]
        judge = f" by {Path(ranking['group']).name}" if ranking["group"] != "text" else ""
        assert (f"! {ranking['column']}{judge} (" in printed) == bool(first)
        numbers = {name: values[ranking["group"]][ranking["metric"]][ranking["column"]] for name, values in by_name.items()}
        real = numbers.pop("held-out text")["value"]
        costs = {
            "lowest": lambda value: value,
            "highest": lambda value: -value,
            "closest": lambda value, real=real: abs(value - real),
        }
        cost = {name: costs[ranking["better"]](number["value"]) for name, number in numbers.items()}
        assert [cost[name] for name in ranking["order"]] == sorted(cost.values())
        best = min(cost["good"], cost["bad"])
        assert set(ranking["adversaries_before_all_samples"]) == {name for name in cost if cost[name] < best}


def test_held_out_windows_are_disjoint_and_spread_evenly(tmp_path: Path) -> None:
    """Of a text without a window that occurs twice: the windows of both sets alternate, and each is one of the split."""
    letters = np.random.default_rng(1).integers(97, 123, 6000)
    (tmp_path / "a.txt").write_bytes(bytes(letters.tolist()))
    prepare(tmp_path / "a.txt", tmp_path / "packed", validation_fraction=0.5)
    windows = Tokens(tmp_path / "packed", "validation", LENGTH)
    index = {windows[at].numpy().tobytes(): at for at in range(len(windows))}
    assert len(index) == len(windows) > 100
    for count in (2, 10, len(windows) // 2, len(windows)):
        pair = load_held_out(tmp_path / "packed", "validation", count, LENGTH, Bytes(), PROTOCOLS["paper"])
        numbers = [[index[row.tobytes()] for row in samples.tokens] for samples in pair if samples.tokens is not None]
        assert len(numbers[0]) == len(numbers[1]) == min(count, len(windows) // 2)
        together = [number for both in zip(*numbers, strict=True) for number in both]
        assert together == sorted(set(together)) and max(np.diff(together)) - min(np.diff(together)) <= 1
        assert pair[0].texts[1] == bytes(windows[numbers[0][1]].tolist()).decode()
    assert held_out_split(tmp_path / "packed", LENGTH) == "validation"


def test_the_judge_reads_every_text_once(here: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command, given again, reads stored results, or stored embeddings without them. Other samples are judged."""
    first = run(here, "--judge", folders["gpt2"])
    read: list[int] = []
    original = Judge.read

    def counted(self: Judge, sequences: Any, *more: Any) -> Any:
        read.append(len(sequences))
        return original(self, sequences, *more)

    monkeypatch.setattr(Judge, "read", counted)
    again = run(here, "--judge", folders["gpt2"], "--overwrite")
    assert again["files"] == first["files"] and again["rankings"] == first["rankings"] and not read
    shutil.rmtree(here / "out")
    again = run(here, "--judge", folders["gpt2"])
    assert again["files"] == first["files"] and not read
    other = write_samples(here / "bad.npz", np.random.default_rng(9).integers(97, 123, (N, LENGTH)))
    again = run(here, "--judge", folders["gpt2"], "--overwrite")
    assert read == [N]
    changed = [a["name"] for a, b in zip(first["files"], again["files"], strict=True) if a["values"] != b["values"]]
    assert changed == ["bad"]
    (here / "judged" / f"{other.stem}-gpt2.safetensors").write_bytes(b"damaged")
    for part in (here / "out" / "parts").iterdir():
        part.write_text("{")
    assert run(here, "--judge", folders["gpt2"], "--overwrite")["files"] == again["files"] and read == [N, N]
    run(here, "--judge", folders["llama"], "--overwrite")
    assert len(read) == 2 + 9  # another judge reads all files and two sets of held-out text


def test_stored_results_depend_on_what_they_are_computed_from(here: Path) -> None:
    """Another seed, another number of resamples and another part of the training text give other numbers."""
    more = ("--metrics", "repetition", "novelty", "--overwrite")
    first = run(here, *more)
    part = run(here, *more, "--train-tokens", 200)
    assert part["training"]["searched_tokens"] == 200 < part["training"]["tokens"] == first["training"]["tokens"]
    assert any("only the first 200 of" in note for note in part["notes"])

    def number(found: dict[str, Any], metric: str, column: str, end: str = "value") -> float:
        return found["files"][3]["values"]["text"][metric][column][end]

    assert number(part, "novelty", "novel_8") > number(first, "novelty", "novel_8") == 0
    assert number(part, "repetition", "repeated_2") == number(first, "repetition", "repeated_2")
    seed = run(here, *more, "--seed", 5)
    assert number(seed, "repetition", "repeated_2") == number(first, "repetition", "repeated_2")
    assert number(seed, "repetition", "repeated_2", "low") != number(first, "repetition", "repeated_2", "low")


def test_metrics_without_a_judge_need_none(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2s.evaluation.judge.load_judge", lambda *_: pytest.fail("no judge is needed"))
    found = run(here, "--metrics", "repetition")
    assert found["judges"] == [] and all(set(entry["values"]) == {"text"} for entry in found["files"])
    assert not (here / "judged").exists()


def test_a_plugin_adds_a_metric(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "vowels.py").write_text(
        "from m2s.evaluation import TEXT_METRICS\n"
        "from m2s.evaluation.text import Column, TextMetric\n\n\n"
        "def measure(text, context):\n"
        '    share = sum(letter in "aeiou" for one in text.samples.texts for letter in one)\n'
        '    return {"vowels": {"value": float(share), "low": None, "high": None}}\n\n\n'
        'TEXT_METRICS.add("vowels", TextMetric(measure, (Column("vowels", "closest", "number of vowels", ".0f"),)))\n'
    )
    try:
        found = run(here, "--metrics", "vowels", "--plugin", tmp_path / "vowels.py")
        texts = read_samples(here / "good.npz", PROTOCOLS["paper"], Bytes()).texts
        expected = sum(letter in "aeiou" for letter in "".join(texts))
        assert found["files"][0]["values"]["text"]["vowels"]["vowels"]["value"] == expected
        assert "vowels: number of vowels; closest is first" in capsys.readouterr().out
    finally:
        TEXT_METRICS.remove("vowels")


def test_invalid_input_is_one_line_and_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = here / "good.npz"
    write_samples(here / "few.npz", np.full((3, LENGTH), 97))
    write_samples(here / "short.npz", np.full((N, 5), 97))
    write_samples(here / "other.npz", np.full((N, LENGTH), 5), "Characters")
    (here / "a.jsonl").write_text('{"text": "a"}\n' * 3)
    against = ("--against", here / "packed", "--out", here / "out")
    before = sorted(here.rglob("*"))
    for arguments, message in (
        ((good, "--against", here, "--out", here / "out"), "has no meta.json"),
        ((good, here / "few.npz", *against), "the files hold 3 x 24, 8 x 24 tokens"),
        ((good, here / "short.npz", *against), "8 x 5, 8 x 24 tokens"),
        ((here / "other.npz", *against), "was drawn with the tokenizer"),
        ((here / "a.jsonl", *against), "must end in .npz"),
        ((here / "none.npz", *against), "there is no file"),
        ((good, *against, "--metrics", "mauv"), "did you mean mauve"),
        ((good, *against, "--protocol", "mauve"), "no protocol 'mauve'"),
        ((good, *against, "--split", "test"), "test has 0 windows"),
        ((good, *against, "--limit", 1), "--limit is 1"),
        ((good, *against, "--train-tokens", 0), "--train-tokens is 0"),
        ((good, *against, "--batch-size", 0), "--batch-size is 0"),
        ((good, *against, "--resamples", 10), "--resamples is 10"),
    ):
        assert message in error(capsys, *arguments)
    assert sorted(here.rglob("*")) == before
    run(here, "--metrics", "repetition")
    assert "is there already" in error(capsys, good, *against, "--metrics", "repetition")
