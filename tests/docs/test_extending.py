"""What docs/extending.md tells people to do, done as it says, in a copy of the package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]


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
    page = (ROOT / "docs" / "extending.md").read_text().partition("## Adding a method")[2]
    introduction, _, rest = page.partition("```python\n")
    block, package = rest.partition("```")[0], copied / "m2s" / "method"
    file = re.search(r"`(m2s/methods/[a-z]+\.py)`", introduction)
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


def test_every_part_is_there_after_one_import() -> None:
    """As the documents name them; and what is heavy waits until it is asked for."""
    page = (ROOT / "docs" / "extending.md").read_text()
    assert "`m2s.evaluation.bound(" in page and "`m2s.training.train(" in page
    heavy = ("triton", "matplotlib", "torch._dynamo", "m2s.training", "m2s.benchmark", "m2s.cli", "m2s.evaluation.bpd")
    code = f"""
import sys, m2s
assert not [name for name in {heavy} if name in sys.modules]
assert callable(m2s.evaluation.bpd.bound) and m2s.evaluation.bound is m2s.evaluation.bpd.bound and callable(m2s.training.train)
assert m2s.audit is m2s.evaluation.audit.audit
for name in m2s.PARTS:
    assert getattr(m2s, name).__name__ == "m2s." + name
for name in m2s.evaluation.PARTS:
    assert getattr(m2s.evaluation, name).__name__ == "m2s.evaluation." + name
for package in (m2s, m2s.evaluation):
    assert all(hasattr(package, name) for name in package.__all__) and not hasattr(package, "trian")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)


def test_a_list_of_parts_is_what_there_is() -> None:
    import m2s as package

    for folder, parts, eager in (
        (ROOT / "m2s", package.PARTS, {"belief", "hub", "objective", "ops", "process", "realizability", "sampler"}),
        (ROOT / "m2s" / "evaluate", package.evaluation.PARTS, set()),
    ):
        there = {path.parent.name for path in folder.glob("*/__init__.py")} or {path.stem for path in folder.glob("*.py")}
        assert there - {"__init__"} == {*parts} | eager and all(hasattr(package, name) for name in eager)


KIND = """
import m2s, sys, torch
from dataclasses import dataclass

@dataclass(frozen=True)
class Config:
    states: int

class Own(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.table = config, torch.nn.Embedding(config.states, config.states)

    def forward(self, x_t, t):
        return self.table(x_t)

m2s.models.NETWORKS.add("own", (Config, Own))
"""


def test_a_network_of_ones_own_in_another_program(tmp_path: Path) -> None:
    import m2s as package

    save = "m2s.hub.save(sys.argv[1], Own(Config(5)), m2s.Posterior(m2s.Uniform(5, m2s.Linear())))"
    subprocess.run([sys.executable, "-c", KIND + save, str(tmp_path)], check=True, cwd=ROOT, timeout=300)
    with pytest.raises(ValueError, match=r"kind is 'own', .* of your own with m2s\.models\.NETWORKS\.add\(.* first"):
        package.load(tmp_path)
    subprocess.run([sys.executable, "-c", KIND + "m2s.load(sys.argv[1])", str(tmp_path)], check=True, cwd=ROOT, timeout=300)


@pytest.mark.parametrize("config", [{"width": 64}, None], ids=["config", "no config"])
def test_a_folder_of_the_hubs_mixin(config: dict | None, tmp_path: Path) -> None:
    """As PyTorchModelHubMixin.save_pretrained leaves it: weights, and arguments where there are any."""
    import m2s as package

    save_file({"table.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        (ValueError, FileNotFoundError), match="PyTorchModelHubMixin wrote: load it by its class's from_pretrained"
    ):
        package.load(tmp_path)
