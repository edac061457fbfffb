"""From names to objects: the process, the head, the loss and the network that a configuration describes."""

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from m2s import hub
from m2s.data.source import Source
from m2s.errors import UserError, suggest
from m2s.heads import FactorizedRate, Head, LogScore, NextToken, Ordinal, Posterior, Shifted
from m2s.losses import (
    any_order,
    chain,
    chain_kl,
    ct_elbo,
    d3pm,
    duo,
    gidd,
    gidd_clipped,
    masked_cross_entropy,
    next_token_nll,
    path_kl,
    score_entropy,
    udlm,
    zero_integral,
)
from m2s.losses.objective import Loss
from m2s.models import DiTConfig, UNetConfig, build, describe, dit, unet
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
from m2s.process.chain import cosine_betas, even_betas, linear_betas
from m2s.process.schedule import Rescaled
from m2s.rng import derived_seed
from m2s.training.config import Config, HeadConfig, NetworkConfig, ProcessConfig, rename

LOSSES: dict[str, Loss] = {
    "score-entropy": score_entropy,
    "masked": masked_cross_entropy,
    "any-order": any_order,
    "gidd": gidd,
    "gidd-clipped": gidd_clipped,
    "udlm": udlm,
    "path-kl": path_kl,
    "chain": chain,
    "d3pm": d3pm,
    "ct-elbo": ct_elbo,
    "likelihood": next_token_nll,
}
CHAIN_LOSSES = ("chain", "d3pm")  # all there are for a finite chain
LEVELS = 512  # the most that are tabulated
# what stands in for a loss that is no bound, or holds the reconstruction too, when the bound is wanted
BOUNDS = {
    "any-order": masked_cross_entropy,
    "gidd-clipped": score_entropy,
    "chain": chain_kl,
    "d3pm": chain_kl,
    "likelihood": zero_integral,
}
CHAINS = {  # D3PM's, by the names of their processes
    "chain-uniform": (Chain.uniform, cosine_betas),
    "chain-absorbing": (Chain.absorbing, even_betas),
    "chain-gaussian": (Chain.gaussian, linear_betas),
}


def make_schedule(config: ProcessConfig) -> Schedule:
    schedules = {
        "linear": lambda: Linear(),
        "exponential": lambda: Exponential(config.horizon),
        "log-linear": lambda: LogLinear(config.eps),
        "geometric": lambda: Geometric(config.sigma_min, config.sigma_max),
        "geometric-rate": lambda: GeometricRate(config.sigma_max, config.base),
        "cosine": lambda: Cosine(),
    }
    schedule = schedules[config.schedule]()
    return schedule if config.rescale is None else Rescaled(schedule, config.rescale)


def make_process(config: ProcessConfig, vocab: int) -> Process:
    if config.kind == "hybrid":
        if config.p_uniform == 1:
            raise ValueError("p_uniform is 1, but then no token outlasts t = 0: give --process.kind uniform in its place")
        return Hybrid(vocab, config.p_uniform)
    if config.kind in CHAINS:
        make, betas = CHAINS[config.kind]
        return make(vocab, betas(config.chain_steps))
    if config.kind == "gaussian":
        return make_gaussian(config, vocab)
    if config.kind == "none":
        return Shifted(vocab)
    return {"uniform": Uniform, "absorbing": Absorbing}[config.kind](vocab, make_schedule(config))


def make_gaussian(config: ProcessConfig, vocab: int) -> RateMatrix:
    """The Gaussian rate of Campbell et al., divided by its spectral gap: e^{-sigma} is what is left of the memory that fades
    last, whatever the number of levels."""
    if vocab > LEVELS:
        raise ValueError(f"gaussian tabulates rates between at most {LEVELS} levels, but the data has {vocab} tokens")
    jump = 6 * vocab / 256 if config.jump_width is None else config.jump_width
    stationary = 2.0 * vocab if config.stationary_width is None else config.stationary_width
    process = RateMatrix.gaussian(vocab, make_schedule(config), jump, stationary)
    rates = process.generator
    symmetric = torch.sqrt(rates * rates.T).copysign(rates)  # of the same eigenvalues, for the chain is reversible
    gap = -torch.linalg.eigvalsh(symmetric)[-2]
    return RateMatrix(rates / gap, process.schedule)


