"""`benchmarks/revisions.py`: times of two revisions, their ratio, and the spread between runs of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, name: str, revision: str, milliseconds: float, device: str = "cuda (GPU)") -> str:
    """Write a result of `m2s benchmark` with one contender in common, and return the name of its file."""
    contenders = {"fused": {"median_ms": milliseconds}, f"only in {revision}": {"median_ms": 1.0}}
    found = {
        "device": device,
        "setting": {"rows": 8},
        "versions": {"git": revision},
        "parts": {"train": {"contenders": contenders}},
    }
    (folder / name).write_text(json.dumps(found))
    return name


def compare(folder: Path, before: list[str], after: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the script in a folder."""
    command = [sys.executable, str(ROOT / "benchmarks" / "revisions.py"), "--before", *before, "--after", *after]
    environment = {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, "--out", "found.json"], cwd=folder, env=environment, capture_output=True, text=True)


def test_ratio_and_spread(tmp_path):
    before = [run(tmp_path, "a.json", "old", 9.0), run(tmp_path, "b.json", "old", 11.0)]
    after = [run(tmp_path, "c.json", "new", 12.0), run(tmp_path, "d.json", "new", 12.0)]
    done = compare(tmp_path, before, after)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["contenders"].keys() == {"train: fused"}
    one = found["contenders"]["train: fused"]
    assert one == {"before_ms": [9, 11], "after_ms": [12, 12], "ratio": pytest.approx(1.2), "spread": pytest.approx(0.2)}
    assert (found["before"]["git"], found["after"]["git"]) == ("old", "new")


def test_files_of_different_runs_are_an_error(tmp_path):
    old, new = run(tmp_path, "a.json", "old", 9.0), run(tmp_path, "b.json", "new", 9.0)
    mixed = compare(tmp_path, [old, new], [new])
    assert mixed.returncode == 2 and "one revision" in mixed.stderr
    elsewhere = run(tmp_path, "c.json", "new", 9.0, device="cpu (x86_64)")
    other = compare(tmp_path, [old], [elsewhere])
    assert other.returncode == 2 and "same device" in other.stderr
    assert not (tmp_path / "found.json").exists()
