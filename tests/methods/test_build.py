"""A method is a factory: a vocabulary in, a head, a loss and defaults out."""

import pytest
import torch

import m2s
from m2s.errors import UserError
from m2s.heads.registry import HEADS
from m2s.losses import chain_kl, masked_cross_entropy, score_entropy
from m2s.losses.registry import LOSSES, has_fused_form
from m2s.methods import METHODS, HeadConfig, Method, ProcessConfig
from m2s.methods.build import class_options, readers
from m2s.process.registry import PROCESSES, SCHEDULES

VOCAB = 7


@pytest.mark.parametrize("name", METHODS)
def test_every_method_builds_a_head_with_a_finite_loss(name: str) -> None:
    parts = METHODS[name].build(VOCAB)
    process = parts.head.process
    assert process.vocab == VOCAB and parts.defaults.sampler == METHODS[name].sampler
    x_0 = torch.arange(4).expand(2, 4)
    t = torch.tensor([0.3, 0.7], dtype=torch.float64)
    x_t = process.corrupt(x_0, t, torch.Generator().manual_seed(0))
    output = torch.randn(2, 4, process.states, generator=torch.Generator().manual_seed(1))
    for loss in (parts.loss, parts.nelbo_loss):
        value = loss(parts.head, output, x_0, x_t, t)
        assert value.shape == (2, 4) and value.isfinite().all()


def test_the_parts_train_a_network() -> None:
    parts = METHODS["md4"].build(VOCAB)
    model = m2s.models.DiT(m2s.models.DiTConfig(parts.head.process.states, width=16, depth=1, heads=2))
    objective = m2s.Objective(model, parts.head, parts.loss)
    objective(torch.zeros(2, 3, dtype=torch.long), torch.tensor([0.3, 0.7])).sum().backward()
    assert model.embedding.weight.grad is not None


def test_given_values_win_over_the_method() -> None:
    parts = METHODS["md4"].build(VOCAB, ProcessConfig(schedule="cosine", rescale=0.01), HeadConfig(kind="ordinal"))
    assert repr(parts.head.process.schedule) == "Rescaled(schedule=Cosine(), eps=0.01)" and isinstance(parts.head, m2s.Ordinal)
    assert parts.defaults.process.schedule == "cosine" and parts.defaults.head.loss == "masked"


def test_the_loss_of_the_nelbo() -> None:
    expected = {"any-order": masked_cross_entropy, "gidd-clipped": score_entropy, "chain": chain_kl, "d3pm": chain_kl}
    expected["noised"] = score_entropy
    for name, entry in LOSSES.items():
        if name in expected:
            assert entry.nelbo is expected[name]
        elif name != "likelihood":
            assert entry.nelbo is None


def test_which_losses_are_fused() -> None:
    uniform, mask = (METHODS[name].build(VOCAB).head for name in ("m2s", "md4"))
    assert [name for name, entry in LOSSES.items() if not entry.fused] == ["any-order", "chain", "d3pm", "ct-elbo"]
    assert has_fused_form(score_entropy, uniform) and has_fused_form(masked_cross_entropy, mask)
    assert not has_fused_form(score_entropy, METHODS["m2s-gaussian"].build(VOCAB).head)
    assert not has_fused_form(LOSSES["ct-elbo"].function, uniform)
    text = ["ar", "duo", "gidd", "gidd-clipped", "md4", "mdlm", "neural-ctmc", "radd", "sedd", "sedd-absorb", "udlm"]
    for parts in (METHODS[name].build(VOCAB) for name in [*text, "m2s", "m2s-offset"]):
        assert has_fused_form(parts.loss, parts.head)


def test_which_choices_read_an_option() -> None:
    """As the signatures of the registered functions say."""
    read = readers(ProcessConfig)
    assert read["schedule"] == ("kind", ["uniform", "absorbing", "gaussian"])
    assert read["sigma_max"] == ("schedule", ["geometric", "geometric-rate"])
    assert read["chain_steps"] == ("kind", ["chain-uniform", "chain-absorbing", "chain-gaussian"])
    assert set(read) == set(vars(ProcessConfig())) - {"kind", "options"}
    assert readers(HeadConfig) == {
        "offset": ("kind", ["posterior", "ordinal"]),
        "scale": ("kind", ["log-score"]),
        "max_weight": ("loss", ["gidd-clipped"]),
    }


def test_the_option_of_every_class() -> None:
    found = class_options()
    assert found[m2s.Uniform] == "--process.kind uniform" and found[m2s.heads.Shifted] == "--process.kind none"
    assert found[m2s.Chain] == "--process.kind chain-uniform, chain-absorbing or chain-gaussian"
    assert found[m2s.LogScore] == "--head.kind log-score" and found[m2s.heads.NextToken] == "--head.kind next-token"


@pytest.mark.parametrize(
    ("method", "process", "head", "message"),
    [
        ("sedd", {}, {"offset": "exact"}, "head.offset is 'exact', but it is for head.kind posterior or ordinal, not log"),
        ("m2s", {"kind": "unifrom"}, {}, "process.kind is 'unifrom', but there is no process of that name: did you mean uni"),
        ("m2s", {"schedule": "linaer"}, {}, "process.schedule is 'linaer', but there is no schedule of that name: did you"),
        ("m2s", {}, {"kind": "posteror"}, "head.kind is 'posteror', but there is no head of that name: did you mean posterior"),
        (
            "m2s",
            {},
            {"loss": "score-entrpy"},
            "head.loss is 'score-entrpy', but there is no loss of that name: did you mean sc",
        ),
        ("gidd", {"p_uniform": 2.0}, {}, r"process.p_uniform is 2.0, but it must be in \[0, 1\)"),
        ("m2s", {}, {"loss": "masked"}, r"'masked', but the masked .* over m2s.Absorbing \(--process.kind absorbing\), not"),
        ("tauldr", {"options": ("jump_width=-1",)}, {}, "process.jump_width is -1.0, but it must be pos"),
    ],
)
def test_errors_name_the_option(method: str, process: dict, head: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        METHODS[method].build(VOCAB, ProcessConfig(**process), HeadConfig(**head))


def test_a_name_is_registered_once() -> None:
    for registry in (METHODS, PROCESSES, SCHEDULES, HEADS, LOSSES):
        name = next(iter(registry))
        with pytest.raises(ValueError, match="there is already a"):
            registry.add(name, object())


def test_bibtex_must_close_its_braces() -> None:
    with pytest.raises(ValueError, match="does not close its braces"):
        Method("x", "X", ProcessConfig(), HeadConfig(), "text", "@misc{x, title = {X}")
