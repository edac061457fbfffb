"""Processes, schedules, heads and networks as plain dictionaries: a class by its name, and its constructor's arguments.

    to_dict(m2s.Posterior(m2s.Uniform(27, m2s.Linear())))
    {"kind": "Posterior", "process": {"kind": "Uniform", "vocab": 27, "schedule": {"kind": "Linear"}}, "offset": "none"}

JSON cannot hold matrices. They go into a second dictionary of tensors, as "process.<argument>", and the first refers to them.

A class of your own can be saved and loaded when it is registered: its function in `m2s.process.registry.PROCESSES`, `SCHEDULES`
or `m2s.heads.registry.HEADS` has the class as its return annotation, or the class itself is the entry. A class that no entry
names is added by `m2s.hub.CLASSES.add("MyProcess", MyProcess)`.
"""

import contextlib
import inspect
import math
import re
import threading
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from m2s.heads import Head
from m2s.heads.registry import HEADS
from m2s.models import build, describe
from m2s.process import Cosine, Linear, Process, RateMatrix, Rescaled, Schedule
from m2s.process.registry import PROCESSES, SCHEDULES
from m2s.realizability import Projected
from m2s.registry import Registry

PREFIX = "process."  # of the names of a process's tensors

# Classes that a checkpoint can name, and that no registered function declares to return.
CLASSES: Registry[type] = Registry("process, schedule or head")
for _cls in (Linear, Cosine, Rescaled, Projected):
    CLASSES.add(_cls.__name__, _cls)


def saved_classes() -> dict[str, type]:
    """Return the classes that a checkpoint can name. The name of a class must never change: files hold it.

    Returns:
        The entries of `CLASSES`, and by their names the classes that the entries of `PROCESSES`, `SCHEDULES` and `HEADS` are or
        declare to return.
    """
    found = dict(CLASSES.items())
    builders: list[Any] = [*PROCESSES.values(), *SCHEDULES.values(), *HEADS.values()]
    for builder in builders:
        cls: Any = builder
        if not isinstance(builder, type):
            cls = None
            with contextlib.suppress(NameError, TypeError):  # annotations that cannot be evaluated: the class is not known
                cls = typing.get_type_hints(builder).get("return")
        if isinstance(cls, type) and not inspect.isabstract(cls):
            found.setdefault(cls.__name__, cls)
    return found


def argument_names(cls: type) -> list[str]:
    """Return the names of a constructor's arguments.

    Args:
        cls: A class of `saved_classes`.

    Returns:
        The names, in the order of the signature.
    """
    return list(inspect.signature(cls).parameters)


