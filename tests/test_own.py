"""What docs/own.md tells people to do, done as it says, in a copy of the package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "m2s", tmp_path / "m2s")
    return tmp_path


def m2s(folder: Path, *arguments: str) -> str:
    """One command of the package in that folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "m2s.cli", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_method_is_one_file_and_one_name(copied: Path) -> None:
    page = (ROOT / "docs" / "own.md").read_text().partition("## Adding a method")[2]
    introduction, _, rest = page.partition("```python\n")
    block, package = rest.partition("```")[0], copied / "m2s" / "method"
    file = re.search(r"`(m2s/method/[a-z]+\.py)`", introduction)
    assert file is not None and "`mine.MINE`" in introduction
    (copied / file[1]).write_text(block)
    names = (package / "__init__.py").read_text()
    names = names.replace("import autoregressive, ", "import autoregressive, mine, ").replace(
        "    )\n}", "        mine.MINE,\n    )\n}"
    )
    assert names.count("mine") == 2
    (package / "__init__.py").write_text(names)

    name = re.search(r'name="([\w-]+)"', block)
    assert name is not None
    assert "@misc{mine," in m2s(copied, "cite", name[1])
    m2s(
        copied,
        "train",
        "digits",
        "--method",
        name[1],
        "--steps",
        "2",
        "--batch",
        "4",
        "--validation-samples",
        "4",
        "--out",
        "run",
    )
    resolved = json.loads((copied / "run" / "train.json").read_text())["config"]
    assert (resolved["method"], resolved["process"]["schedule"], resolved["head"]["offset"]) == (name[1], "cosine", "exact")
