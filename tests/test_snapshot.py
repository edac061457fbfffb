"""`scripts/snapshot.py --check` finds the recorded values, and finds a changed one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "snapshot.py"
RECORD = json.loads(SCRIPT.with_suffix(".json").read_text())
SECTIONS = ("processes", "elbo")  # a few seconds; "heads" has a value near 1e37 whose last bits depend on the LAPACK

pytestmark = pytest.mark.skipif(
    (RECORD["header"]["torch"], RECORD["header"]["cpu_capability"])
    != (str(torch.__version__), torch.backends.cpu.get_cpu_capability()),
    reason="the record was made with another torch or CPU, and is not compared exactly",
)


def check(path: Path, *sections: str) -> subprocess.CompletedProcess[str]:
    """Compare sections of the library with a record."""
    command = [sys.executable, str(SCRIPT), "--check", "--file", str(path), "--only", *sections]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_recorded_values_are_found() -> None:
    done = check(SCRIPT.with_suffix(".json"), *SECTIONS)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_changed_value_is_found(tmp_path: Path) -> None:
    name = next(key for key in RECORD["entries"] if key.startswith("processes/"))
    entries = {key: value for key, value in RECORD["entries"].items() if key.startswith("processes/")}
    changed = tmp_path / "record.json"
    changed.write_text(json.dumps({"header": RECORD["header"], "entries": {**entries, name: "0.123"}}))
    done = check(changed, "processes")
    assert done.returncode == 1 and name in done.stdout
