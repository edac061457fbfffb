"""Commands that keep no state: nothing unfinished has the name of a result, and a finished result is replaced on request."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import m2s
import m2s.hub
from m2s.benchmark import PARTS
from m2s.cli import COMMANDS, main
from m2s.cli.options import command_options, subcommands
from m2s.models import DiT, DiTConfig
from m2s.provenance import is_rerun, recorded_command

PART = {"what": "nothing", "contenders": {}, "ratios": {}, "bars": [], "skipped": []}


def test_every_command_that_writes_a_result_has_the_option() -> None:
    """`m2s train`, `m2s demo` and `m2s data` write folders, which resume. `m2s convert` takes the folder by its position."""
    assert "--overwrite" in command_options(COMMANDS["convert"])
    kinds = [kind for name, kind in COMMANDS.items() if name not in ("train", "demo", "data", "cite", "convert")]
    for command in (leaf for kind in kinds for leaf in (subcommands(kind).values() or [kind])):
        assert {"--out", "--overwrite"} <= set(command_options(command)), command


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of digits and two files of tokens."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    head = m2s.Posterior(m2s.Uniform(17, m2s.Linear()))
    model = DiT(DiTConfig(17, width=16, depth=1, heads=2, condition_width=8, length=64))
    m2s.hub.save(tmp_path / "run", model, head, {"kind": "image", "shape": [8, 8], "levels": 17})
    for name in ("a", "b"):
        np.savez(f"{name}.npz", tokens=np.random.default_rng(0).integers(0, 5, (8, 6)))
    monkeypatch.setattr(PARTS, "_entries", {"loss": lambda setting: PART, "train": lambda setting: PART})
    monkeypatch.setattr("m2s.report.toy.write_toy", lambda out, seed: out.write_text("a figure"))  # it takes seconds
    return tmp_path


COMMAND_LINES = {
    "benchmark": "benchmark --quick --device cpu --out x.json",
    "bpd": "evaluate bpd run --data digits --limit 4 --passes 2 --device cpu --out x.json",
    "metric": "evaluate pixels a.npz --reference b.npz --levels 5 --out x.json",
    "figure": "figure toy --out x.svg",
}


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_a_finished_result_is_replaced_on_request_only(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = COMMAND_LINES[name].split()
    out = place / words[-1]
    main(words)
    finished = out.read_bytes()
    out.write_bytes(b"mine")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2 and out.read_bytes() == b"mine"
    assert capsys.readouterr().err == f"m2s: {out.name} is there already: give another --out, or --overwrite to replace it\n"
    main([*words, "--overwrite"])
    assert out.read_bytes() != b"mine" and len(out.read_bytes()) > len(finished) // 2


def test_an_interrupted_benchmark_starts_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    words = COMMAND_LINES["benchmark"].split()
    monkeypatch.setitem(PARTS._entries, "train", interrupted)
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 130 and "the same command starts again" in capsys.readouterr().err
    assert not (place / "x.json").exists()
    assert list(json.loads((place / "x.partial.json").read_text())["parts"]) == ["loss"]
    monkeypatch.setitem(PARTS._entries, "train", lambda setting: PART)
    main(words)
    assert list(json.loads((place / "x.json").read_text())["parts"]) == ["loss", "train"]
    assert not (place / "x.partial.json").exists()


def test_a_command_that_runs_others_replaces_its_own_results(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`m2s demo`, given again, evaluates again."""
    words = COMMAND_LINES["bpd"].split()
    out = place / "x.json"
    for _ in range(2):
        with recorded_command(["m2s", *words]):
            main(words)
            assert is_rerun(out)
    assert not is_rerun(out)
    with recorded_command(["m2s", *words, "--seed", "1"]), pytest.raises(SystemExit):
        main([*words, "--seed", "1"])
    assert "is there already" in capsys.readouterr().err
