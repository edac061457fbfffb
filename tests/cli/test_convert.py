"""`m2s convert`: another project's checkpoint as a folder of m2s."""

from pathlib import Path

import pytest
import torch

import m2s
from m2s.cli import main
from plain_networks import LENGTH, dit_shapes, random_tensors, save_lightning
from test_mdlm import hub_config, lightning_config, write_hub

pytestmark = pytest.mark.usefixtures("without_shape_hook")


def command_error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command prints before it ends with code 2."""
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_a_converted_checkpoint_is_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = random_tensors(dit_shapes(37))
    source = save_lightning(tmp_path / "duo.ckpt", lightning_config("duo"), weights)
    folder = tmp_path / "runs" / "duo"
    main(["convert", str(source), str(folder)])
    printed = capsys.readouterr().out
    for text in (
        "a Lightning checkpoint",
        "Uniform(37",
        "offset='exact'",
        "tokenizer: none. put the tokenizer.json",
        f"{folder} written",
    ):
        assert text in printed
    theirs, ours = m2s.load(source), m2s.load(folder, verify=True)
    assert repr(theirs.head) == repr(ours.head) and ours.data == {"kind": "text", "length": LENGTH}
    for name, value in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], value)
    main(["sample", str(folder), "--n", "2", "--steps", "2", "--out", str(tmp_path / "a.npz")])
    main(["sample", str(source), "--n", "2", "--steps", "2", "--out", str(tmp_path / "b.npz")])
    assert torch.equal(*(torch.from_numpy(m2s_tokens(tmp_path / name)) for name in ("a.npz", "b.npz")))


def m2s_tokens(path: Path) -> object:
    import numpy as np

    return np.load(path)["tokens"]


def test_a_folder_is_replaced_on_request_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_hub(tmp_path / "duo", hub_config("duo", 37), random_tensors(dit_shapes(37)))
    folder = tmp_path / "out"
    main(["convert", str(source), str(folder)])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_hub(source, hub_config("duo", 37), random_tensors(dit_shapes(37), seed=1))
    assert "is there already: give another folder, or --overwrite" in command_error(capsys, "convert", str(source), str(folder))
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    main(["convert", str(source), str(folder), "--overwrite"])
    assert (folder / "model.safetensors").read_bytes() != before["model.safetensors"]
    m2s.load(folder, verify=True)


def test_errors_come_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_hub(tmp_path / "duo", hub_config("duo", 38), random_tensors(dit_shapes(37)))
    folder = tmp_path / "out"
    assert "expected [38, 16]" in command_error(capsys, "convert", str(source), str(folder))
    assert "it is the source" in command_error(capsys, "convert", str(source), str(source))
    assert "mdlm.ckpt" in command_error(capsys, "convert", str(tmp_path / "mdlm.ckpt"), str(folder))
    (tmp_path / "run" / "state").mkdir(parents=True)
    assert "the folder of a training run" in command_error(capsys, "convert", str(source), str(tmp_path / "run"))
    assert not folder.exists()
