"""`m2s certify`: certificates of the built-in worlds and of a checkpoint, and what estimators drop on data."""

import json
import math
from pathlib import Path

import pytest
import torch

import m2s
from m2s.cli import main
from m2s.cli.certify import Certify
from m2s.data.tokenizer.characters import Characters
from m2s.evaluation.likelihood import ESTIMATORS, Options, measure, resumable
from small_runs import user_error


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny network of texts of three letters, whose sequences can be enumerated, and a text."""
    folder = tmp_path_factory.mktemp("certify")
    torch.manual_seed(0)
    config = m2s.models.DiTConfig(states=3, width=8, depth=1, heads=2, condition_width=8, length=3)
    model = m2s.models.DiT(config)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    head = m2s.Posterior(m2s.Absorbing(2, m2s.LogLinear(1e-2)))
    m2s.save(folder / "model", model, head, {"kind": "text", "length": 3}, Characters("ab"))
    (folder / "text.txt").write_text("abbaabbba" * 20)
    return folder


def run(checkpoint: Path, out: Path, *more: object) -> dict:
    """Run the command on the text, and return the file that it writes."""
    words = [
        "certify",
        checkpoint / "model",
        "--data",
        checkpoint / "text.txt",
        "--out",
        out,
        "--device",
        "cpu",
        "--steps",
        8,
        *more,
    ]
    main([str(word) for word in words])
    return json.loads(out.read_text())


def test_measures_and_certifies_a_checkpoint(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers are those of `measure`, the NELBO contains what others drop, and the model itself is enumerated."""
    found = run(checkpoint, tmp_path / "found.json", "--passes", 3, "--limit", 30)
    printed = capsys.readouterr().out
    assert set(found["measured"]) == {name for name in ESTIMATORS if name not in ("udlm", "duo")}
    loaded = m2s.load(checkpoint / "model")
    rows = torch.tensor([[0, 1, 1], [0, 0, 1], [1, 1, 0]])[torch.arange(60) % 3][torch.arange(30) * 60 // 30].long()
    nelbo = found["measured"]["nelbo"]
    draws = measure(loaded.model, loaded.head, rows, "nelbo", 3, 0, options=Options(steps=8))
    assert nelbo["nats"] == pytest.approx(float(draws.total.mean()), rel=1e-6)
    assert nelbo["bits_per_token"] == pytest.approx(nelbo["nats"] / 3 / math.log(2))
    assert nelbo["bits_per_byte"] == pytest.approx(nelbo["bits_per_token"])
    assert nelbo["nats"] < nelbo["upper"] and nelbo["missing"] == []
    assert found["measured"]["integral"]["missing"] == ["reconstruction", "prior"]
    terms = found["measured"]["nelbo"]["terms"]
    dropped = terms["prior"] + terms["reconstruction"]
    assert found["measured"]["integral"]["drop"] == pytest.approx(dropped, rel=1e-5)  # on the same noise
    assert set(nelbo["terms"]) == {"integral", "prior", "reconstruction"}
    exact = {each["estimator"]: each for each in found["certificates"]}
    assert exact["nelbo"]["passed"] and exact["llada"]["passed"]
    assert "md4: its prior is 0 by definition" in printed and found["measured"]["md4"]["note"] == ESTIMATORS["md4"].note
    assert "lacks reconstruction, prior" in printed and "terms of the NELBO" in printed


def test_an_interrupted_measurement_continues(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the same whether or not the command was interrupted, and what was measured is not measured again."""
    options = ("--passes", 2, "--limit", 24, "--batch-size", 8, "--estimators", "nelbo", "mdlm")
    expected = run(checkpoint, tmp_path / "a.json", *options)["measured"]
    monkeypatch.setattr(resumable, "PAUSE", -1.0)
    calls = []
    real = resumable.measure

    def interrupted(*arguments: object, **named: object) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(resumable, "measure", interrupted)
    with pytest.raises(SystemExit):
        run(checkpoint, tmp_path / "b.json", *options)
    assert Certify.partial(tmp_path / "b.json").exists()
    found = run(checkpoint, tmp_path / "b.json", *options)["measured"]
    for name in ("nelbo", "mdlm"):
        assert found[name]["nats"] == pytest.approx(expected[name]["nats"], rel=1e-6)
        assert found[name]["noise_variance"] == pytest.approx(expected[name]["noise_variance"], rel=1e-5)
    assert len(calls) == 3 + 4  # three batches for each of two estimators, two of which were done
    assert not Certify.partial(tmp_path / "b.json").exists()


def test_invalid_input(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(checkpoint / "model")
    assert "--passes is 1, but it must be at least 2" in user_error(capsys, "certify", model, "--passes", "1")
    assert "no estimator of that name" in user_error(capsys, "certify", model, "--estimators", "lada")
    assert "there is no CHECKPOINT" in user_error(capsys, "certify", "--data", "digits")
    text = ("--data", str(checkpoint / "text.txt"))
    assert "it needs uniform noise" in user_error(capsys, "certify", model, *text, "--estimators", "udlm")
    (tmp_path / "there.json").write_text("{}")
    assert "there.json" in user_error(capsys, "certify", "--out", str(tmp_path / "there.json"))


def test_built_in_worlds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a checkpoint: chosen estimators in all worlds that support them."""
    main(["certify", "--estimators", "duo", "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())["certificates"]
    assert {each["estimator"] for each in found} == {"duo"}
    exact = [each for each in found if "exact network" in each["world"]]
    assert exact and not any(each["passed"] for each in exact)
    assert "NO BOUND of any distribution" in capsys.readouterr().out
