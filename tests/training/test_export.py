"""`export_state`: the checkpoint of an earlier state is the one that the run had published at that step."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import m2s
from m2s.errors import UserError
from m2s.training import save, train
from m2s.training.export import export_state
from small_runs import random_rows, small


def test_checkpoint_of_a_state_is_the_one_published_at_its_step(tmp_path, monkeypatch):
    publish = save.publish

    def publish_and_copy(trainer):
        publish(trainer)
        shutil.copytree(trainer.config.run.out, tmp_path / f"published-{trainer.progress.step}", ignore=lambda *_: ["state"])

    monkeypatch.setattr(save, "publish", publish_and_copy)
    run = tmp_path / "run"
    train(small(run, **{"keep": 3}), random_rows())
    latest = m2s.load(run)
    for step in (4, 8, 12):
        found = m2s.load(export_state(run, step, tmp_path / f"exported-{step}"))
        expected = m2s.load(tmp_path / f"published-{step}")
        assert found.config["extra"] == expected.config["extra"] and found.config["extra"]["step"] == step
        assert repr(found.head) == repr(expected.head) and found.data == expected.data
        weights = found.model.state_dict()
        assert weights.keys() == expected.model.state_dict().keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.model.state_dict().items())
        same = all(torch.equal(weights[name], value) for name, value in latest.model.state_dict().items())
        assert same == (step == 12)


def test_missing_or_damaged_state_is_an_error(tmp_path):
    run = tmp_path / "run"
    train(small(run, **{"keep": 3}), random_rows())
    with pytest.raises(UserError, match=r"no intact state of step 5 .* its states are of the steps 4, 8, 12"):
        export_state(run, 5, tmp_path / "exported")
    info: Path = run / "state" / "step-00000008" / "state.json"
    info.write_text(json.dumps({**json.loads(info.read_text()), "tokens": 1}))
    with pytest.raises(UserError, match="no intact state of step 8"):
        export_state(run, 8, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
