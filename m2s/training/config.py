"""What a training run is: plain dataclasses that a command line and a JSON file can both hold.

A method (m2s, sedd, md4, ...) names a head, a process and a loss together. What is "auto" is as the method says; anything
given outright wins over it. `resolve` fills the gaps, and only what it returns is trained and saved.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from m2s.errors import UserError, suggest
from m2s.methods import METHODS
from m2s.ops.backend import DEFAULT_BACKEND, Backend

Count = Annotated[int | None, tyro.conf.arg(metavar="INT")]
Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]


@dataclass(frozen=True)
class NetworkConfig:
    kind: Literal["dit", "unet"] = "dit"
    """A transformer (text) or a U-Net (images). Where the network may not see what is to come (ar), it is a transformer, of
    about the size that was given of a U-Net."""
    size: str = "tiny"
    """dit: tiny, small, medium; unet: tiny, mnist, md4. What follows changes single numbers of it."""
    width: Count = None
    """Features of a site."""
    depth: Count = None
    """dit: blocks."""
    heads: Count = None
    """dit: attention heads."""
    layers: Count = None
    """unet: residual blocks at each resolution."""
    multipliers: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT ...")] = ()
    """unet: features of each resolution in units of width."""
    input: Literal["embedding", "level"] = "embedding"
    """unet: a site comes in as an embedding of its token, or as its grey level."""
    groups: Count = None
    """unet: groups of channels in every norm, a divisor of width (MD4: 32). By default groups of 4 channels, at most 32:
    MD4's number from width 128 on."""
    sinusoids: Literal["cos-first", "sin-first"] = "cos-first"
    """unet: features of the time. cos-first: of frequencies 10000^(-i/half), as in the transformer; sin-first, MD4's: of
    10000^(-i/(half-1))."""
    dropout: Number = None
    """In the residual branches."""
    time: Literal["auto", "yes", "no"] = "auto"
    """The network sees the time; auto is yes, but for methods that leave it out (RADD)."""
    clock: Literal["auto", "time", "sigma"] = "auto"
    """dit: what it reads the time from: t itself, or the total noise sigma(t) of the run's schedule (SEDD). auto is as in the
    checkpoint of --init, so that its features keep their meaning, and time without one."""
    labels: bool = False
    """The network sees the labels of the data, where it has them, and can then be guided."""
    label_dropout: float = 0.1
    """How often a label is hidden."""
    label_after_silu: bool = False
    """dit with labels: condition on silu(time) + silu(label), as UDLM does, in place of silu(time + label)."""
    norm_bias: bool = False
    """dit: every LayerNorm has a bias, which starts at one (RADD's network)."""


@dataclass(frozen=True)
class ProcessConfig:
    kind: Literal[
        "auto", "uniform", "absorbing", "hybrid", "gaussian", "chain-uniform", "chain-absorbing", "chain-gaussian", "none"
    ] = "auto"
    """How clean tokens are corrupted; gaussian is for levels that have an order, such as grey ones; chain-...: in a finite
    number of steps (D3PM); none: not at all, and the network sees the tokens before each."""
    schedule: Literal["auto", "linear", "exponential", "log-linear", "geometric", "geometric-rate", "cosine"] = "auto"
    """How fast (hybrid and chains have their own)."""
    horizon: float = 5.0
    """exponential: alpha = exp(-horizon t)."""
    eps: float = 1e-3
    """log-linear: alpha at t = 1."""
    rescale: Number = None
    """linear, cosine: eps of alpha = eps + (1 - 2 eps) alpha~, which falls from 1 - eps to eps in place of from 1 to 0 (MD4's
    released code: 1e-4)."""
    sigma_min: float = 1e-3
    """geometric: total noise at t = 0."""
    sigma_max: float = 7.0
    """geometric, geometric-rate: total noise at t = 1."""
    base: float = 100.0
    """geometric-rate: how many times larger the rate is at t = 1 than at t = 0."""
    p_uniform: float = 0.1
    """hybrid: the uniform mass at t = 1/2, less than 1; where there shall be no mask, the kind is uniform."""
    chain_steps: int = 100
    """chain-...: how many steps it has (D3PM: 1000)."""
    jump_width: Number = None
    """gaussian: how far a level jumps, in levels; by default 6 of 256 (Campbell et al.), and in proportion of others."""
    stationary_width: Number = None
    """gaussian: the width of the law in which all ends, in levels; by default 512 of 256, and in proportion of others."""


