"""Descriptions in `config.json`: those of version 0.1 still load, and classes of a plugin are saved after one registration."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import m2s
from m2s import hub
from m2s.heads import NextToken, Shifted
from m2s.hub.config import CLASSES
from m2s.models import DiT, DiTConfig

K = 5
matrix = torch.tensor([[-1.0, 0.25, 0.75], [0.1, -0.1, 0.0], [0.3, 0.4, -0.7]], dtype=torch.float64)
uniform = m2s.Uniform(K, m2s.Linear())


def network(states: int = K, **options: Any) -> DiT:
    model = DiT(DiTConfig(states, width=16, depth=1, heads=2, condition_width=8, **options))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def tensors_of(process: m2s.Process) -> list[Tensor]:
    return [value for value in vars(process).values() if isinstance(value, Tensor)]


def same(one: m2s.Head, other: m2s.Head) -> bool:
    tensors = zip(tensors_of(one.process), tensors_of(other.process), strict=True)
    return repr(one) == repr(other) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in tensors)


# --- classes of a plugin ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slow(m2s.Exponential):
    """A schedule with a field more."""

    comment: str = "none"


class NamedUniform(m2s.Uniform):
    """A process with an argument more."""

    def __init__(self, vocab: int, schedule: m2s.Schedule, label: str = "none") -> None:
        super().__init__(vocab, schedule)
        self.label = label


class Tempered(m2s.Posterior):
    """A head with an argument of another name."""

    def __init__(self, process: m2s.Process, heat: float) -> None:
        super().__init__(process)
        self.heat = heat


@pytest.fixture
def plugin() -> Iterator[None]:
    """One line for each class."""
    for cls in (Slow, NamedUniform, Tempered):
        CLASSES.add(cls.__name__, cls)
    yield
    for cls in (Slow, NamedUniform, Tempered):
        CLASSES.remove(cls.__name__)


@pytest.mark.usefixtures("plugin")
def test_registered_classes_of_a_plugin_are_saved_and_loaded(tmp_path: Path) -> None:
    head = Tempered(NamedUniform(K, Slow(0.5, "mine"), label="mine"), heat=2.0)
    hub.save(tmp_path, network(), head)
    loaded = hub.load(tmp_path).head
    assert type(loaded) is Tempered and loaded.heat == 2.0
    assert type(loaded.process) is NamedUniform and loaded.process.label == "mine"
    assert loaded.process.schedule == Slow(0.5, "mine")


@pytest.mark.usefixtures("plugin")
def test_a_class_must_store_its_arguments() -> None:
    head = Tempered(uniform, heat=2.0)
    del head.heat
    with pytest.raises(TypeError, match=r"Tempered takes the argument 'heat' but has no attribute .* self\.heat"):
        hub.to_dict(head)


# --- checkpoints of version 0.1 --------------------------------------------------------------------------------------------

LINEAR, LOG_LINEAR = {"kind": "Linear"}, {"kind": "LogLinear", "eps": 0.001}
VERSION_0_1: dict[str, tuple[dict[str, Any], m2s.Head]] = {  # descriptions as version 0.1 wrote them
    "posterior": (
        {"kind": "Posterior", "process": {"kind": "Uniform", "vocab": 5, "schedule": LINEAR}, "offset": "exact"},
        m2s.Posterior(m2s.Uniform(5, m2s.Linear()), offset="exact"),
    ),
    "score": (
        {"kind": "LogScore", "process": {"kind": "Absorbing", "vocab": 4, "schedule": LOG_LINEAR}, "scale": "sigma"},
        m2s.LogScore(m2s.Absorbing(4, m2s.LogLinear()), scale="sigma"),
    ),
    "rate": (
        {"kind": "FactorizedRate", "process": {"kind": "Hybrid", "vocab": 4, "p_uniform": 0.25}},
        m2s.FactorizedRate(m2s.Hybrid(4, p_uniform=0.25)),
    ),
    "projected": (
        {
            "kind": "Projected",
            "head": {
                "kind": "LogScore",
                "process": {"kind": "Uniform", "vocab": 5, "schedule": {"kind": "Exponential", "horizon": 4.0}},
                "scale": "none",
            },
        },
        m2s.Projected(m2s.LogScore(m2s.Uniform(5, m2s.Exponential(4.0)))),
    ),
    "ordinal": (
        {
            "kind": "Ordinal",
            "process": {
                "kind": "Uniform",
                "vocab": 5,
                "schedule": {"kind": "Rescaled", "schedule": {"kind": "Cosine"}, "eps": 0.0001},
            },
            "offset": "none",
        },
        m2s.Ordinal(m2s.Uniform(5, m2s.Rescaled(m2s.Cosine(), eps=1e-4)), offset="none"),
    ),
    "rate matrix": (
        {
            "kind": "Posterior",
            "process": {
                "kind": "RateMatrix",
                "rates": {"tensor": "process.rates"},
                "schedule": {"kind": "Geometric", "sigma_min": 0.0001, "sigma_max": 20.0},
                "mask": False,
            },
            "offset": "none",
        },
        m2s.Posterior(m2s.RateMatrix(matrix, m2s.Geometric(sigma_min=1e-4, sigma_max=20.0))),
    ),
    "chain": (
        {
            "kind": "Posterior",
            "process": {"kind": "Chain", "matrices": {"tensor": "process.matrices"}, "mask": True},
            "offset": "none",
        },
        m2s.Posterior(m2s.Chain.absorbing(2, torch.tensor([0.25, 0.5]))),
    ),
    "next token": ({"kind": "NextToken", "process": {"kind": "Shifted", "vocab": 4}}, NextToken(Shifted(4))),
}
DIT_0_1: dict[str, Any] = {
    "kind": "dit",
    "width": 16,
    "depth": 1,
    "heads": 2,
    "condition_width": 8,
    "dropout": 0.0,
    "time": True,
    "causal": False,
    "classes": None,
    "label_dropout": 0.1,
    "length": None,
    "clock": LOG_LINEAR,
    "label_after_silu": False,
    "norm_bias": False,
}


@pytest.mark.parametrize("name", VERSION_0_1)
def test_checkpoints_of_version_0_1_load(name: str, tmp_path: Path) -> None:
    """`config.json` is written by hand, as version 0.1 wrote it."""
    description, head = VERSION_0_1[name]
    states = head.process.states
    model = network(states, clock=m2s.LogLinear())
    contents = {
        "format": 1,
        "m2s": "0.1.0",
        "model": {**DIT_0_1, "states": states},
        "head": description,
        "data": {"kind": "text", "length": 8},
        "tokenizer": None,
        "extra": {"step": 3},
    }
    (tmp_path / "config.json").write_text(json.dumps(contents))
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    if name == "rate matrix":
        weights["process.rates"] = matrix
    if name == "chain":
        weights["process.matrices"] = head.process.matrices
    save_file(weights, tmp_path / "model.safetensors")
    loaded = hub.load(tmp_path)
    assert same(loaded.head, head)
    assert all(torch.equal(loaded.model.state_dict()[key], value) for key, value in model.state_dict().items())
    assert loaded.model.config.clock == m2s.LogLinear()
    assert loaded.data == {"kind": "text", "length": 8} and loaded.config["extra"] == {"step": 3}
    assert json.loads(json.dumps(hub.to_dict(head, {}))) == description  # and this version writes the same
