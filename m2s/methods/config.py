"""The parts of a configuration that a method chooses: the process and the head, with the loss.

A value "auto" is the method's. A value that is given wins over the method's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from m2s.heads.registry import HEADS
from m2s.losses.registry import LOSSES
from m2s.process.registry import PROCESSES, SCHEDULES

AUTO = "auto"  # selects a default, in every option that has one


def _read_auto(kind: Callable[[str], Any]) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    """Read and print None as "auto" on the command line, so that a number has the same spelling of its default as a name."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT" if kind is int else "FLOAT",
        instance_from_str=lambda given: None if given[0] == AUTO else kind(given[0]),
        is_instance=lambda value: value is None or isinstance(value, int | float),
        str_from_instance=lambda value: [AUTO if value is None else str(value)],
    )


AutoInt = Annotated[int | None, _read_auto(int)]
"""A whole number, or None, which the command line spells "auto"."""
AutoFloat = Annotated[float | None, _read_auto(float)]
"""A number, or None, which the command line spells "auto"."""


def registered(registry: Mapping[str, Any], *others: str) -> Any:
    """Return the command line's form of an option that takes a registered name.

    Args:
        registry: The entries by name. Plugins may add to it later: the help lists what is registered when it is printed.
        *others: Further values, such as "auto".
    """
    # tyro formats its help with %, so that a name is never read as a format
    return tyro.conf.arg(
        metavar="NAME",
        help_behavior_hint=lambda default: f"(default: {default}; one of {', '.join([*others, *registry])})".replace("%", "%%"),
    )


Options = Annotated[tuple[str, ...], tyro.conf.arg(metavar="[KEY=VALUE ...]")]


@dataclass(frozen=True)
class ProcessConfig:
    """The forward process. Which options a choice reads follows from its function in `m2s.process.registry`."""

    kind: Annotated[str, registered(PROCESSES, AUTO)] = AUTO
    """How clean tokens are corrupted. gaussian is for ordered levels, such as gray levels. chain-...: in a finite number of
    steps (D3PM). none: not at all, for autoregressive models."""
    schedule: Annotated[str, registered(SCHEDULES, AUTO)] = AUTO
    """The noise schedule. hybrid and the chains have their own."""
    horizon: float = 5.0
    """exponential: alpha = exp(-horizon t)."""
    eps: float = 1e-3
    """log-linear: alpha at t = 1."""
    rescale: AutoFloat = None
    """linear, cosine: eps of alpha = eps + (1 - 2 eps) alpha~, which decreases from 1 - eps to eps
    instead of from 1 to 0 (MD4's released code: 1e-4). By default there is no rescaling."""
    sigma_min: float = 1e-3
    """geometric: total noise at t = 0."""
    sigma_max: float = 7.0
    """geometric, geometric-rate: total noise at t = 1."""
    base: float = 100.0
    """geometric-rate: the ratio of the rates at t = 1 and t = 0."""
    p_uniform: float = 0.1
    """hybrid: the uniform mass at t = 1/2, less than 1. For noise without a mask take kind uniform."""
    chain_steps: int = 100
    """chain-...: the number of steps (D3PM: 1000)."""
    jump_width: AutoFloat = None
    """gaussian: the width of a jump in levels. By default 6 of 256 (Campbell et al.), in proportion."""
    stationary_width: AutoFloat = None
    """gaussian: the width of the stationary distribution in levels. By default 512 of 256, in proportion."""
    options: Options = ()
    """Options of a plugin's process or schedule, such as strength=2."""


@dataclass(frozen=True)
class HeadConfig:
    """The head and the loss. Which options a choice reads follows from its function in `m2s.heads.registry`."""

    kind: Annotated[str, registered(HEADS, AUTO)] = AUTO
    """The meaning of the network's output. ordinal: a posterior over ordered levels, from a mean and a scale."""
    offset: Literal["auto", "none", "exact"] = "auto"
    """posterior, ordinal: none: the output is the posterior (the paper). exact: the output is the leave-one-out distribution,
    the prediction without the token at that position."""
    scale: Literal["auto", "none", "sigma"] = "auto"
    """log-score over an absorbing mask: sigma subtracts log(expm1 sigma) + log K from the output, as SEDD's release does."""
    curriculum: Literal["auto", "none", "duo"] = "auto"
    """duo, for a posterior over uniform noise: in the first half of the run the network reads softened tokens. The training
    loss is then not an upper bound on the NLL; the validation loss is."""
    loss: Annotated[str, registered(LOSSES, AUTO)] = AUTO
    """The training loss. score-entropy: for every head. masked: the cross entropy of MD4 and MDLM, for a posterior over an
    absorbing mask. any-order: RADD's weighting of it, without time. noised: on noised positions, for the exact offset over
    uniform noise. gidd-clipped: GIDD's for training. chain, d3pm: for a finite chain, without and with the auxiliary term.
    likelihood: for next-token. gidd, udlm, path-kl, ct-elbo: as their authors write them, equal to score-entropy."""
    max_weight: float = 1.0
    """gidd-clipped: the largest weight of a position (w_max in GIDD's paper, loss.max_loss_weight in its code)."""
    options: Options = ()
    """Options of a plugin's head or loss, such as temperature=2."""
