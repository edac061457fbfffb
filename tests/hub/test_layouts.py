"""Every layout of another project with the commands that take a checkpoint: sample, evaluate, audit, repair and convert."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import test_md4
from safetensors.torch import save_file
from test_gidd import TOKENS, radd_config, write_gidd, write_state

import m2s
from m2s.cli import main
from plain_networks import LENGTH, dit_shapes, random_tensors, save_lightning
from test_mdlm import SMALL, hub_config, lightning_config, word_tokenizer, write_hub

pytestmark = pytest.mark.usefixtures("without_shape_hook")


def words(folder: Path, count: int) -> Path:
    """The tokenizer's file of `count` words, beside the weights."""
    word_tokenizer(folder / "tokenizer.json", ["[UNK]", *(f"w{i}" for i in range(count - 1))])
    return folder


def hub(kind: str, masked: bool, **more: object) -> Callable[[Path], Path]:
    """A folder of MDLM, UDLM, DUO or BD3-LM."""

    def write(folder: Path) -> Path:
        return words(write_hub(folder, hub_config(kind, SMALL, **more), random_tensors(dit_shapes(SMALL))), SMALL - masked)

    return write


def lightning(project: str, masked: bool) -> Callable[[Path], Path]:
    """A Lightning checkpoint."""

    def write(folder: Path) -> Path:
        folder.mkdir()
        words(folder, SMALL - masked)
        return save_lightning(folder / "last.ckpt", lightning_config(project), random_tensors(dit_shapes(SMALL)))

    return write


def gidd(on_hub: bool) -> Callable[[Path], Path]:
    """GIDD's folder of the hub, or that of its training, with padded rows."""

    def write(folder: Path) -> Path:
        write_gidd(folder, on_hub, TOKENS if on_hub else 128)
        return folder

    return write


def radd(folder: Path) -> Path:
    """RADD's folder of the hub."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(radd_config()))
    save_file(random_tensors(dit_shapes(TOKENS + 1, norm_bias=True, time=False)), folder / "model.safetensors")
    return words(folder, TOKENS)


def sedd_state(folder: Path) -> Path:
    """A state of a training of SEDD."""
    config = {**radd_config(), "graph": {"type": "absorb"}}
    config["model"] |= {"type": "ddit", "scale_by_sigma": True}
    run = write_state(folder, config, random_tensors(dit_shapes(TOKENS + 1)))
    return words(run / "checkpoints-meta", TOKENS) / "checkpoint.pth"


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "mdlm": hub("mdlm", True),
    "udlm": hub("udlm", False),
    "duo": hub("duo", False),
    "bd3lm": hub("bd3lm", True, block_size=LENGTH),
    "lightning sedd": lightning("sedd", True),
    "lightning duo": lightning("duo", False),
    "gidd": gidd(True),
    "gidd, a training": gidd(False),
    "radd": radd,
    "sedd, a state": sedd_state,
    "md4": lambda folder: words(test_md4.write(folder), test_md4.VOCAB),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_commands(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They take the layout as it is, and the converted folder gives the same samples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(test_md4.md4, "read_orbax", lambda item, prefix: test_md4.arrays())
    place = str(LAYOUTS[name](tmp_path / "theirs"))
    Path("text.txt").write_text(" ".join(f"w{7 * i * i % 9}" for i in range(4 * LENGTH)))
    options = ("--n", "2", "--steps", "2", "--micro-batch", "2")
    main(["convert", place, "ours"])
    for given, out in ((place, "theirs.txt"), ("ours", "ours.txt")):
        main(["sample", given, *options, "--out", out])
    assert np.array_equal(*(np.load(file)["tokens"] for file in ("theirs.npz", "ours.npz")))
    assert "w" in Path("theirs.txt").read_text()
    main(["evaluate", "bpd", place, "--data", "text.txt", "--passes", "2"])
    assert "Student's 95% interval" in capsys.readouterr().out
    main(["audit", place, *options, "--out", "audit"])
    assert json.loads(Path("audit/audit.json").read_text())["head"] == repr(m2s.load(place).head)
    repair = ["repair", place, *options, "--measure", "none", "--out", "repaired"]
    if "sedd" in name:
        main(repair)
        assert Path("repaired/repair.json").is_file()
    else:
        with pytest.raises(SystemExit):
            main(repair)
        assert "there is nothing to repair" in capsys.readouterr().err


@pytest.mark.parametrize("below", ["snapshots/0123abcd", "checkpoints"])
def test_a_folder_above_a_checkpoint(below: str, tmp_path: Path) -> None:
    """The cache of the hub and the folder of a training: the message has the path of the checkpoint."""
    place = tmp_path / "models--kuleshov-group--mdlm-owt" / below
    if below == "checkpoints":
        place.mkdir(parents=True)
        place = save_lightning(place / "last.ckpt", lightning_config("duo"), random_tensors(dit_shapes(SMALL)))
    else:
        hub("duo", False)(place)
    with pytest.raises(FileNotFoundError, match=f"holds no config.json.* try {re.escape(str(place))}"):
        m2s.load(tmp_path / "models--kuleshov-group--mdlm-owt")
    assert m2s.load(place).head.process.vocab == SMALL


@pytest.mark.parametrize("pickled", [False, True])
def test_a_pointer_of_git_lfs(pickled: bool, tmp_path: Path) -> None:
    """What git clone of a repository of the hub leaves without Git LFS."""
    write_hub(tmp_path, hub_config("duo", SMALL), random_tensors(dit_shapes(SMALL)), pickled)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 678522696\n"
    (tmp_path / ("pytorch_model.bin" if pickled else "model.safetensors")).write_text(pointer)
    with pytest.raises(ValueError, match="it is a pointer of Git LFS and not the weights: run git lfs pull"):
        m2s.load(tmp_path)