def to_dict(value: Process | Schedule | Head, tensors: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """Describe a process, schedule or head by a dictionary that JSON can hold.

    Each argument of the constructor is read from the attribute of the same name. It may be a number, a string, a tensor, or
    again a process, schedule or head.

    Args:
        value: An object of a class of `saved_classes`.
        tensors: Where its matrices are put, by name. It may be None for an object without matrices.

    Returns:
        The description: "kind", and the constructor's arguments.

    Raises:
        TypeError: The class is not registered, or does not store an argument.
        ValueError: The object has a matrix, and `tensors` is None.
    """
    classes = saved_classes()
    kind = next((name for name, known in classes.items() if known is type(value)), None)
    if kind is None:
        name = type(value).__name__
        raise TypeError(
            f"{name} is not registered, so a checkpoint cannot name it: call m2s.hub.CLASSES.add({name!r}, {name}); registered "
            f"are {', '.join(classes)}"
        )
    names = argument_names(type(value))
    return {"kind": kind, **{name: _to_json(name, _argument(value, name), tensors) for name in names}}


def from_dict(description: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Build the process, schedule or head that `to_dict` described.

    Args:
        description: "kind", and the constructor's arguments.
        tensors: Its matrices, by name.

    Returns:
        The object.

    Raises:
        TypeError: The description is not a dictionary.
        ValueError: The class is not registered, or arguments are missing or unknown.
    """
    if not isinstance(description, Mapping):
        raise TypeError(f'a description must be a dictionary such as {{"kind": "Linear"}}, not {description!r}')
    arguments = dict(description)
    kind = arguments.pop("kind", None)
    classes = saved_classes()
    if kind not in classes:
        raise ValueError(
            f"kind is {kind!r}, but it must be one of {', '.join(classes)}; register a class of your own with "
            "m2s.hub.CLASSES.add(name, class) first"
        )
    names = argument_names(classes[kind])
    wrong = sorted(set(arguments) ^ set(names))
    if wrong:
        expected = ", ".join(names) or "no arguments"
        raise ValueError(f"the description of {kind} must hold {expected}, but {', '.join(wrong)} is missing or unknown")
    return classes[kind](**{name: _from_json(value, tensors) for name, value in arguments.items()})


def network_to_dict(model: nn.Module) -> dict[str, Any]:
    """Describe a network by a dictionary that JSON can hold: `m2s.models.describe`, with the clock as a dictionary too.

    Args:
        model: A network of a class in `m2s.models.NETWORKS`.

    Returns:
        "kind", and the network's settings.
    """
    return {name: _to_json(name, value, None) for name, value in describe(model).items()}


def network_from_dict(description: Mapping[str, Any]) -> nn.Module:
    """Build the network that `network_to_dict` described, with random weights.

    Args:
        description: "kind", and the network's settings.

    Returns:
        The network.

    Raises:
        ValueError: There is no such network, or it has no such setting.
    """
    return build({name: _from_json(value, None) for name, value in description.items()})


@contextlib.contextmanager
def limit_parameters(shapes: Sequence[Sequence[int]]) -> Iterator[None]:
    """Raise an error inside the block as soon as a network has clearly more parameters than a file has tensors.

    A configuration can ask for ten million layers or a matrix that no memory can hold. The error is raised while the network
    is built, and before the memory of its parameters is touched. Small differences are left to the caller to report.

    Args:
        shapes: The shapes of the tensors in the file.

    Yields:
        None.

    Raises:
        ValueError: There are more than twice as many parameters, or their sizes add up to more than twice as much.
    """
    most_tensors, most_elements = 2 * len(shapes) + 1_000, 2 * sum(map(math.prod, shapes)) + 100_000_000
    thread, tensors, elements = threading.get_ident(), 0, 0
    smaller = (
        f"the file of weights holds {len(shapes)} tensors, which are far fewer or smaller than those of the network that the "
        "configuration describes"
    )

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal tensors, elements
        if parameter is None or threading.get_ident() != thread:
            return
        tensors, elements = tensors + 1, elements + parameter.numel()
        if tensors > most_tensors or elements > most_elements:
            raise ValueError(smaller)

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    except RuntimeError as error:  # a parameter so large that torch cannot make it
        asked = re.search(r"allocate (\d+) bytes", str(error))
        if asked is None or int(asked[1]) <= 4 * most_elements:
            raise
        raise ValueError(smaller) from None
    finally:
        hook.remove()


def _argument(value: Any, name: str) -> Any:
    """The value that the constructor was given for an argument."""
    if name == "mask":  # a bool for the constructor; a process stores the index of the mask, or None
        return value.mask is not None
    tabulated: RateMatrix | None = getattr(value, "tabulated", None)
    if tabulated is not None and name == "rates":
        return tabulated.generator
    if not hasattr(value, name):
        raise TypeError(
            f"{type(value).__name__} takes the argument {name!r} but has no attribute of that name: store it as self.{name}, "
            "so that a checkpoint can hold it"
        )
    return getattr(value, name)


def _to_json(name: str, value: Any, tensors: dict[str, Tensor] | None) -> Any:
    """An argument as JSON holds it."""
    if isinstance(value, Tensor):
        if tensors is None:
            raise ValueError(f"{name} is a matrix, which JSON cannot hold: give to_dict a dictionary `tensors` to put it into")
        tensors[PREFIX + name] = value.detach().cpu()
        return {"tensor": PREFIX + name}
    plain = value is None or isinstance(value, str | int | float | list | tuple | dict)
    return value if plain else to_dict(value, tensors)


def _from_json(value: Any, tensors: Mapping[str, Tensor] | None) -> Any:
    """An argument as the constructor takes it."""
    if not isinstance(value, Mapping):
        return value
    if "tensor" not in value:
        return from_dict(value, tensors)
    if tensors is None or value["tensor"] not in tensors:
        raise ValueError(f"the description names a tensor {value['tensor']}, which is not among those given")
    return torch.as_tensor(tensors[value["tensor"]])
