"""`--micro-batch auto`: the library's rule, and the number of an unfinished run, also of one before that rule."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import m2s
import m2s.hub
from m2s.cli import main
from m2s.models import DiT, DiTConfig

pytestmark = pytest.mark.usefixtures("default_rows")


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of an unconstrained score of 12 tokens, which can be sampled, audited and repaired."""
    torch.manual_seed(3)
    model = DiT(DiTConfig(states=5, width=16, depth=1, heads=2, condition_width=8, length=12))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    head = m2s.LogScore(m2s.Uniform(5, m2s.Linear()))
    return str(m2s.hub.save(tmp_path_factory.mktemp("free"), model, head, {"kind": "text", "length": 12}))


def settings(path: Path) -> dict:
    with np.load(path, allow_pickle=False) as file:
        return json.loads(str(file["settings"]))


def test_a_new_run_uses_the_rule_of_the_library(free: str, tmp_path: Path) -> None:
    main(["sample", free, "--n", "3", "--steps", "2", "--out", str(tmp_path / "a.npz")])
    assert settings(tmp_path / "a.npz")["micro_batch"] == m2s.samplers.default_micro_batch(12) == 512
    with np.load(tmp_path / "a.npz") as file:
        expected = m2s.sample(*m2s.load(free), (3, 12), steps=2, seed=0)
        assert np.array_equal(file["tokens"], expected.numpy())


def test_sample_resumes_with_the_number_that_was_recorded(
    free: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sample", free, "--n", "8", "--steps", "2", "--batch-size", "4", "--out", str(tmp_path / "a.npz")]
    main([*command, "--micro-batch", "16", "--shard", "0/2"])
    main(command)
    assert "resuming: 4 of 8" in capsys.readouterr().out
    assert settings(tmp_path / "a.npz")["micro_batch"] == 16
    (tmp_path / "b.npz").write_bytes((tmp_path / "a.npz").read_bytes())
    main([*command[:-1], str(tmp_path / "b.npz"), "--overwrite"])  # a new run, with the new rule
    assert settings(tmp_path / "b.npz")["micro_batch"] == 512


def test_another_number_that_is_given_is_an_error(free: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sample", free, "--n", "8", "--steps", "2", "--batch-size", "4", "--out", str(tmp_path / "a.npz")]
    main([*command, "--micro-batch", "16", "--shard", "0/2"])
    with pytest.raises(SystemExit):
        main([*command, "--micro-batch", "32"])
    assert "micro_batch 16 there and 32 here" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["audit", "repair"])
def test_audit_and_repair_resume_with_the_number_that_was_recorded(name: str, free: str, tmp_path: Path) -> None:
    """The folder of batches is that of a run with 16 rows, before its first batch."""
    out = tmp_path / name
    command = [name, free, "--n", "4", "--steps", "2", "--batch-size", "4", "--out", str(out)]
    command += ["--measure", "none"] if name == "repair" else []
    main([*command, "--micro-batch", "16"])
    result = json.loads((out / f"{name}.json").read_text())
    recorded = result["settings"] if name == "audit" else result["audits"]["projected"]["settings"]
    assert recorded["micro_batch"] == 16
    for path in out.iterdir():
        path.unlink()
    folder = out / ("audit.json.parts" if name == "audit" else "projected.npz.parts")
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps(recorded))
    main(command)
    again = json.loads((out / f"{name}.json").read_text())
    for found in [again] if name == "audit" else again["audits"].values():
        assert found["settings"]["micro_batch"] == 16
