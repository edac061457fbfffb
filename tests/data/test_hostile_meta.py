"""meta.json of a prepared text that others wrote: its names do not reach the terminal, and missing values are errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m2s.cli import main
from m2s.data import Bytes, prepare_text
from m2s.errors import print_escaped
from small_runs import user_error

CLEAR = "\x1b[2J"  # clears the screen of a terminal


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(f"document {i}\n" for i in range(20)))
    prepare_text(tmp_path / "a.txt", tmp_path / "packed", Bytes())
    return tmp_path / "packed"


def change(packed: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change meta.json."""
    meta = json.loads((packed / "meta.json").read_text())
    edit(meta)
    (packed / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("edit", "wrong"),
    [
        (lambda meta: meta["tokenizer"].update(kind=CLEAR), "tokenizer"),
        (lambda meta: meta["tokenizer"].pop("kind"), "tokenizer"),
        (lambda meta: meta["splits"].update({CLEAR: meta["splits"]["test"]}), "split"),
        (lambda meta: meta["splits"].update(more=meta["splits"]["test"]), "split"),
    ],
)
def test_names_that_no_preparation_writes(packed, capsys, edit, wrong):
    change(packed, edit)
    error = user_error(capsys, "data", "check", str(packed))
    assert "meta.json is damaged" in error and wrong in error and error[:-1].isprintable()


def test_escape_sequences_in_the_users_own_names(tmp_path, packed, capsys, monkeypatch):
    """A folder may have been named by a file of others."""
    odd = tmp_path / f"odd{CLEAR}"
    packed.rename(odd)
    main(["data", "check", str(odd)])
    monkeypatch.setenv("M2S_DATA", str(tmp_path))
    main(["data", "list"])
    run = tmp_path / f"run{CLEAR}"
    options = ["--steps", "1", "--batch", "4", "--network.width", "8", "--validation-samples", "4", "--device", "cpu"]
    main(["train", "digits", "--out", str(run), *options])
    main(["sample", str(run), "--out", str(tmp_path / f"s{CLEAR}.npz"), "--n", "1", "--steps", "1", "--device", "cpu"])
    printed = "".join(capsys.readouterr())
    assert "\x1b[2J" not in printed and printed.count("\\x1b[2J") >= 5


def test_lines_stay_lines(capsys):
    print_escaped("a\tb\n" + CLEAR)
    assert capsys.readouterr().out == "a\tb\n\\x1b[2J\n"


@pytest.mark.parametrize(
    ("edit", "wrong"),
    [
        (lambda meta: meta.update(counts={"x": {}}), "counts"),
        (lambda meta: meta.pop("counts"), "counts"),
        (lambda meta: meta.pop("sources"), "sources"),
        (lambda meta: meta.pop("end"), "end"),
        (lambda meta: meta["splits"]["train"].pop("documents"), "counts of the split"),
    ],
)
def test_values_that_every_preparation_writes(packed, capsys, edit, wrong):
    change(packed, edit)
    error = user_error(capsys, "data", "check", str(packed))
    assert "meta.json is damaged" in error and wrong in error


def test_a_file_that_does_not_say_how_documents_were_divided(packed, capsys):
    change(packed, lambda meta: meta.pop("validation_fraction", None))
    change(packed, lambda meta: meta["splits"]["validation"].update(documents=0))
    main(["data", "check", str(packed)])
    assert "has the SHA-256" in capsys.readouterr().out


def test_a_file_of_version_0_1(packed, capsys):
    """It has no dtype, and all that is required now."""
    change(packed, lambda meta: meta.pop("dtype"))
    main(["data", "check", str(packed)])
    assert "has the SHA-256" in capsys.readouterr().out
