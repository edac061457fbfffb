"""experiments/leaderboard.py: the score of an entry, what is checked, and the numbers of docs/leaderboard.md."""

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch

import m2s
from m2s.data import Bytes, Tokens, prepare_text
from m2s.presets import PRESETS
from m2s.training import train
from m2s.training.config import replace

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments"
LENGTH = 16


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A small prepared text."""
    folder = tmp_path_factory.mktemp("text")
    documents = [f"document {number} has größe {number * number}" for number in range(60)]
    (folder / "source.txt").write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    prepare_text(folder / "source.txt", folder / "packed", Bytes(), validation_fraction=0.2)
    return folder / "packed"


def trained(text: Path, out: Path, method: str, seed: int) -> Path:
    """A run of a tiny network."""
    settings = {"method": method, "out": out, "data.folder": str(text), "data.length": LENGTH, "steps": 3, "batch": 4}
    settings |= {"seed": seed, "device": "cpu", "network.size": "tiny", "network.width": 16, "network.depth": 1}
    settings |= {"network.heads": 2, "optimizer.warmup": 1, "importance": None if method == "ar" else 0.1}
    config = PRESETS["owt-fast"]
    for key, value in settings.items():
        config = replace(config, key, value)
    train(config, quiet=True)
    return out


@pytest.fixture(scope="module")
def runs(text, tmp_path_factory) -> Path:
    """The folder of an entry, with one run of each kind."""
    folder = tmp_path_factory.mktemp("entry")
    for name, method, seed in (("diffusion", "m2s-offset", 1), ("autoregressive", "ar", 2)):
        run = trained(text, folder / name, method, seed)
        record = json.loads((run / "train.json").read_text())
        record["starts"][0]["gpu"] = "NVIDIA H200"
        (run / "train.json").write_text(json.dumps(record))
    return folder


@pytest.fixture
def leaderboard(text, runs, tmp_path, monkeypatch):
    """The script as a module, with the rules of the small text, in a folder with an entry."""
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("leaderboard_script", FOLDER / "leaderboard.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "LENGTH", LENGTH)
    monkeypatch.setattr(module, "RULES", tmp_path / "rules" / "leaderboard-data.json")
    Path("rules").mkdir()
    assert module.main(["data", "rules", "--data", str(text)]) == 0
    shutil.copytree(runs, "entry")
    write_entry(["diffusion"])
    return module


def write_entry(folders: list[str], **changes: object) -> None:
    seeds = {"diffusion": 1, "autoregressive": 2}
    listed = [
        {"folder": name, "seed": seeds.get(name, 3), "seconds": 1000.0, "command": "m2s train", **changes} for name in folders
    ]
    entry = {"name": "ours", "method": "m2s-offset", "code": "a commit", "runs": listed}
    Path("entry/entry.json").write_text(json.dumps(entry))


def verify(leaderboard, text: Path, *more: str) -> int:
    return leaderboard.main(["verify", "entry", "--data", str(text), *more])


def test_the_score_is_all_nats_over_all_bytes(leaderboard, text, capsys):
    write_entry(["diffusion", "autoregressive"])
    assert verify(leaderboard, text) == 0
    diffusion, exact = json.loads(Path("entry/verified.json").read_text())["runs"]
    held_out = Tokens(text, "validation", LENGTH)
    windows = torch.stack([held_out[i] for i in range(len(held_out))])
    bytes_ = sum(len(Bytes().token_bytes(token)) for token in windows.flatten().tolist())
    # An autoregressive network: its log-likelihood, computed here from its logits.
    model, head = m2s.load("entry/autoregressive")
    elbo = m2s.elbo(model, head, windows)
    nats = float(elbo.mean()[0]) * len(windows)
    assert exact["exact"] and leaderboard.bits_per_byte(exact) == pytest.approx(nats / math.log(2) / bytes_, rel=1e-5)
    terms = {name: value["bits_per_byte"]["value"] for name, value in diffusion["terms"].items()}
    assert terms["nelbo"] == pytest.approx(terms["integral"] + terms["prior"] + terms["reconstruction"])
    assert min(terms.values()) >= 0 < terms["reconstruction"]
    mean = (leaderboard.bits_per_byte(diffusion) + leaderboard.bits_per_byte(exact)) / 2
    assert f"| ours | m2s-offset | {mean:.4f} ± " in capsys.readouterr().out
    assert diffusion["windows"] == len(held_out)


def test_a_trial_uses_some_windows_and_writes_nothing(leaderboard, text, capsys):
    assert verify(leaderboard, text, "--windows", "2") == 0
    assert "on 2 windows" in capsys.readouterr().out and not Path("entry/verified.json").exists()
    assert verify(leaderboard, text, "--windows", "0") == 2


def change_record(**changes: object) -> None:
    path = Path("entry/diffusion/train.json")
    record = json.loads(path.read_text())
    for key, value in changes.items():
        section, name = key.split("__")
        part = record["starts"][0] if section == "starts" else record["config"]["run"] if section == "run" else record[section]
        part[name] = value
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: write_entry(["diffusion"], seconds=1801.0), "took 1801 s, but the rules allow 1800"),
        (lambda: write_entry(["diffusion"], seconds=1e-9), "s of training, but entry.json has 1e-09 s"),
        (lambda: write_entry(["diffusion"], seed=3), "has run.seed 1, expected 3"),
        (lambda: write_entry(["diffusion", "diffusion"]), "runs with the same seed"),
        (lambda: write_entry(["missing"]), "train.json"),
        (lambda: write_entry([]), "has no list of runs"),
        (lambda: write_entry(["diffusion"], command=None), "has command None"),
        (lambda: Path("entry/entry.json").unlink(), "entry.json"),
        (lambda: change_record(starts__gpu="NVIDIA H100"), "expected one H200"),
        (lambda: change_record(starts__processes=8), "expected one process"),
        (lambda: change_record(data__sha256="0" * 64), "has data.sha256 0000"),
        (lambda: change_record(run__init="runs/other"), "expected none: random weights"),
        (lambda: Path("entry/diffusion/model.safetensors").write_bytes(b"damaged"), "cannot be loaded"),
    ],
)
def test_entries_against_the_rules_are_errors(leaderboard, text, capsys, change, message):
    change()
    assert verify(leaderboard, text) == 2
    assert message in capsys.readouterr().err and not Path("entry/verified.json").exists()


def test_other_text_is_an_error(leaderboard, text, tmp_path, capsys):
    other = tmp_path / "source.txt"
    other.write_text("\n<|endoftext|>\n".join(f"another document {number}" for number in range(60)))
    prepare_text(other, tmp_path / "other", Bytes(), validation_fraction=0.2)
    assert leaderboard.main(["verify", "entry", "--data", str(tmp_path / "other")]) == 2
    assert "was made from source.txt with SHA-256" in capsys.readouterr().err
    prepare_text(text.parent / "source.txt", tmp_path / "split", Bytes(), validation_fraction=0.4)
    assert leaderboard.main(["verify", "entry", "--data", str(tmp_path / "split")]) == 2
    assert "holds other tokens than the rules" in capsys.readouterr().err
    shutil.copytree(text, tmp_path / "damaged")
    path = tmp_path / "damaged" / "validation-00000.bin"
    path.write_bytes(bytes(len(path.read_bytes())))
    assert leaderboard.main(["verify", "entry", "--data", str(tmp_path / "damaged")]) == 2


def test_numbers_of_the_rules_are_those_of_the_text():
    page = (ROOT / "docs" / "leaderboard.md").read_text()
    rules = json.loads((FOLDER / "results" / "leaderboard-data.json").read_text())
    for source in rules["sources"]:
        assert f"| `{source['name']}` | {source['bytes']:,} | `{source['sha256']}` |" in page
    train, held_out = (rules["splits"][name]["tokens"] for name in ("train", "validation"))
    assert f"{train:,} tokens to train on and {held_out:,} held-out tokens" in page
    assert f"{rules['validation_windows']:,} windows of {rules['window']}" in page
    assert rules["validation_windows"] == held_out // rules["window"] and rules["train_windows"] == train // rules["window"]