def make_head(config: HeadConfig, process: Process) -> Head:
    assert config.scale != "auto" and config.offset != "auto"
    if config.offset != "none" and config.kind not in ("posterior", "ordinal"):
        raise ValueError(f"head.offset is {config.offset}, which is for a posterior, not {config.kind}: leave it out")
    if config.kind == "log-score":
        return LogScore(process, config.scale)
    if config.scale != "none":
        raise ValueError(f"head.scale is {config.scale}, which is for head.kind log-score, not {config.kind}: leave it out")
    if config.kind in ("posterior", "ordinal"):
        return {"posterior": Posterior, "ordinal": Ordinal}[config.kind](process, config.offset)
    return {"factorized-rate": FactorizedRate, "next-token": NextToken}[config.kind](process)


def make_loss(config: HeadConfig) -> Loss:
    """The training loss that `config` names, with its options bound."""
    if config.loss == "gidd-clipped":
        return functools.partial(gidd_clipped, max_weight=config.max_weight)
    return LOSSES[config.loss]


def describe_network(config: NetworkConfig, process: Process, source: Source) -> dict[str, Any]:
    """The network as `m2s.models.build` reads it: its size, and what was changed of it."""
    sizes: dict[str, Any] = {"dit": dit.SIZES, "unet": unet.SIZES}[config.kind]
    if config.size not in sizes:
        raise UserError(f"network.size is {config.size!r}, of kind {config.kind}: {suggest(config.size, sizes)}")
    if isinstance(process, Shifted) and config.time == "yes":
        raise UserError("network.time is yes, but where nothing is corrupted there is no time: leave it out")
    if config.labels and source.classes is None:
        raise UserError("network.labels is set, but the data has no labels")
    common = {"width": config.width, "dropout": config.dropout}
    own: dict[str, dict[str, Any]] = {
        "dit": {
            "depth": config.depth,
            "heads": config.heads,
            "label_after_silu": config.label_after_silu or None,
            "norm_bias": config.norm_bias or None,
        },
        "unet": {
            "layers": config.layers,
            "multipliers": config.multipliers or None,
            "groups": config.groups,
            "sinusoids": None if config.sinusoids == NetworkConfig().sinusoids else config.sinusoids,
        },
    }
    other = {"dit": "unet", "unet": "dit"}[config.kind]
    strange = [name for name, value in own[other].items() if value is not None]
    sigma = _clock(config, process)
    if sigma and config.kind != "dit":
        raise UserError(f"network.{next(iter(sigma))} is for network.kind dit, not {config.kind}: leave it out")
    if strange:
        raise UserError(f"network.{strange[0]} is an option of a {other}, but network.kind is {config.kind}")
    options = {name: value for name, value in {**common, **own[config.kind]}.items() if value is not None} | sigma
    options |= {"time": config.time != "no", "label_dropout": config.label_dropout}
    options["classes"] = source.classes if config.labels else None
    if config.kind == "unet" and source.shape is None:
        raise UserError("network.kind is unet, which is for images, but the data is text: use dit")
    description: DiTConfig | UNetConfig
    try:
        if config.kind == "dit":
            options["causal"] = isinstance(process, Shifted)
            description = DiTConfig.preset(config.size, process.states, length=source.length, **options)
        else:
            assert source.shape is not None
            fixed = {"mask": process.mask is not None, "input": config.input}
            description = UNetConfig.preset(config.size, process.states, source.shape, **fixed, **options)
    except (ValueError, TypeError) as error:
        raise UserError(f"network: {error}") from error
    return {"kind": config.kind, **vars(description)}


def _clock(config: NetworkConfig, process: Process) -> dict[str, Any]:
    """The schedule that a DiT reads its time from, where that is asked for."""
    if config.clock != "sigma":
        return {}
    schedule = getattr(process, "schedule", None)
    if schedule is None:
        raise UserError(f"network.clock is sigma, but {process} has no schedule: give --network.clock time")
    return {"clock": schedule}


