"""Weights that ship with the package: found by name, as their model cards say, and accepted by every command."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import m2s
from m2s.cli import main
from m2s.hub import builtin

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import make_weights
import weight_recipes

NAMES = builtin.names()
SHIPPED = [group for group in weight_recipes.GROUPS.values() if set(group.recipes) <= set(NAMES)]
LARGEST = 10 * 10**6  # bytes of all folders
PAIR = ("digits-m2s", "digits-sedd")


def figures(name: str) -> dict:
    return json.loads((builtin.folder() / name / "figures.json").read_text())


def test_every_folder_is_complete_and_all_are_small() -> None:
    assert (
        NAMES
        == sorted(path.name for path in builtin.folder().iterdir())
        == sorted(name for group in SHIPPED for name in group.recipes)
    )
    assert {*PAIR, "chars"} <= set(NAMES)
    files = {"README.md", "config.json", "figures.json", "model.safetensors", "train.json"}
    assert all({path.name for path in (builtin.folder() / name).iterdir()} == files for name in NAMES)
    assert sum(path.stat().st_size for path in builtin.folder().rglob("*") if path.is_file()) <= LARGEST


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_bf16_on_the_disk_and_load_as_float32(name: str) -> None:
    with safe_open(builtin.folder() / name / "model.safetensors", "pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys() if key.startswith("model.")} == {"BF16"}  # noqa: SIM118
    checkpoint = m2s.load(f"builtin:{name}", verify=True)
    assert {value.dtype for value in checkpoint.model.state_dict().values()} == {torch.float32}
    recipe = next(group.recipes[name] for group in SHIPPED if name in group.recipes)
    assert checkpoint.config["extra"]["method"] == recipe.config.method
    assert checkpoint.config["extra"]["step"] == recipe.config.run.steps
    assert builtin.summary(name) == recipe.summary


@pytest.mark.parametrize("group", SHIPPED, ids=lambda group: group.name)
def test_the_cards_have_the_numbers_of_figures_json(group: weight_recipes.Group) -> None:
    for name in group.recipes:
        card, found = (builtin.folder() / name / "README.md").read_text(), figures(name)
        assert group.card(name, found) in card and group.data in card and f'm2s.load("builtin:{name}")' in card
        assert f"**{found['values']['bits']['nelbo']['value']:.4f} ± " in card
        assert ("bits per character " if name == "chars" else "bits per dimension ") in card
        # No file names a folder of the machine that made it.
        assert not any(str(Path.home()) in path.read_text() for path in (builtin.folder() / name).glob("*.json"))


def test_other_numbers_than_those_of_a_card_are_found() -> None:
    values = figures(PAIR[0])["values"]
    assert not make_weights.differences(values, json.loads(json.dumps(values)))
    changed = json.loads(json.dumps(values))
    changed["bits"]["nelbo"]["value"] *= 1 + 2 * make_weights.TOLERANCE
    changed["examples"] += 1
    (first, second) = make_weights.differences(values, changed)
    assert first.startswith("bits.nelbo.value: ") and second.startswith("examples: ")
    del changed["pixel_distance"]
    assert make_weights.differences(values, changed)


def integral(checkpoint: m2s.hub.Checkpoint, x_0: torch.Tensor, t: torch.Tensor, seed: int) -> torch.Tensor:
    """The integrand of the NELBO in bits per pixel, [N], from the definitions, in float64.

    With alpha = 1 - t and m = t/K the rates into every level are n = d/dt m - (alpha'/alpha) m = 1/(K (1 - t)). The score of a
    posterior is sum_z mu_z P_t(y|z)/P_t(k|z).
    """
    states, generator = 17, torch.Generator().manual_seed(seed)
    time = t.double().view(-1, 1, 1)
    kernel = (1 - time) * torch.eye(states, dtype=torch.float64) + time / states  # P_t(y|z), row z, [N, K, K]
    redrawn = torch.rand(x_0.shape, generator=generator) < t.unsqueeze(-1)
    x_t = torch.where(redrawn, torch.randint(states, x_0.shape, generator=generator), x_0)
    with torch.no_grad():
        output = checkpoint.model(x_t, t)[..., :states].double()
    at_current = torch.nn.functional.one_hot(x_t, states).double()
    reached = kernel.gather(-1, x_t.unsqueeze(1).expand(-1, states, -1)).transpose(1, 2)  # P_t(k|z), [N, L, z]
    if checkpoint.head.has_posterior:
        if checkpoint.head.offset == "exact":
            output = output + at_current * torch.log1p((1 - time) * states / time)
        score = (output.softmax(-1) / reached) @ kernel
    else:
        score = output.exp()
    ratio = kernel.gather(1, x_0.unsqueeze(-1).expand(-1, -1, states))
    ratio = ratio / ratio.gather(-1, x_t.unsqueeze(-1))
    terms = (score - ratio * score.log() + ratio * ratio.log() - ratio) * (1 - at_current)
    return terms.sum((1, 2)) / (states * (1 - time[:, 0, 0])) / x_0.shape[1] / math.log(2)


@pytest.mark.parametrize("name", PAIR)
def test_an_independent_integral_agrees_with_the_model_card(name: str) -> None:
    """Stratified uniform times over all test images; the standard error of the card is over times of another density."""
    checkpoint, x_0 = m2s.load(f"builtin:{name}"), m2s.data.load("digits").test.long()
    passes, low = [], 1e-3
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(x_0), generator=generator)
        u = (order + torch.rand(len(x_0), generator=generator)) / len(x_0)
        # t = low^(1 - u), up to 1 - low: density 1/t, which the weight t log(1/low) corrects.
        t = (low ** (1 - u)) * (1 - low)
        weight = t.double() * math.log(1 / low)
        passes.append(float((integral(checkpoint, x_0, t, 100 + seed) * weight).mean()))
    found = torch.tensor(passes, dtype=torch.float64)
    card = figures(name)["values"]["bits"]["integral"]
    error = math.hypot(float(found.std()) / math.sqrt(len(found)), card["error"])
    assert error < 0.02
    assert float(found.mean()) == pytest.approx(card["value"], abs=4 * error)


def test_weights_are_found_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m2s.remote, "locate", lambda *_: pytest.fail("built-in weights are not downloaded"))
    assert m2s.load("builtin:digits-m2s").sample(2, steps=2, seed=0).shape == (2, 64)


def test_unknown_names_list_the_known_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    known = ", ".join(f"builtin:{name}" for name in NAMES)
    expected = f"there are no built-in weights builtin:digit: choose from {known}"
    with pytest.raises(FileNotFoundError, match=expected):
        m2s.load("builtin:digit")
    for words in (["sample", "builtin:digit", "--out", str(tmp_path / "a.npz")], ["evaluate", "bpd", "builtin:digit"]):
        with pytest.raises(SystemExit):
            main(words)
        assert expected in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="choose from"):
        m2s.load("builtin:../digits-m2s")


def test_nothing_is_saved_into_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="give the path of a folder"):
        m2s.load("builtin:digits-m2s").save("builtin:digits-m2s")
    assert not list(tmp_path.iterdir())


def test_commands_accept_built_in_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in builtin.folder().rglob("*")}
    few = ["--n", "4", "--steps", "2", "--device", "cpu"]
    main(["sample", "builtin:digits-m2s", *few, "--out", "digits.png"])
    main(["sample", "builtin:chars", *few, "--out", "text.txt"])
    main(["audit", "builtin:digits-sedd", *few, "--out", "audit"])
    main(["repair", "builtin:digits-sedd", *few, "--measure", "none", "--out", "repair"])
    main(["compare", "builtin:digits-sedd", "builtin:digits-m2s", "--against", "digits:test", *few, "--out", "compare"])
    main(["evaluate", "bpd", "builtin:digits-m2s", "--against", "builtin:digits-sedd", "--limit", "2", "--passes", "2"])
    assert "digits (test): 2 images of 8 x 8" in capsys.readouterr().out
    arms = json.loads(Path("compare/compare.json").read_text())["arms"]
    assert [arm["name"] for arm in arms] == ["digits-sedd", "digits-sedd-repaired", "digits-m2s"]
    assert Path("text.txt").read_text().count("--- sample ") == 4
    main(["data", "list"])
    printed = capsys.readouterr().out
    assert all(f"builtin:{name}" in printed and builtin.summary(name) in printed for name in NAMES)
    assert {path: path.stat().st_mtime_ns for path in builtin.folder().rglob("*")} == before
