"""The part `plain-loop` of `m2s benchmark`, and `benchmarks/train.py`, which measures it for the networks of presets."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from m2s.benchmark import PARTS, Setting
from m2s.benchmark.plain_loop import FORMS
from m2s.benchmark.train import RandomTokens, configuration

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "train.py"
TINY = Setting(torch.device("cpu"), rows=16, vocab=50, width=16, repeats=2, depth=1)


def test_both_forms_take_a_step_of_the_same_loss() -> None:
    """Both train the same network on the same examples. The noise differs, so that the first losses agree roughly."""
    source = RandomTokens(TINY.vocab, TINY.length)
    losses = {}
    for name, make in FORMS.items():
        step, model = make(configuration(TINY, "auto"), source)
        losses[name] = sum(step() for _ in range(40)) / 40
        assert sum(weight.numel() for weight in model.parameters()) > 0
    assert losses["m2s"] == pytest.approx(losses["plain"], rel=0.2)


def test_numbers_of_the_part() -> None:
    part = PARTS["plain-loop"](TINY)
    assert list(part["contenders"]) == ["plain", "m2s"] and part["skipped"] == []
    for one in part["contenders"].values():
        assert one["tokens_per_second"] == pytest.approx(TINY.batch * TINY.length / one["median_ms"] * 1e3)
        assert one["mfu"] == pytest.approx(one["tokens_per_second"] * part["operations_a_token"] / part["matrix_rate"])
    median = {name: one["median_ms"] for name, one in part["contenders"].items()}
    assert part["ratios"]["plain / m2s"] == part["bars"][0]["measured"] == pytest.approx(median["plain"] / median["m2s"])
    assert [bar["met"] for bar in part["bars"]] == [None, None]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the script on small networks, and return its exit code."""
    spec = importlib.util.spec_from_file_location("benchmark_train", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "DATA", {"owt": (50, 8, None), "mnist": (16, 64, (8, 8))})

    def run(*arguments: str) -> int:
        small = ["--batch", "2", "--device", "cpu", "--compile", "no", "--repeats", "2", "--rounds", "1"]
        monkeypatch.setattr(sys, "argv", ["train.py", *small, *arguments])
        return module.main()

    return run


WIDTHS = {"owt": ["network.width=64", "network.heads=1", "network.depth=1"], "mnist": ["network.width=8"]}


@pytest.mark.parametrize("network", WIDTHS)
def test_the_script_writes_the_numbers_of_the_recorded_files(network: str, script, tmp_path: Path, capsys) -> None:
    assert script("--network", network, "--set", *WIDTHS[network]) == 0
    found = json.loads((tmp_path / f"train-{network}.json").read_text())
    recorded = json.loads((SCRIPT.parent / "results" / "train-owt.json").read_text())
    of_machine = {"torch", "cpu", "threads", "start_s"}  # in files of earlier versions; now `versions` and `device`
    without_mfu = {"mfu", "operations_a_token", "matrix_rate"} if network != "owt" else set()
    assert recorded.keys() - of_machine - without_mfu <= found.keys() and found["versions"]
    for key in ("median_ms", "peak_gib", "tokens_per_second", "rows_per_second"):
        assert found[key].keys() == recorded[key].keys()
    assert found["times_faster"] == pytest.approx(found["median_ms"]["plain"] / found["median_ms"]["m2s"])
    assert "times faster than the plain loop" in capsys.readouterr().out


def test_one_form_with_a_profile_writes_no_result(script, tmp_path: Path) -> None:
    profile = tmp_path / "profile.txt"
    assert script("--network", "mnist", "--measure", "plain", "--profile", str(profile), "--set", *WIDTHS["mnist"]) == 0
    assert "aten::" in profile.read_text() and list(tmp_path.iterdir()) == [profile]
