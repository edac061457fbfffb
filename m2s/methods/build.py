"""Build the process, the head and the loss of a configuration from the registries."""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch

from m2s.errors import UnsupportedError, UserError
from m2s.heads import Head, Posterior
from m2s.heads.registry import HEADS
from m2s.losses.registry import LOSSES, Loss
from m2s.methods.config import HeadConfig, ProcessConfig
from m2s.process import Process
from m2s.process.registry import PROCESSES, SCHEDULES
from m2s.registry import Registry, option_types, parse_options

Section = ProcessConfig | HeadConfig


def takes_schedule(kind: str) -> bool:
    """Return whether a process reads `process.schedule`.

    Args:
        kind: The name of the process.
    """
    return "schedule" in inspect.signature(PROCESSES[kind]).parameters


def make_process(config: ProcessConfig, vocab: int) -> Process:
    """Build the process of a configuration.

    Args:
        config: The process, with nothing left "auto".
        vocab: The number of clean tokens.

    Returns:
        The process.

    Raises:
        UserError: There is no such process or schedule, or no such option of it.
        ValueError: An option is out of range.
    """
    builders = _builders(config)
    options = _options(config, builders)
    if len(builders) == 1:
        return builders[0](vocab, **options[0])
    return builders[0](vocab, builders[1](**options[1]), **options[0])


def make_head(config: HeadConfig, process: Process) -> Head:
    """Build the head of a configuration.

    Args:
        config: The head, with nothing left "auto".
        process: The process.

    Returns:
        The head.

    Raises:
        UserError: There is no such head, or no such option of it.
        TypeError: The head is not for this process.
    """
    builders = _builders(config)
    return builders[0](process, **_options(config, builders)[0])


def make_loss(config: HeadConfig) -> Loss:
    """Return the training loss of a configuration, with its options bound.

    Args:
        config: The head, with nothing left "auto".

    Raises:
        UserError: There is no such loss, or no such option of it.
    """
    builders = _builders(config)
    options = _options(config, builders)[1]
    return functools.partial(builders[1], **options) if options else builders[1]


def nelbo_loss(config: HeadConfig) -> Loss:
    """Return the loss whose integral over t is the NELBO, by which a run is validated.

    Args:
        config: The head, with nothing left "auto".
    """
    return LOSSES.find(config.loss, "head.loss").nelbo or make_loss(config)


def _builders(config: Section) -> list[Callable[..., Any]]:
    """The functions that read the options of a section: of a process and its schedule, or of a head and its loss."""
    if isinstance(config, HeadConfig):
        return [HEADS.find(config.kind, "head.kind"), LOSSES.find(config.loss, "head.loss").function]
    process = PROCESSES.find(config.kind, "process.kind")
    return [process, SCHEDULES.find(config.schedule, "process.schedule")] if takes_schedule(config.kind) else [process]


def _options(config: Section, builders: list[Callable[..., Any]]) -> list[dict[str, Any]]:
    """The options for each of the functions: fields that differ from their default, and then KEY=VALUE options.

    A field with its default value is left out, so that a plugin's function may have another default for an option of that name.
    """
    section = "head" if isinstance(config, HeadConfig) else "process"
    defaults, given = vars(type(config)()), vars(config)
    known = [option_types(builder) for builder in builders]
    extra = parse_options(config.options, functools.reduce(lambda a, b: {**a, **b}, known), section)
    changed = {name: value for name, value in given.items() if value != defaults[name]} | extra
    return [{name: changed[name] for name in types if name in changed} for types in known]


def readers(section: type[Section]) -> dict[str, tuple[str, list[str]]]:
    """Return which choices read each option of a section.

    Args:
        section: `ProcessConfig` or `HeadConfig`.

    Returns:
        For each option that some choice reads: the field that makes the choice, such as "kind", and the names that read it.
    """
    choices: dict[str, dict[str, Callable[..., Any]]] = {
        "kind": dict(HEADS),
        "loss": {n: e.function for n, e in LOSSES.items()},
    }
    found: dict[str, tuple[str, list[str]]] = {}
    if section is ProcessConfig:
        choices = {"kind": dict(PROCESSES), "schedule": dict(SCHEDULES)}
        found["schedule"] = ("kind", [name for name in PROCESSES if takes_schedule(name)])
    for field in fields(section):
        for choice, builders in choices.items():
            names = [name for name, builder in builders.items() if field.name in option_types(builder)]
            if names:
                found[field.name] = (choice, names)
    return found