@dataclass(frozen=True)
class HeadConfig:
    kind: Literal["auto", "posterior", "ordinal", "log-score", "factorized-rate", "next-token"] = "auto"
    """What the network's output means. ordinal: a posterior over ordered levels, from a mean and a scale."""
    offset: Literal["auto", "none", "exact"] = "auto"
    """posterior: none, the output is the posterior's logits (the paper); exact, those of the law that has not seen the site.
    ordinal: its law is the one or the other."""
    scale: Literal["auto", "none", "sigma"] = "auto"
    """log-score over an absorbing mask: sigma takes log(expm1 sigma) + log K from the output, as SEDD's release does."""
    curriculum: Literal["auto", "none", "duo"] = "auto"
    """duo, for a posterior over uniform noise: in the first half of the run the network sees softened tokens, ever less so, and
    the loss that is printed is no bound (validation is)."""
    loss: str = "auto"
    """score-entropy, for every head; masked, MD4's and MDLM's cross entropy, for a posterior over an absorbing mask; any-order,
    RADD's, the same weighed by the number of masks, where the network is not told the time; gidd-clipped, GIDD's for
    training; chain, the bound of a finite chain; d3pm, that and a cross entropy, for training. As their authors write them,
    equal to score-entropy: gidd, udlm, path-kl, ct-elbo. likelihood, exactly, for next-token."""
    max_weight: float = 1.0
    """gidd-clipped: the largest weight of a site (w_max in GIDD's paper, loss.max_loss_weight in its code)."""


@dataclass(frozen=True)
class DataConfig:
    name: str = "digits"
    """digits, mnist, cifar10, or text: a folder that `m2s data prepare` made."""
    folder: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where it lies; by default in $M2S_DATA (~/.cache/m2s)."""
    length: int = 512
    """text: tokens of a sample."""
    hub: bool = False
    """Images: take them from the Hugging Face hub."""


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 1e-3
    """Of AdamW, at its highest."""
    warmup: int = 100
    """Steps over which it rises from zero."""
    decay: Literal["cosine", "constant"] = "cosine"
    """What it does after that: fall to zero at the last step along a cosine, or stay."""
    weight_decay: float = 0.0
    """Of AdamW, on every parameter."""
    beta1: float = 0.9
    """Of AdamW."""
    beta2: float = 0.999
    """Of AdamW."""
    clip: float = 1.0
    """Greatest norm of the gradient; 0: no limit."""
    ema: float = 0.9999
    """Decay of the averaged weights, which are what is validated and published; min(ema, (1 + n)/(10 + n)) after n steps."""


@dataclass(frozen=True)
class RunConfig:
    out: Path = Path("runs/run")
    """The folder of the run. Given again, the same command goes on from there."""
    steps: int = 1000
    """Updates of the weights."""
    batch: int = 128
    """Samples of an update, over all processes."""
    micro_batch: Count = None
    """Samples of one call of the network; the gradient is accumulated over the calls. By default a process's whole share."""
    seed: int = 0
    """Of all randomness: weights, data order, times, noise, dropout."""
    t_min: float = 1e-3
    """The ends of time that are cut off."""
    importance: Number = None
    """Draw t with density proportional to 1/(t + this) and correct the weight; None: t is uniform."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Of the network's body: auto is bf16 on a GPU and float32 elsewhere. Logits and loss are float32 in any case; float32
    also keeps a GPU from rounding the operands of products (to bf16, to TF32 in convolutions)."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """Compile blocks and loss (torch.compile), half a minute at the start; auto does so on a GPU, where it works."""
    kernels: Backend = DEFAULT_BACKEND
    """Fused (Triton) or the references: of AdamW and random numbers, and in a transformer of last layer and loss (never all
    logits at once), norms, gelu, rotary positions and embedding. auto is fused on a GPU where triton is installed."""
    recompute: bool = False
    """Keep no activations inside blocks: less memory, about a third more work."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: whole copies of the weights (DDP), or shards of them (FSDP2)."""
    init: Annotated[str | None, tyro.conf.arg(metavar="CHECKPOINT")] = None
    """Start from the weights of this checkpoint, whatever its head."""
    log_every: int = 50
    """Steps to each line of log.jsonl."""
    validate_every: int = 1000
    """Steps to each evaluation of the bound on held-out data; 0: only at the end."""
    validation_samples: int = 256
    """Held-out samples of each evaluation."""
    validation_passes: int = 1
    """Times drawn for each of them."""
    save_every: int = 1000
    """Steps to each state that the run can go on from."""
    keep: int = 2
    """How many of these stay on the disk."""
    on_nan: Literal["stop", "skip"] = "stop"
    """When a loss or gradient is not finite: stop with a saved state, or leave that update out."""
    device: str = ""
    """cpu, cuda; by default the best there is."""
    tensorboard: bool = False
    """Also write what TensorBoard reads (pip install tensorboard)."""
    wandb: bool = False
    """Also send the log to Weights & Biases (pip install wandb)."""


