"""`m2s evaluate bpd` where the numbers are not finite: NaN is an error, an infinite NELBO is a value."""

import dataclasses
import json

import pytest
import torch

import m2s
from m2s.cli import main
from m2s.evaluation import bpd
from m2s.hub import save
from m2s.models import DiT, DiTConfig

DATA = {"kind": "image", "shape": [8, 8], "levels": 17}
QUICK = ["--data", "digits", "--limit", "2", "--passes", "2", "--device", "cpu"]


def checkpoint(folder, value=None):
    """Save a network; with `value`, all of its weights are that."""
    torch.manual_seed(0)
    model = DiT(DiTConfig(17, width=16, depth=1, heads=2, condition_width=8))
    for weight in model.parameters() if value is not None else ():
        torch.nn.init.constant_(weight, value)
    return save(folder, model, m2s.Posterior(m2s.Uniform(17, m2s.Linear()), "exact"), DATA)


def test_a_network_that_overflows_is_an_error(tmp_path, capsys):
    bad, good, out = checkpoint(tmp_path / "bad", 3e38), checkpoint(tmp_path / "good"), tmp_path / "b.json"
    for models in ([str(bad)], [str(good), "--against", str(bad)]):
        with pytest.raises(SystemExit) as stop:
            main(["evaluate", "bpd", *models, *QUICK, "--out", str(out)])
        error = capsys.readouterr().err.splitlines()[-1]
        assert stop.value.code == 2 and f"the NELBO of {bad} is not a number" in error
        assert not out.exists() and not out.with_suffix(".png").exists()


def test_an_infinite_nelbo_is_a_value(tmp_path, monkeypatch, capsys):
    def infinite(*arguments):
        found = estimate(*arguments)
        return dataclasses.replace(found, reconstruction=torch.full_like(found.reconstruction, torch.inf))

    estimate, out = bpd.dataset_nelbo, tmp_path / "b.json"
    monkeypatch.setattr(bpd, "dataset_nelbo", infinite)
    main(["evaluate", "bpd", str(checkpoint(tmp_path / "run")), *QUICK, "--out", str(out)])
    assert "inf" in capsys.readouterr().out
    assert json.loads(out.read_text())["nelbo"]["bits"]["value"] is None