def check_unread(config: Section, defaults: Section) -> None:
    """Raise an error for an option that was changed and that nothing would read.

    Args:
        config: The section, with nothing left "auto".
        defaults: The values that count as unchanged.

    Raises:
        UserError: An option is not for the chosen process, schedule, head or loss.
    """
    section = "head" if isinstance(config, HeadConfig) else "process"
    for name, (choice, names) in readers(type(config)).items():
        value, chosen = getattr(config, name), getattr(config, choice)
        if section == "process" and choice == "schedule" and not takes_schedule(config.kind):
            chosen = f"that of {config.kind}"
        if chosen not in names and value != getattr(defaults, name):
            raise UserError(
                option=f"{section}.{name}",
                value=value,
                reason=f"it is for {section}.{choice} {_either(names)}, not {chosen}",
                hint="leave it out",
            )


def check_loss(name: str, head: Head, loss: Loss) -> None:
    """Raise an error where a loss is not for a head.

    Args:
        name: The name of the loss.
        head: The head.
        loss: The loss.

    Raises:
        UserError: The loss is not for this head. For a finite chain the message names the losses that are.
    """
    error = _failure(loss, head)
    if error is None:
        return
    if head.process.chain is not None:
        heads = [head] if head.has_posterior else [Posterior(head.process)]
        usable = [one for one, entry in LOSSES.items() if _failure(entry.function, heads[0]) is None]
        also = "" if head.has_posterior else ", with --head.kind posterior"
        if name not in usable:
            raise UserError(
                option="head.loss",
                value=name,
                reason="a finite chain has no rates and needs a loss of m2s.losses.d3pm",
                hint=f"give --head.loss {' or '.join(usable)}{also}",
            ) from error
    raise UserError(option="head.loss", value=name, reason=explain(error)) from error


def _failure(loss: Loss, head: Head) -> Exception | None:
    """The error of a loss on one token; None where it has none."""
    token = torch.zeros(1, 1, dtype=torch.long)
    try:
        loss(head, torch.zeros(1, 1, head.process.states), token, token, torch.tensor([0.5]))
    except (TypeError, ValueError) as error:
        return error
    return None


def class_options() -> dict[type, str]:
    """Return the option that chooses each class of process and head.

    The classes are the return annotations of the functions in the registries.

    Returns:
        For example {Uniform: "--process.kind uniform", ...}.
    """
    names: dict[tuple[str, type], list[str]] = {}
    registries: dict[str, Registry[Callable[..., Any]]] = {"--process.kind": PROCESSES, "--head.kind": HEADS}
    for option, registry in registries.items():
        for name, builder in registry.items():
            cls = typing.get_type_hints(builder).get("return")
            if isinstance(cls, type):
                names.setdefault((option, cls), []).append(name)
    return {cls: f"{option} {_either(known)}" for (option, cls), known in names.items()}


def _either(names: list[str]) -> str:
    """Names as a choice: "a, b or c"."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def explain(error: Exception) -> str:
    """Return the message of an error about parts that do not fit together, with the options that choose supported classes.

    Args:
        error: The error of a head, a loss or a curriculum.

    Returns:
        The message, as in "UDLM's loss is for m2s.Posterior (--head.kind posterior) over ..., not for ...".
    """
    return error.describe(class_options()) if isinstance(error, UnsupportedError) else str(error)


def fill(config: Any, defaults: Any) -> dict[str, Any]:
    """Return the values of the method for what a configuration leaves open.

    Args:
        config: A `ProcessConfig` or a `HeadConfig`.
        defaults: The method's values, in the same class.

    Returns:
        The values by the name of the field: names that are "auto", and the KEY=VALUE options where none are given.
    """
    method: Mapping[str, Any] = vars(defaults)
    open_ = [name for name, value in vars(config).items() if value == "auto" or (name == "options" and not value)]
    return {name: method[name] for name in open_ if method[name] not in ("auto", ())}
