"""Processes, schedules, heads and networks as plain dictionaries: a class by its name and its constructor's arguments.

    to_dict(m2s.Posterior(m2s.Uniform(27, m2s.Linear())))
    {"kind": "Posterior", "process": {"kind": "Uniform", "vocab": 27, "schedule": {"kind": "Linear"}}, "offset": "none"}

A matrix has no place in JSON: it goes into a second dictionary of tensors, as "process.<argument>", and the first says so.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from m2s.heads import FactorizedRate, Head, LogScore, NextToken, Ordinal, Posterior, Shifted
from m2s.models import NETWORKS, build, describe
from m2s.process import (
    Absorbing,
    Chain,
    Cosine,
    Exponential,
    Geometric,
    GeometricRate,
    Hybrid,
    Linear,
    LogLinear,
    Process,
    RateMatrix,
    Schedule,
    Uniform,
)
from m2s.process.schedule import Rescaled
from m2s.realizability import Projected

# Each class by the arguments that make it again. A new schedule, process or head is one line here.
ARGUMENTS: dict[type, tuple[str, ...]] = {
    Linear: (),
    Exponential: ("horizon",),
    LogLinear: ("eps",),
    Geometric: ("sigma_min", "sigma_max"),
    GeometricRate: ("sigma_max", "base"),
    Cosine: (),
    Rescaled: ("schedule", "eps"),
    Uniform: ("vocab", "schedule"),
    Absorbing: ("vocab", "schedule"),
    Hybrid: ("vocab", "p_uniform"),
    RateMatrix: ("rates", "schedule", "mask"),
    Chain: ("matrices", "mask"),
    Shifted: ("vocab",),
    Posterior: ("process", "offset"),
    LogScore: ("process", "scale"),
    FactorizedRate: ("process",),
    Ordinal: ("process", "offset"),
    NextToken: ("process",),
    Projected: ("head",),
}

PREFIX = "process."  # of the names of a process's tensors


def to_dict(value: Process | Schedule | Head, tensors: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """`value` as a dictionary that JSON can hold; its matrices, if it has any, are put into `tensors`."""
    if type(value) not in ARGUMENTS:
        raise TypeError(f"no file can name a {type(value).__name__}: known are {_names()}; add it to m2s.hub.config.ARGUMENTS")
    return {
        "kind": type(value).__name__,
        **{name: _plain(name, _argument(value, name), tensors) for name in ARGUMENTS[type(value)]},
    }


def from_dict(description: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Any:
    """The process, schedule or head that `to_dict` described."""
    if not isinstance(description, Mapping):
        raise TypeError(f'a description must be a dictionary such as {{"kind": "Linear"}}, not {description!r}')
    arguments = dict(description)
    kind = arguments.pop("kind", None)
    cls = next((known for known in ARGUMENTS if known.__name__ == kind), None)
    if cls is None:
        raise ValueError(f"kind is {kind!r}, but it must be one of {_names()}")
    wrong = sorted(set(arguments) ^ set(ARGUMENTS[cls]))
    if wrong:
        expected = ", ".join(ARGUMENTS[cls]) or "no arguments"
        raise ValueError(f"the description of {kind} must hold {expected}, but {', '.join(wrong)} is missing or unknown")
    return cls(**{name: _value(value, tensors) for name, value in arguments.items()})


def network_to_dict(model: nn.Module) -> dict[str, Any]:
    """What `m2s.models.describe` says of a network, its clock too as a dictionary."""
    return {name: _plain(name, value, None) for name, value in describe(model).items()}


def network_from_dict(description: Mapping[str, Any]) -> nn.Module:
    """The network that `network_to_dict` described, with fresh weights."""
    if (kind := description.get("kind")) not in NETWORKS:
        raise ValueError(
            f"the network's kind is {kind!r}, but it must be one of {', '.join(NETWORKS)}; a network of your own: put it into "
            "m2s.models.NETWORKS first, as {kind: (configuration dataclass, module class)}"
        )
    return build({name: _value(value, None) for name, value in description.items()})


def _names() -> str:
    return ", ".join(cls.__name__ for cls in ARGUMENTS)


def _argument(value: object, name: str) -> Any:
    """What the constructor was given: a process keeps its mask as an index, and its rates as a generator."""
    if isinstance(value, RateMatrix) and name == "rates":
        return value.generator
    if name == "mask":
        return getattr(value, name) is not None
    return getattr(value, name)


def _plain(name: str, value: Any, tensors: dict[str, Tensor] | None) -> Any:
    if isinstance(value, Tensor):
        if tensors is None:
            raise ValueError(f"{name} is a matrix, which JSON cannot hold: give to_dict a dictionary `tensors` to put it into")
        tensors[PREFIX + name] = value.detach().cpu()
        return {"tensor": PREFIX + name}
    return to_dict(value, tensors) if isinstance(value, Process | Schedule | Head) else value


def _value(value: Any, tensors: Mapping[str, Tensor] | None) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "tensor" not in value:
        return from_dict(value, tensors)
    if tensors is None or value["tensor"] not in tensors:
        raise ValueError(f"the description names a tensor {value['tensor']}, which is not among those given")
    return torch.as_tensor(tensors[value["tensor"]])
