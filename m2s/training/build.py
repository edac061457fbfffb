"""Build what a configuration describes: the data, the network with its initial weights, and the method's head."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from m2s import hub
from m2s.data import DATASETS
from m2s.data.source import Source, is_padded, open_source
from m2s.errors import UserError, suggest
from m2s.heads import Head, LogScore
from m2s.losses import duo
from m2s.methods import METHODS
from m2s.methods.build import explain, make_head, make_loss, make_process, nelbo_loss
from m2s.models import NETWORKS, DiTConfig, UNetConfig, build, describe, dit, unet
from m2s.process import Process
from m2s.registry import option_types, parse_options
from m2s.rng import derived_seed
from m2s.training.config import Config, DataConfig, NetworkConfig
from m2s.training.optimizer import block_matrices

__all__ = [
    "describe_network",
    "load_weights",
    "make_head",
    "make_loss",
    "make_objects",
    "make_process",
    "nelbo_loss",
    "open_data",
]
# Options of the network that change its function but not the shape of any tensor.
INVISIBLE = ("heads", "causal", "label_after_silu", "groups", "sinusoids", "padding", "qk_norm")


def open_data(config: DataConfig) -> Source:
    """Open the data of a configuration.

    Args:
        config: The data. Its KEY=VALUE options are keyword arguments of the registered data set.

    Returns:
        The training and validation examples.

    Raises:
        UserError: There is no such data set, or the data is missing or damaged.
    """
    where: dict[str, Any] = {"folder": config.folder, "length": config.length, "hub": config.hub}
    if not config.options:
        return open_source(config.name, **where)
    dataset: Any = DATASETS.find(config.name, "data.name")
    known = {name: kind for name, kind in option_types(dataset).items() if name not in where}
    return dataset(**where, **parse_options(config.options, known, "data"))


def describe_network(config: NetworkConfig, process: Process, source: Source) -> dict[str, Any]:
    """Return the description of a network from which `m2s.models.build` builds it.

    Args:
        config: The network: a size, and single numbers that differ from it.
        process: The process.
        source: The data.

    Returns:
        The kind of the network and the fields of its configuration class.

    Raises:
        UserError: An option is unknown, out of range, or not for this kind of network or data.
    """
    NETWORKS.find(config.kind, "network.kind")
    if not process.has_transitions and config.time == "yes":
        reason = "an autoregressive model has no time"
        raise UserError(option="network.time", value="yes", reason=reason, hint="leave it out")
    if config.labels and source.classes is None:
        raise UserError(option="network.labels", value=True, reason="the data has no labels", hint="leave it out")
    try:
        description = DESCRIBE.get(config.kind, _describe_plugin)(config, process, source)
    except UserError as error:
        raise error.within("network") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"network: {error}") from error
    return {"kind": config.kind, **vars(description)}


def _describe_dit(config: NetworkConfig, process: Process, source: Source) -> DiTConfig:
    """The configuration of a transformer."""
    options = _common_options(config, source) | _sized_options(config, "dit") | _clock(config, process)
    options["causal"] = not process.has_transitions
    options["padding"] = is_padded(source) and not options["causal"]
    return DiTConfig.preset(config.size, process.states, length=source.length, **options)


def _describe_unet(config: NetworkConfig, process: Process, source: Source) -> UNetConfig:
    """The configuration of a U-Net."""
    if _clock(config, process):
        reason = f"it is for network.kind dit, not {config.kind}"
        raise UserError(option="network.clock", value=config.clock, reason=reason, hint="leave it out")
    options = _common_options(config, source) | _sized_options(config, "unet")
    if is_padded(source):
        reason = "a U-Net would read padding as pixels, and the data is padded"
        raise UserError(option="network.kind", value="unet", reason=reason, hint="use dit")
    if source.shape is None:
        reason = "a U-Net is for images, and the data is text"
        raise UserError(option="network.kind", value="unet", reason=reason, hint="use dit")
    mask = process.mask is not None
    return UNetConfig.preset(config.size, process.states, source.shape, mask=mask, input=config.input, **options)


def _describe_plugin(config: NetworkConfig, process: Process, source: Source) -> Any:
    """The configuration of a registered network: what its dataclass has fields for, and then KEY=VALUE options."""
    settings = NETWORKS[config.kind][0]
    known = option_types(settings)
    offered = _common_options(config, source) | _clock(config, process)
    offered |= {name: getattr(config, name) for name in ("depth", "heads", "layers") if getattr(config, name) is not None}
    offered |= {"states": process.states, "length": source.length, "shape": source.shape, "mask": process.mask is not None}
    offered |= {"vocab": process.vocab, "causal": not process.has_transitions, "padding": is_padded(source)}
    given = parse_options(config.options, known, "network")
    return settings(**{name: value for name, value in offered.items() if name in known} | given)


# Networks whose options are named in `NetworkConfig`. All others take theirs as KEY=VALUE.
DESCRIBE: dict[str, Callable[[NetworkConfig, Process, Source], Any]] = {"dit": _describe_dit, "unet": _describe_unet}


def _common_options(config: NetworkConfig, source: Source) -> dict[str, Any]:
    """The options that every network may have, where they are given."""
    options: dict[str, Any] = {"width": config.width, "dropout": config.dropout}
    options = {name: value for name, value in options.items() if value is not None}
    return options | {
        "time": config.time != "no",
        "label_dropout": config.label_dropout,
        "classes": source.classes if config.labels else None,
    }


def _sized_options(config: NetworkConfig, kind: str) -> dict[str, Any]:
    """The options of a DiT or a U-Net that are given. It is an error to give one of the other network."""
    sizes: Any = {"dit": dit.SIZES, "unet": unet.SIZES}[kind]
    if config.size not in sizes:
        reason = f"there is no {kind} of that size"
        raise UserError(option="network.size", value=config.size, reason=reason, hint=suggest(config.size, sizes))
    if config.options:
        reason, hint = f"it is for a plugin's network, not for {kind}", f"give {config.options[0]} as an option"
        raise UserError(option="network.options", value=" ".join(config.options), reason=reason, hint=hint)
    names = {
        "dit": ("depth", "heads", "label_after_silu", "norm_bias", "qk_norm", "gates", "embedding_std"),
        "unet": ("layers", "multipliers", "groups", "sinusoids"),
    }
    defaults, other = NetworkConfig(), "unet" if kind == "dit" else "dit"
    for name in names[other]:
        if getattr(config, name) != getattr(defaults, name):
            reason = f"it is for network.kind {other}, not {kind}"
            raise UserError(option=f"network.{name}", value=getattr(config, name), reason=reason, hint="leave it out")
    return {name: getattr(config, name) for name in names[kind] if getattr(config, name) != getattr(defaults, name)}


def _clock(config: NetworkConfig, process: Process) -> dict[str, Any]:
    """The schedule from which a DiT computes sigma(t), where that is its clock."""
    if config.clock != "sigma":
        return {}
    schedule = getattr(process, "schedule", None)
    if schedule is None:
        reason = f"{process} has no schedule"
        raise UserError(option="network.clock", value="sigma", reason=reason, hint="give --network.clock time")
    return {"clock": schedule}


def inherit_clock(config: NetworkConfig, head: Head, checkpoint: hub.Checkpoint) -> NetworkConfig:
    """Return the network with the clock of the checkpoint that the run starts from, where it is "auto".

    The clock is the noise, not the schedule: under another schedule the same sigma stands for the same noise.

    Args:
        config: The network.
        head: The head of the run.
        checkpoint: The checkpoint.

    Returns:
        The new configuration.

    Raises:
        UserError: The scores of the checkpoint have another scale.
    """
    before = checkpoint.head
    if isinstance(head, LogScore) and isinstance(before, LogScore) and head.scale != before.scale:
        reason = f"the scores of the checkpoint to start from have {before.scale}"
        raise UserError(option="head.scale", value=head.scale, reason=reason, hint=f"give --head.scale {before.scale}")
    network = checkpoint.model.config
    if config.kind != "dit" or config.time == "no" or not isinstance(network, DiTConfig):
        return config
    if config.clock == "auto" and network.clock is not None:
        config = dataclasses.replace(config, clock="sigma")
    return config


def make_objects(config: Config, source: Source) -> tuple[nn.Module, Head, dict[str, Any]]:
    """Build the network and the head of a run.

    Args:
        config: The resolved configuration.
        source: The data.

    Returns:
        The network with its initial weights, the head, and the description of the network.

    Raises:
        UserError: The parts do not fit together, or the checkpoint of --init does not fit the network.
    """
    head = METHODS[config.method].build(source.vocab, config.process, config.head).head
    chain = head.process.chain
    if chain is not None and chain.steps * config.run.t_min > 1 + 1e-6:
        raise UserError(
            option="t_min",
            value=config.run.t_min,
            reason=f"the first of {chain.steps} steps ends at {1 / chain.steps:g}",
            hint="set --t-min to at most that, or make --process.chain-steps smaller",
        )
    checkpoint = None if config.run.init is None else _open(config.run.init)
    network = config.network if checkpoint is None else inherit_clock(config.network, head, checkpoint)
    description = describe_network(network, head.process, source)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(config.run.seed, "weights"))
        model = build(description)
    if config.optimizer.kind == "muon":
        block_matrices(model)  # raises an error before anything is written
    if config.head.curriculum == "duo":
        try:
            duo.check_duo(model, head)
        except TypeError as error:
            raise UserError(option="head.curriculum", value="duo", reason=explain(error)) from error
    if checkpoint is not None:
        _copy_weights(model, description, checkpoint, str(config.run.init))
    return model, head, description


def load_weights(model: nn.Module, description: dict[str, Any], path: str) -> None:
    """Load the weights of a checkpoint. The networks of a score and of a posterior have the same tensors.

    Args:
        model: The network, whose weights are replaced.
        description: Its description.
        path: The checkpoint, ours or SEDD's.

    Raises:
        UserError: The checkpoint cannot be read, or holds another network.
    """
    _copy_weights(model, description, _open(path), path)


def _open(path: str) -> hub.Checkpoint:
    """Load the checkpoint of --init."""
    try:
        return hub.load(path, verify=True)
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        raise UserError(f"--init {path}: {error}") from error


def _copy_weights(model: nn.Module, description: dict[str, Any], checkpoint: hub.Checkpoint, path: str) -> None:
    """Copy the weights of a checkpoint after checking that it holds the same network."""
    before = describe(checkpoint.model)
    if before["states"] != description["states"]:
        raise UserError(
            f"--init {path} is for {before['states']} states, but data and process here have {description['states']}: "
            "the vocabulary and the mask must be the same"
        )
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in checkpoint.model.state_dict().items()}
    wrong = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    if wrong:
        raise UserError(
            f"--init {path} holds another network: {wrong[0]} is {found.get(wrong[0], 'missing')} there and "
            f"{expected.get(wrong[0], 'missing')} here ({len(wrong)} tensors differ); give the same network options"
        )
    for name in INVISIBLE:
        if before.get(name) != description.get(name):
            raise UserError(
                f"--init {path} holds another network: {name} is {before.get(name)} there and {description.get(name)} here; "
                "give the same network options"
            )
    model.load_state_dict(checkpoint.model.state_dict())
