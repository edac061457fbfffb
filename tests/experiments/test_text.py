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
    for name in ("steps", "save_every"):  # of the short run that measures the speed
        monkeypatch.setitem(module.PROBE, name, 24)
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
        settings = [{**entry.settings, **row} for row in entry.rows.values() if entry.seconds is None]
        for key in ("steps", "log_every", "validate_every", "optimizer.warmup"):
            assert len({row["batch"] * row[key] for row in settings}) <= 1, key


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
        ("--data", "nowhere"): "there is no folder nowhere",
    }
    for arguments, message in cases.items():
        assert text.main(["out", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_rows_of_one_folder_need_the_same_settings(text, capsys):
    assert text.main(["out", "--seconds", "-1", *COMMON]) == 0
    assert text.main(["out", *COMMON, "steps=7"]) == 2
    assert "out/entry.json has settings" in capsys.readouterr().err


def test_seconds_of_training_become_steps(text, monkeypatch, capsys):
    """The number of steps is floor(seconds * rate / tokens of a step), to a multiple of the states, and it is kept."""
    given = ["out", "--entry", "methods", "--rows", "mdlm,gidd-0", "--budget", "0.5", *COMMON]
    monkeypatch.setattr(text, "speed_of_halves", lambda records: 64 * 27.0)
    assert text.main(given) == 0
    for name in ("mdlm", "gidd-0"):
        assert row(name)["budget"]["steps"] == 12  # 0.5 * 27 = 13.5
        assert row(name)["tokens"] == 12 * 4 * 16
        words = row(name)["train"]
        assert words.startswith("m2s train owt-fast --method ") and all(
            option in words for option in ("--steps 12", "--save-every 3", "--keep 4")
        )
        spent = row(name)["budget"]
        assert spent["training_seconds"] == pytest.approx(12 / 27)
        assert spent["other_seconds"] == pytest.approx(row(name)["seconds"]["train"] - 12 / 27)
    Path("out/mdlm.json").unlink()
    monkeypatch.setattr(text, "speed_of_halves", lambda records: 64 * 99.0)
    assert text.main(given) == 0 and row("mdlm")["budget"]["steps"] == 12
    assert text.main(["out", "--entry", "methods", "--table", "--results", "results"]) == 0
    header, _, mdlm, _ = capsys.readouterr().out.splitlines()[-4:]
    assert header.endswith("| seconds | of them training | M tokens | epochs |") and mdlm.startswith("| `mdlm` |")
    assert json.loads(Path("results/text-methods.json").read_text())["seconds"] == 0.5
    assert text.main(["out", "--entry", "methods", "--budget", "0.6", *COMMON]) == 2  # another budget needs another folder
    assert (
        text.main(["new", "--budget", "0.5", *COMMON]) == 2 and text.main(["new", *given[1:3], "--budget", "0", *COMMON]) == 2
    )
    assert "belongs to the entries" in capsys.readouterr().err


def test_speeds_of_earlier_tables_replace_the_short_run(text, capsys):
    """A row's speed is the median over rows of its method and optimizer on this device; other rows need the short run."""
    here = text.provenance("cpu")["device"]
    rows = [
        ("m2s train owt-fast --method mdlm", 64 * 20.0, here),
        ("m2s train owt --method mdlm --optimizer.kind muon", 64 * 30.0, here),
        ("m2s train owt --method mdlm --optimizer.kind muon", 64 * 90.0, "another device"),
        ("m2s train owt --method mdlm", 64 * 90.0, here),  # AdamW
        ("m2s train owt --method md4 --optimizer.kind muon", 64 * 90.0, here),
    ]
    found = [dict(zip(("train", "tokens_per_second", "device"), one, strict=True)) for one in rows]
    Path("speeds.json").write_text(json.dumps({"rows": [*found, {"row": "failed", "error": "x"}]}))
    given = ["out", "--entry", "methods", "--rows", "mdlm,gidd-0", "--budget", "0.5", "--speeds", "speeds.json", *COMMON]
    assert text.main(given) == 0
    assert row("mdlm")["budget"]["tokens_per_second"] == 64 * 25 and row("mdlm")["budget"]["steps"] == 12
    assert row("mdlm")["tokens"] == 12 * 64
    probed = {name: json.loads(Path(f"out/budgets/{name}.json").read_text())["probe_seconds"] for name in ("mdlm", "gidd-0")}
    assert probed["mdlm"] < 0.1 < probed["gidd-0"]
    Path("speeds.json").write_text("[]")
    assert text.main(["new", *given[1:]]) == 2
    assert "speeds.json is no result file" in capsys.readouterr().err and not Path("new").exists()


def test_speed_of_a_run_with_two_halves(text):
    """The harmonic mean of the halves is all tokens over all seconds, whatever compilation and validation take."""
    seconds = [9.0, *[2.0] * 5, 7.0, *[2.0] * 4, *[1.0] * 4, 30.0, *[1.0] * 6]  # of intervals of 100 tokens
    clock = [sum(seconds[: i + 1]) for i in range(len(seconds))]
    records = [{"tokens": 100 * (i + 1), "seconds": now} for i, now in enumerate(clock)]
    assert text.speed_of_halves(records) == pytest.approx(2200 / (11 * 2 + 11 * 1))
    assert text.speed_of_halves(records[:2]) == pytest.approx(50)
    assert text.speed_of_halves(records[:1]) == pytest.approx(100 / 9)


def test_seconds_of_an_interrupted_run_are_those_of_all_starts(text):
    Path("run").mkdir()
    records = [
        {"step": 1, "seconds": 5.0},
        {"step": 2, "seconds": 8.0},
        {"step": 3, "seconds": 3.0},
        {"step": 4, "seconds": 4.5},
    ]
    Path("run/log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert text.logged_seconds(Path("run")) == 12.5 and text.logged_seconds(Path("nothing")) == 0


def test_the_old_recipe_is_that_of_the_preset_owt(text):
    """Except for the run's length, batch, warmup and average, which the tables have in common."""
    options = text.ENTRIES["owt-fast"].rows["m2s-offset-old"]
    config = text.PRESETS["owt-fast"]
    for key, value in options.items():
        config = text.replace(config, key, value)
    old = text.PRESETS["owt"]
    assert config.network == old.network and config.run.importance == old.run.importance
    for name in ("kind", "lr", "beta1", "beta2", "decay", "weight_decay", "clip"):
        assert getattr(config.optimizer, name) == getattr(old.optimizer, name)
