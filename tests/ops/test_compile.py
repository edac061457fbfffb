"""Every kernel compiles for GPUs, also on a machine without one: the interpreter accepts code that the compiler rejects.

Values must stay in registers: a spill would mean more memory traffic than docs/kernels.md counts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
WITHOUT_LOOPS = ("adamw", "group norm", "rotary", "uniforms")


def test_kernels_compile_without_spills(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(ROOT / "benchmarks" / "resources.py"), "--out", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())["kernels"]
    committed = json.loads((ROOT / "benchmarks" / "results" / "resources.json").read_text())["kernels"]
    assert found.keys() == committed.keys()
    for name, one in found.items():
        assert one["spilled_bytes"] == 0 and (one["loops"] or name.startswith(("adamw", "group norm", "rotary", "uniforms"))), (
            name
        )
