"""The checkpoint of `m2s train --init`: its files are verified before a run starts."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from m2s.cli import main
from small_runs import user_error

TINY = ["--network.kind", "dit", "--network.width", "16", "--network.depth", "1", "--network.heads", "2", "--batch", "4"]
TINY += ["--validation-samples", "4", "--optimizer.warmup", "1", "--device", "cpu", "--steps", "1"]


@pytest.mark.usefixtures("without_shape_hook")
def test_changed_weights_are_no_start_of_a_run(tmp_path, capsys):
    main(["train", "digits", "--out", str(tmp_path / "full"), *TINY])
    changed = tmp_path / "changed"
    shutil.copytree(tmp_path / "full", changed)
    path = changed / "model.safetensors"
    save_file({name: value + 1e-3 for name, value in load_file(path).items()}, path)
    capsys.readouterr()
    error = user_error(capsys, "train", "digits", "--out", str(tmp_path / "new"), "--init", str(changed), *TINY)
    assert "--init" in error and "SHA-256" in error
    assert not (tmp_path / "new").exists()
