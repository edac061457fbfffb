"""experiments/text.py on a small text: rows, the table, failed rows, finished rows and errors."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from m2s.data import Bytes, prepare_text

SCRIPT = Path(__file__).parents[2] / "experiments" / "text.py"
SETTINGS = {
    "network.size": "tiny",
    "network.width": 16,
    "network.depth": 1,
    "network.heads": 2,
    "data.length": 16,
    "steps": 6,
    "batch": 4,
    "optimizer.warmup": 2,
    "log_every": 2,
    "validate_every": 3,
}
COMMON = ["--data", "packed", "--results", "results", "--set", *(f"{key}={value}" for key, value in SETTINGS.items())]


@pytest.fixture
def text(tmp_path, monkeypatch):
    """The experiment as a module, in a folder with a small prepared text."""
    spec = importlib.util.spec_from_file_location("text_experiment", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    documents = [f"document {number} has größe {number * number}" for number in range(40)]
    Path("source.txt").write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    prepare_text("source.txt", "packed", Bytes(), validation_fraction=0.2)
    return module


def row(name: str) -> dict:
    return json.loads(Path(f"out/{name}.json").read_text())


def test_rows_and_table_hold_nelbo_and_trace(text, monkeypatch, capsys):
    assert text.main(["out", "--rows", "m2s-offset-0.1,ar", *COMMON]) == 0
    for found in (row("m2s-offset-0.1"), row("ar")):
        terms = {term: value["nats"]["value"] for term, value in found["nelbo"].items()}
        assert terms["nelbo"] == pytest.approx(terms["integral"] + terms["prior"] + terms["reconstruction"])
        assert found["tokens"] == 6 * 4 * 16 and found["trace"]["tokens"] == [128, 256, 384]
        assert [point["tokens"] for point in found["validation"]] == [192, 384]
        ratio = json.loads(Path("out/entry.json").read_text())["data"]["bytes_per_token"]
        bits = terms["nelbo"] / math.log(2) / ratio
        assert found["nelbo"]["nelbo"]["bits_per_byte"]["value"] == pytest.approx(bits)
    last = row("ar")["validation"][-1]
    assert last["nats"] == pytest.approx(row("ar")["nelbo"]["nelbo"]["nats"]["value"], rel=1e-5)  # no random times, so equal
    assert row("m2s-offset-0.1")["train"].startswith("m2s train owt --method m2s-offset --data.length 16 --batch 4")
    assert not list(Path("out/runs").iterdir())

    assert text.main(["out", "--table", "--results", "results"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| `ar` |") for line in lines)
    assert [each["row"] for each in json.loads(Path("results/text-recipe.json").read_text())["rows"]] == [
        "m2s-offset-0.1",
        "ar",
    ]
    monkeypatch.setattr(text, "train", None)
    for out in ("out", "another"):  # the files of the folder, and the results file
        assert text.main([out, "--rows", "m2s-offset-0.1,ar", *COMMON]) == 0


def test_tokens_of_a_row_with_another_batch(text, monkeypatch):
    half = {"method": "mdlm", "batch": 2, "steps": 12, "log_every": 4, "validate_every": 6}
    monkeypatch.setitem(text.ENTRIES, "halves", text.Entry(text.SHORT, {"mdlm": {"method": "mdlm"}, "half": half}))
    assert text.main(["out", "--entry", "halves", *COMMON]) == 0
    assert row("half")["trace"]["tokens"] == row("mdlm")["trace"]["tokens"] == [128, 256, 384]
    assert [point["tokens"] for point in row("half")["validation"]] == [192, 384]


def test_rows_of_an_entry_have_the_same_tokens(text):
    """A column of the table has one number of tokens for all rows."""
    for entry in text.ENTRIES.values():
        settings = [{**entry.settings, **row} for row in entry.rows.values()]
        for key in ("steps", "log_every", "validate_every", "optimizer.warmup"):
            assert len({row["batch"] * row[key] for row in settings}) == 1, key


def test_failed_row_is_recorded_and_repeated(text, monkeypatch, capsys):
    real, tried = text.train, []

    def train(config):
        tried.append(config.method)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("no memory for it")
        return real(config)

    monkeypatch.setattr(text, "train", train)
    assert text.main(["out", "--rows", "mdlm,sedd-0.1", *COMMON]) == 1
    assert row("mdlm")["error"] == "OutOfMemoryError: no memory for it" and "nelbo" in row("sedd-0.1")
    assert text.main(["out", "--table", "--results", "results"]) == 0
    assert "| `mdlm` | failed: OutOfMemoryError: no memory for it |" in capsys.readouterr().out
    assert text.main(["out", "--rows", "mdlm,sedd-0.1", *COMMON]) == 0
    assert tried == ["mdlm", "sedd", "mdlm"] and "error" not in row("mdlm")


def test_errors_are_raised_before_anything_is_written(text, capsys):
    cases = {
        ("--rows", "mdm", *COMMON): "recipe has no row 'mdm': did you mean mdlm",
        (): "--data is missing",
        ("--limit", "0", *COMMON): "at least 1",
        ("--table",): "has no rows",
        (*COMMON, "optimizer.lr=-1.0"): "must be a positive number",
        ("--data", "nowhere"): "nowhere has no meta.json",
    }
    for arguments, message in cases.items():
        assert text.main(["out", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_rows_of_one_folder_need_the_same_settings(text, capsys):
    assert text.main(["out", "--seconds", "-1", *COMMON]) == 0
    assert text.main(["out", *COMMON, "steps=7"]) == 2
    assert "out/entry.json has settings" in capsys.readouterr().err
