"""In an empty folder with a released checkpoint: samples, a certified bound and an audit, each with one command."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from m2s.cli import main
from m2s.data import download
from merges import write_merges
from plain_networks import BLOCKS, COND, HEADS, LENGTH, WIDTH, dit_shapes, random_tensors
from test_mdlm import hub_config, word_tokenizer, write_hub

pytestmark = pytest.mark.usefixtures("without_shape_hook")
WORDS = ["[UNK]", *(f"w{i}" for i in range(35))]


def write_sedd(folder: Path) -> None:
    """SEDD's layout: its tensors have no prefix, and the tokens are those without the mask."""
    model = {"hidden_size": WIDTH, "cond_dim": COND, "length": LENGTH, "n_blocks": BLOCKS, "n_heads": HEADS, "dropout": 0.1}
    graph, noise = {"type": "absorb"}, {"type": "loglinear"}
    config = {"tokens": len(WORDS), "graph": graph, "noise": noise, "model": {**model, "scale_by_sigma": True}}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(dit_shapes(len(WORDS) + 1)), folder / "model.safetensors")
    word_tokenizer(folder / "tokenizer.json", WORDS)


def write_mdlm(folder: Path) -> None:
    """MDLM's layout on the hub."""
    write_hub(folder, hub_config("mdlm", len(WORDS) + 1), random_tensors(dit_shapes(len(WORDS) + 1)))
    word_tokenizer(folder / "tokenizer.json", WORDS)


@pytest.mark.parametrize(("name", "write"), [("sedd-small", write_sedd), ("mdlm-owt", write_mdlm)])
def test_three_commands(
    name: str, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    write(tmp_path / name)
    Path("text.txt").write_text(" ".join(f"w{7 * i * i % 35}" for i in range(25 * LENGTH)))
    main(["sample", name, "--n", "2", "--steps", "3", "--out", "samples.txt"])
    texts = [line.split() for line in Path("samples.txt").read_text().splitlines() if line.startswith("w")]
    assert len(texts) == 2 and set(texts[0] + texts[1]) <= set(WORDS)
    main(["certify", name, "--data", "text.txt", "--passes", "2", "--out", "certificate.json"])
    measured = json.loads(Path("certificate.json").read_text())["measured"]
    bound = measured["nelbo"]
    assert bound["missing"] == [] and bound["upper"] > bound["nats"] > 0
    assert measured["mdlm" if name == "mdlm-owt" else "sedd"]["missing"]
    assert "one-sided 95 % limit" in capsys.readouterr().out
    main(["audit", name, "--n", "2", "--steps", "3", "--out", "audit"])
    assert json.loads(Path("audit/audit.json").read_text())["process"] == "Absorbing"


def test_merges_of_gpt2_are_no_fourth_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A released vocabulary of 50,257 tokens and a mask: the commands download its merges where they are missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    calls: list[str] = []

    def arrive(data: download.Download) -> bool:
        calls.append(data.name)
        if len(calls) == 1:
            raise download.DownloadError("there is no network")
        write_merges(data.path / "merges.txt")
        return True

    monkeypatch.setattr(download, "download", arrive)
    write_hub(tmp_path / "mdlm-owt", hub_config("mdlm", 50_258), random_tensors(dit_shapes(50_258)))
    words = ["sample", "mdlm-owt", "--n", "1", "--steps", "1", "--out"]
    with pytest.raises(SystemExit):
        main([*words, "samples.txt"])
    assert "m2s data download gpt2" in capsys.readouterr().err and not Path("samples.txt").exists()
    main([*words, "samples.txt"])
    assert Path("samples.txt").exists() and "GPT-2" in capsys.readouterr().out
    Path("text.txt").write_text("words of a text " * 30)
    main(["certify", "mdlm-owt", "--data", "text.txt", "--passes", "2", "--limit", "3", "--estimators", "nelbo"])
    assert calls == ["gpt2", "gpt2"] and "one-sided 95 % limit" in capsys.readouterr().out
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "other"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    main([*words, "other.npz"])
    assert calls == ["gpt2", "gpt2"]