@dataclass(frozen=True)
class Config:
    """All of a run. `preset` and `method` are names; the rest is as they say unless given."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    method: str = "m2s"
    """m2s, m2s-offset, sedd, md4, gidd, ...: see `m2s cite`, and docs/methods.md for what each computes."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


def get(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def replace(config: Config, key: str, value: Any) -> Config:
    """`config` with one dotted key changed; a key without a dot may belong to `run`."""
    section, _, name = key.rpartition(".")
    if not section and name not in {f.name for f in dataclasses.fields(Config)}:
        section = "run"
    if not section:
        return dataclasses.replace(config, **{name: value})
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{name: value})})


# what Python calls them, and the options that choose them
CLASSES = {
    "Uniform": "process.kind uniform",
    "Absorbing": "process.kind absorbing",
    "Hybrid": "process.kind hybrid",
    "RateMatrix": "process.kind gaussian",
    "Chain": "process.kind chain-uniform, chain-absorbing or chain-gaussian",
    "Posterior": "head.kind posterior",
    "Ordinal": "head.kind ordinal",
    "LogScore": "head.kind log-score",
    "FactorizedRate": "head.kind factorized-rate",
    "belief.NextToken": "head.kind next-token",
    "belief.Shifted": "process.kind none",
}


def rename(said: str, word: Callable[[str, str], str]) -> str:
    """What the library says, with `word` of its name and its option in the place of every class of the library."""
    return re.sub(rf"\bm2s\.({'|'.join(CLASSES)})\b(?![(.])", lambda found: word(found[0], f"--{CLASSES[found[1]]}"), said)


TRANSFORMERS = {"mnist": "tiny", "md4": "small"}  # in place of U-Nets, which see what is to come
# what few methods care to say
DEFAULTS = {"head.offset": "none", "head.scale": "none", "head.curriculum": "none", "network.time": "yes"}
SCHEDULED = ("uniform", "absorbing", "gaussian")  # processes that have a schedule, and not their own
# what not every process reads: by which option it is chosen who does, and who does
READERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "schedule": ("kind", SCHEDULED),
    "horizon": ("schedule", ("exponential",)),
    "eps": ("schedule", ("log-linear",)),
    "rescale": ("schedule", ("linear", "cosine")),
    "sigma_min": ("schedule", ("geometric",)),
    "sigma_max": ("schedule", ("geometric", "geometric-rate")),
    "base": ("schedule", ("geometric-rate",)),
    "p_uniform": ("kind", ("hybrid",)),
    "chain_steps": ("kind", ("chain-uniform", "chain-absorbing", "chain-gaussian")),
    "jump_width": ("kind", ("gaussian",)),
    "stationary_width": ("kind", ("gaussian",)),
}


def resolve(config: Config) -> Config:
    """Every "auto" of the head and the process filled in from the method, and every value checked."""
    if config.method not in METHODS:
        raise UserError(f"there is no method {config.method!r}: {suggest(config.method, METHODS)}")
    given = config
    for key, value in (DEFAULTS | dict(METHODS[config.method].settings)).items():
        if get(config, key) == "auto":
            config = replace(config, key, value)
    if given.head.offset == "auto" and config.head.kind not in ("posterior", "ordinal"):  # the method's was for its own head
        config = replace(config, "head.offset", "none")
    if config.process.kind in SCHEDULED and config.process.schedule == "auto":  # the method's process has none
        config = replace(config, "process.schedule", "linear")
    if config.process.kind == "none" and config.network.kind == "unet":
        size = TRANSFORMERS.get(config.network.size, config.network.size)
        config = replace(replace(config, "network.kind", "dit"), "network.size", size)
    _check(config)
    return config


