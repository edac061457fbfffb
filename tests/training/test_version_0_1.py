"""Run folders and checkpoints of version 0.1 load and resume.

`run-0.1` is a run of gidd-clipped on digits that version 0.1 stopped at step 3 of 6. `run-0.1-final.safetensors` holds the
averaged weights with which version 0.1 finished it.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import m2s
from m2s.cli import main
from m2s.errors import UserError
from m2s.training import state
from m2s.training.run_folder import RECORD
from small_runs import user_error

FOLDER = Path(__file__).parent / "run-0.1"
FINAL = Path(__file__).parent / "run-0.1-final.safetensors"
SAME = ["--network.width", "4", "--network.multipliers", "1", "--network.layers", "1", "--steps", "6", "--batch", "8"]
SAME += ["--save-every", "3", "--log-every", "1", "--validate-every", "3", "--validation-samples", "4", "--device", "cpu"]
COMMAND = ["train", "digits", "--method", "gidd-clipped", *SAME]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "run"))


def test_a_checkpoint_loads(out: Path) -> None:
    checkpoint = m2s.load(out)
    assert repr(checkpoint.head) == "Posterior(Hybrid(17, p_uniform=0.1), offset='exact')"
    assert checkpoint.config["extra"]["step"] == 3
    with torch.no_grad():
        assert checkpoint.model(torch.zeros(1, 64, dtype=torch.long), torch.tensor([0.5])).isfinite().all()


def test_a_run_resumes_and_ends_as_in_version_0_1(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*COMMAND, "--out", str(out)])
    assert "resuming from step 3 of 6" in capsys.readouterr().err
    final = m2s.load(out).model.state_dict()
    for name, value in load_file(FINAL).items():
        torch.testing.assert_close(final[name.removeprefix("model.")], value, rtol=1e-4, atol=1e-6)
    assert len(json.loads((out / RECORD).read_text())["starts"]) == 2


def test_another_configuration_is_an_error(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = user_error(capsys, *COMMAND, "--head.max-weight", "2", "--out", str(out))
    assert "holds another run: head.max_weight was 1.0 and is now 2.0" in message


def test_a_state_of_another_format_is_an_error(out: Path) -> None:
    """A future or older format is named in the message, and nothing is removed."""
    path = state.place(out / "state", 3) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    with pytest.raises(UserError, match=r"no state in .* is intact \(step 3: its format is 1, expected 2\)"):
        state.newest(out / "state", print)
    assert path.exists()
