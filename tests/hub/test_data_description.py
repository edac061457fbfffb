"""The entry "data" of a checkpoint's config.json fits the network and the process, or loading is an error."""

import json

import pytest
import torch

import m2s
from m2s import hub
from m2s.models import DiT, DiTConfig, UNet, UNetConfig
from small_runs import user_error

DATA = {"kind": "image", "shape": [8, 8], "levels": 17}


def saved(folder, kind="dit", length=64):
    """Save a small network of images."""
    torch.manual_seed(0)
    model = DiT(DiTConfig(17, width=16, depth=1, heads=2, condition_width=8, length=length))
    if kind == "unet":
        model = UNet(UNetConfig(17, (8, 8), width=8, layers=1, multipliers=(1,), groups=4))
    return hub.save(folder, model, m2s.Posterior(m2s.Uniform(17, m2s.Linear())), DATA)


def describe(folder, **changes):
    """Change the description of the data."""
    config = json.loads((folder / "config.json").read_text())
    config["data"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


HUGE = [2147483648, 2147483648]
WRONG = [{"shape": [8, 8, 3]}, {"shape": HUGE}, {"levels": 2}, {"levels": 256}, {"levels": 2**70}]


@pytest.mark.parametrize("changes", WRONG)
@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_a_description_that_does_not_fit(tmp_path, capsys, kind, changes):
    run, out = saved(tmp_path / "run", kind), tmp_path / "s.png"
    describe(run, **changes)
    error = user_error(capsys, "sample", str(run), "--out", str(out), "--n", "1", "--steps", "1", "--device", "cpu")
    assert f"data.{next(iter(changes))}" in error and not out.exists()


def test_a_network_without_a_limit(tmp_path):
    run = saved(tmp_path / "run", length=None)
    describe(run, shape=[16, 8])
    assert m2s.load(run).data["shape"] == [16, 8]
    describe(run, shape=HUGE)
    with pytest.raises(ValueError, match=r"data\.shape"):
        m2s.load(run)
