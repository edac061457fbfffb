"""`InferenceModel` gives the same outputs and samples as the network, and does not change it."""

import pytest
import torch

import m2s
from m2s.cli import main
from m2s.heads import NextToken, Shifted
from m2s.models import DiT, DiTConfig
from m2s.ops.last_layer import Unprojected
from m2s.samplers import inference_model
from m2s.samplers.inference_model import InferenceModel


def network(vocab: int) -> DiT:
    torch.manual_seed(0)
    model = DiT(DiTConfig(vocab, width=16, depth=1, heads=2, length=6)).eval()
    torch.nn.init.normal_(model.head.weight, std=0.5)
    return model


def test_samples_are_the_same_without_the_last_layer(monkeypatch):
    head = m2s.Posterior(m2s.Uniform(30, m2s.Linear()))
    plain = m2s.sample(network(30), head, (5, 6), steps=6, seed=0)
    monkeypatch.setattr(inference_model, "LARGE", 30)
    prepared = InferenceModel(network(30), 30)
    assert isinstance(prepared(plain, torch.full((5,), 0.5)), Unprojected)
    assert torch.equal(m2s.sample(prepared, head, (5, 6), steps=6, seed=0), plain)
    monkeypatch.setattr(inference_model, "LARGE", 31)
    assert isinstance(InferenceModel(network(30), 30)(plain, torch.full((5,), 0.5)), torch.Tensor)


@pytest.mark.parametrize("compiled", [False, True])
def test_attributes_of_the_model_are_restored(monkeypatch, compiled):
    """`unprojected` is set during a call only, and restored to the user's value, also after an error."""
    monkeypatch.setattr(inference_model, "LARGE", 30)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # the compiled function reads the attribute too
    x_t, t = torch.zeros(2, 6, dtype=torch.long), torch.full((2,), 0.5)
    for before in (False, True):
        model = network(30)
        model.unprojected = before
        prepared = InferenceModel(model, 30, compiled=compiled)
        assert model.unprojected is before
        assert isinstance(prepared(x_t, t), Unprojected) and model.unprojected is before
        with pytest.raises(ValueError, match="tokens must lie in"):
            prepared(x_t + 1000, t)
        assert model.unprojected is before
        assert isinstance(model(x_t, t), Unprojected) is before


def test_bf16_is_autocast(monkeypatch):
    """The network runs under autocast to bf16 if `bf16` is set, and without autocast otherwise."""

    class ReportsAutocast(torch.nn.Module):
        def forward(self, x_t, t, condition=None):
            return torch.tensor([torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu") == torch.bfloat16])

    x_t, t = torch.zeros(1, 2, dtype=torch.long), torch.tensor([0.5])
    assert InferenceModel(ReportsAutocast(), 5, bf16=True)(x_t, t).all()
    assert not InferenceModel(ReportsAutocast(), 5)(x_t, t)[0]


def test_weights_are_shared():
    model = network(30)
    assert [value.data_ptr() for value in InferenceModel(model, 30).parameters()] == [
        value.data_ptr() for value in model.parameters()
    ]


def test_fused_kernels_raise_where_they_cannot_run(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    checkpoint = tmp_path / "run"
    main(["train", "digits", "--steps", "1", "--validate-every", "0", "--device", "cpu", "--out", str(checkpoint)])
    capsys.readouterr()
    for command in (
        ["train", "digits", "--steps", "1", "--device", "cpu", "--out", str(tmp_path / "other")],
        ["sample", str(checkpoint), "--device", "cpu", "--out", str(tmp_path / "a.png")],
        ["audit", str(checkpoint), "--device", "cpu", "--out", str(tmp_path / "audit")],
    ):
        with pytest.raises(SystemExit) as stop:
            main([*command, "--kernels", "fused"])
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.count("\n") == 1 and "--kernels is 'fused', but " in said
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_cache_of_the_network_is_used():
    torch.manual_seed(0)
    model = DiT(DiTConfig(6, width=16, depth=2, heads=2, time=False, causal=True)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    head, asked = NextToken(Shifted(5)), []
    plain = m2s.sample(lambda x_t, t: model(x_t, t), head, (3, 7), sampler="autoregressive", micro_batch=4, seed=0)
    model.blocks[0].register_forward_pre_hook(lambda _, given: asked.append(tuple(given[0].shape[:2])))
    assert torch.equal(
        m2s.sample(InferenceModel(model, 6), head, (3, 7), sampler="autoregressive", micro_batch=4, seed=0), plain
    )
    assert asked == [(4, 1)] * 7
    assert InferenceModel(model, 6, bf16=True).new_cache(2, 3).dtype == torch.bfloat16
    assert InferenceModel(torch.nn.Linear(2, 2), 6).new_cache(2, 3) is None