def _check(config: Config) -> None:
    run, optimizer = config.run, config.optimizer
    least = {"steps": 1, "batch": 1, "log_every": 1, "validate_every": 0, "validation_samples": 1, "validation_passes": 1}
    least |= {"save_every": 1, "keep": 1, "seed": 0}
    for name, low in least.items():
        if getattr(run, name) < low:
            raise UserError(f"{name} is {getattr(run, name)}, but it must be at least {low}")
    if run.micro_batch is not None and (run.micro_batch < 1 or run.batch % run.micro_batch):
        raise UserError(f"micro_batch is {run.micro_batch}, but it must divide batch = {run.batch}")
    if not 0 < run.t_min < 0.5:
        raise UserError(f"t_min is {run.t_min}, but it must lie in (0, 0.5)")
    _refuse_unread(config)
    count, few = config.process.chain_steps, 20 if config.process.kind == "chain-gaussian" else 1
    if config.process.kind.startswith("chain-") and count < few:
        raise UserError(f"process.chain_steps is {count}, but for process.kind {config.process.kind} it must be at least {few}")
    if config.process.kind.startswith("chain-") and count * run.t_min > 1 + 1e-6:
        raise UserError(
            f"t_min is {run.t_min}, but the first of {count} steps ends at {1 / count:g}: give a --t-min of at most that, or a "
            "smaller --process.chain-steps"
        )
    if config.head.loss == "any-order" and config.network.time != "no":
        raise UserError("head.loss any-order averages over times, so that the network may not see them: give --network.time no")
    largest, loss = config.head.max_weight, config.head.loss
    if loss != "gidd-clipped" and largest != HeadConfig().max_weight:
        raise UserError(f"head.max_weight is {largest}, which is for head.loss gidd-clipped, not {loss}: leave it out")
    if not (math.isfinite(largest) and largest > 0):
        raise UserError(f"head.max_weight is {largest}, but it must be a positive number")
    if run.importance is not None and not (math.isfinite(run.importance) and run.importance >= 0):
        raise UserError(f"importance is {run.importance}, but it must be a number >= 0, such as 0.1")
    if not (math.isfinite(optimizer.lr) and optimizer.lr > 0):
        raise UserError(f"optimizer.lr is {optimizer.lr}, but it must be a positive number")
    for name in ("ema", "beta1", "beta2"):
        if not 0 <= getattr(optimizer, name) < 1:
            raise UserError(f"optimizer.{name} is {getattr(optimizer, name)}, but it must lie in [0, 1)")
    for name in ("warmup", "clip", "weight_decay"):
        if not getattr(optimizer, name) >= 0:
            raise UserError(f"optimizer.{name} is {getattr(optimizer, name)}, but it must not be negative")


def _refuse_unread(config: Config) -> None:
    """Options of the process that are neither as they come nor as the method has them, and that nothing would read."""
    from m2s.training.run_folder import RECORD

    if (config.run.out / RECORD).exists():  # begun with the same options, or refused as another run
        return
    process = config.process
    usual = {**vars(ProcessConfig()), "schedule": METHODS[config.method].settings.get("process.schedule", "auto")}
    for name, (by, readers) in READERS.items():
        value = getattr(process, name)
        chosen = getattr(process, by) if by == "kind" or process.kind in SCHEDULED else f"that of {process.kind}"
        if chosen not in readers and value != usual[name]:
            some = " or ".join(filter(None, [", ".join(readers[:-1]), readers[-1]]))
            raise UserError(f"process.{name} is {value}, which is for process.{by} {some}, not {chosen}: leave it out")


def plain(config: Config) -> dict[str, Any]:
    """The configuration as JSON holds it."""
    value = dataclasses.asdict(config)
    value["run"]["out"] = str(config.run.out)
    value["network"]["multipliers"] = list(config.network.multipliers)
    return value