def inherit(config: NetworkConfig, head: Head, given: hub.Checkpoint) -> NetworkConfig:
    """What is "auto" of a network's clock, as it is in the checkpoint that the run starts from.

    The clock is the noise, not the schedule: under another schedule the same sigma stands for the same noise.
    """
    before = given.head
    if isinstance(head, LogScore) and isinstance(before, LogScore) and head.scale != before.scale:
        raise UserError(
            f"head.scale is {head.scale}, but the scores of the checkpoint to start from have {before.scale}: "
            f"give --head.scale {before.scale}"
        )
    network = given.model.config
    if config.kind != "dit" or config.time == "no" or not isinstance(network, DiTConfig):
        return config
    if config.clock == "auto" and network.clock is not None:
        config = dataclasses.replace(config, clock="sigma")
    return config


def make_objects(config: Config, source: Source) -> tuple[nn.Module, Head, dict[str, Any]]:
    """The network with its first weights, the head, and the network's description."""
    part = "process"
    try:
        process = make_process(config.process, source.vocab)
        part = "head"
        head = make_head(config.head, process)
    except (ValueError, TypeError) as error:
        raise UserError(f"{part}: {_both(error)}") from error
    _try_loss(config.head.loss, head)
    given = None if config.run.init is None else _open(config.run.init)
    network = config.network if given is None else inherit(config.network, head, given)
    description = describe_network(network, head.process, source)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(config.run.seed, "weights"))
        model = build(description)
    if config.head.curriculum == "duo":
        try:
            duo.check_duo(model, head)
        except TypeError as error:
            raise UserError(f"head.curriculum is duo: {_both(error)}") from error
    if given is not None:
        _put(model, description, given, str(config.run.init))
    return model, head, description


def _try_loss(name: str, head: Head) -> None:
    """Whether there is such a loss, and it is for this head."""
    if name not in LOSSES:
        raise UserError(f"head.loss is {name!r}: {suggest(name, LOSSES)}")
    token = torch.zeros(1, 1, dtype=torch.long)
    try:
        LOSSES[name](head, torch.zeros(1, 1, head.process.states), token, token, torch.tensor([0.5]))
    except (TypeError, ValueError) as error:
        if isinstance(head.process, Chain) and name not in CHAIN_LOSSES:
            also = "" if head.has_posterior else ", with --head.kind posterior"
            raise UserError(
                f"head.loss is {name}, but a finite chain has no rates, and so losses of its own (m2s.losses.d3pm): give "
                f"--head.loss {' or '.join(CHAIN_LOSSES)}{also}"
            ) from error
        raise UserError(f"head.loss is {name}: {_both(error)}") from error


def _both(error: Exception) -> str:
    """What the library says, and for each of its classes the option that chooses it."""
    return rename(str(error), lambda name, option: f"{name} ({option})")


def load_weights(model: nn.Module, description: dict[str, Any], path: str) -> None:
    """The weights of a checkpoint, ours or SEDD's, into `model`: a score's network and a posterior's have the same tensors."""
    _put(model, description, _open(path), path)


def _open(path: str) -> hub.Checkpoint:
    try:
        return hub.load(path)
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        raise UserError(f"--init {path}: {error}") from error


def _put(model: nn.Module, description: dict[str, Any], given: hub.Checkpoint, path: str) -> None:
    before = describe(given.model)
    if before["states"] != description["states"]:
        raise UserError(
            f"--init {path} is for {before['states']} states, but data and process here have {description['states']}: "
            "the vocabulary and the mask must be the same"
        )
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in given.model.state_dict().items()}
    wrong = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    if wrong:
        raise UserError(
            f"--init {path} holds another network: {wrong[0]} is {found.get(wrong[0], 'missing')} there and "
            f"{expected.get(wrong[0], 'missing')} here ({len(wrong)} tensors differ); give the same network options"
        )
    for name in ("heads", "causal", "label_after_silu", "groups", "sinusoids"):  # which no tensor shows
        if before.get(name) != description.get(name):
            raise UserError(
                f"--init {path} holds another network: {name} is {before.get(name)} there and {description.get(name)} here; "
                "give the same network options"
            )
    model.load_state_dict(given.model.state_dict())
