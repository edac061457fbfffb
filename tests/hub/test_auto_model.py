"""`M2SModel`: one folder that `m2s.load` and `AutoModel.from_pretrained` read, with equal outputs bit for bit."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import m2s
from m2s.data import Characters
from m2s.errors import UserError
from m2s.models import DiT, DiTConfig

transformers = pytest.importorskip("transformers", minversion="5.0")
from m2s.hub.auto_model import M2SConfig, M2SModel  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_shape_hook")
X, T = torch.tensor([[0, 1, 2, 3, 3, 1], [3, 3, 3, 0, 0, 2]]), torch.tensor([0.3, 0.9])


def network(states: int = 4, **options: Any) -> DiT:
    torch.manual_seed(0)
    model = DiT(DiTConfig(states=states, width=16, depth=1, heads=2, condition_width=8, length=6, **options))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.eval()


def checkpoint(**options: Any) -> m2s.Checkpoint:
    head = m2s.Posterior(m2s.Absorbing(3, m2s.Cosine()))
    extra = {"method": "md4", "step": 70}
    return m2s.Checkpoint(network(**options), head, Characters("abc"), {"kind": "text", "length": 6}, {"extra": extra})


def test_both_read_the_folder_that_m2s_writes(tmp_path: Path) -> None:
    given = checkpoint()
    given.save(tmp_path)
    for auto in (transformers.AutoModel, transformers.AutoModelForMaskedLM):
        found = auto.from_pretrained(tmp_path)
        assert type(found) is M2SModel and not found.training and str(found.head) == str(given.head)
        with torch.no_grad():
            assert torch.equal(found(input_ids=X, t=T).logits, m2s.load(tmp_path).model(X, T)[..., :4])
        assert torch.equal(found.checkpoint.sample(3, steps=4, seed=1), given.sample(3, steps=4, seed=1))
        assert found.checkpoint.tokenizer == given.tokenizer and found.checkpoint.length == 6
    settings = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(settings) is M2SConfig and settings.extra == given.config["extra"]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "m2s"


def test_both_read_the_folder_that_the_model_writes(tmp_path: Path) -> None:
    """It is the folder of the checkpoint, byte for byte, with its model card."""
    given = checkpoint()
    given.save_pretrained(tmp_path / "ours")
    M2SModel.of(given).save_pretrained(tmp_path / "theirs")
    for path in (tmp_path / "ours").iterdir():
        assert (tmp_path / "theirs" / path.name).read_bytes() == path.read_bytes(), path.name
    again = transformers.AutoModel.from_pretrained(tmp_path / "theirs")
    again.save_pretrained(tmp_path / "again")
    for path in (tmp_path / "ours").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
    assert m2s.load(tmp_path / "again", verify=True).config["extra"] == given.config["extra"]


def test_a_head_with_matrices(tmp_path: Path) -> None:
    """Its rates are in the file of the weights."""
    process = m2s.RateMatrix.birth_death(torch.ones(3), torch.tensor([0.5, 2.0, 1.0]), m2s.LogLinear())
    m2s.save(tmp_path, network(), m2s.Posterior(process))
    found, given = transformers.AutoModel.from_pretrained(tmp_path), m2s.load(tmp_path)
    x = m2s.sample(found.model, found.head, (2, 6), 4, seed=0)
    assert torch.equal(x, m2s.sample(given.model, given.head, (2, 6), 4, seed=0))
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(m2s.load(tmp_path / "again").head.process.generator, given.head.process.generator)


def test_weights_are_those_of_the_options_of_transformers(tmp_path: Path) -> None:
    checkpoint().save(tmp_path)
    half = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    model = M2SModel.of(checkpoint())
    doubled = {name: 2 * value for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "gathered", state_dict=doubled)
    found = m2s.load(tmp_path / "gathered").model.state_dict()
    assert all(torch.equal(value, doubled[f"model.{name}"]) for name, value in found.items())
    model.save_pretrained(tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()


def test_a_new_model_has_the_initial_weights_of_the_network() -> None:
    config = M2SConfig.of(m2s.Checkpoint(network(), m2s.Posterior(m2s.Absorbing(3, m2s.Linear()))))
    torch.manual_seed(5)
    one = M2SModel(config)
    torch.manual_seed(5)
    other = DiT(DiTConfig(states=4, width=16, depth=1, heads=2, condition_width=8, length=6))
    assert all(torch.equal(value, one.model.state_dict()[name]) for name, value in other.state_dict().items())


def test_time_and_padding_are_asked_for() -> None:
    model = M2SModel.of(checkpoint())
    with pytest.raises(UserError, match="sees the time"):
        model(X)
    kept = torch.ones_like(X)
    kept[0, 4:] = 0
    with pytest.raises(UserError, match="padding"):
        model(X, T, attention_mask=kept)
    padded = M2SModel.of(checkpoint(padding=True, time=False))
    with torch.no_grad():
        alone = padded(X[:1, :4]).logits
        assert torch.allclose(padded(X, attention_mask=kept, position_ids=None).logits[:1, :4], alone, atol=1e-5)


def test_push_and_load_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is uploaded is the checkpoint with its card."""
    uploaded: dict[str, bytes] = {}

    def upload_folder(repo_id: str, folder_path: Path, allow_patterns: list[str]) -> None:
        uploaded.update({path.name: path.read_bytes() for path in Path(folder_path).iterdir()})

    hub = SimpleNamespace(create_repo=lambda repo, **_: f"https://hub/{repo}", upload_folder=upload_folder)
    model = M2SModel.of(checkpoint())
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert model.push_to_hub("me/model", command="m2s train text8 --method md4") == "https://hub/me/model"
    assert {"config.json", "model.safetensors", "README.md"} <= set(uploaded)
    assert b"m2s train text8 --method md4" in uploaded["README.md"]


@pytest.mark.parametrize("own_scheduler", [True, False])
def test_in_the_pipeline_of_llada(own_scheduler: bool) -> None:
    """A network of m2s in a pipeline of diffusers, with its scheduler or `M2SScheduler`. Prompts stay, and no mask is left."""
    diffusers = pytest.importorskip("diffusers", minversion="0.42")
    from m2s.hub.diffusers import M2SScheduler

    given = checkpoint(time=False)
    scheduler = diffusers.BlockRefinementScheduler(block_length=6)
    if own_scheduler:
        scheduler = M2SScheduler.of(given.head, sampler="ancestral", block_length=6)
    pipe = diffusers.LLaDA2Pipeline(model=M2SModel.of(given), scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    asked = {"gen_length": 4, "num_inference_steps": 4, "mask_token_id": 3, "output_type": "seq", "editing_threshold": None}
    drawn = pipe(input_ids=torch.tensor([[2, 1]]), temperature=1.0, generator=torch.Generator().manual_seed(0), **asked)
    assert drawn.sequences.shape == (1, 4) and int(drawn.sequences.max()) < 3
