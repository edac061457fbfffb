"""The configuration of a training run: dataclasses that a command line and a JSON file can both hold.

A method (m2s, sedd, md4, ...) names a process, a head and a loss together. A value "auto" is the method's, or depends on the
machine; a value that is given wins over the method's. `resolve` fills in the method's values. Only its result is trained and
saved.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from m2s import validation
from m2s.data import DATASETS
from m2s.errors import UserError
from m2s.losses.registry import LOSSES
from m2s.methods import METHODS
from m2s.methods.build import check_unread
from m2s.methods.config import AUTO, AutoFloat, AutoInt, HeadConfig, Options, ProcessConfig, registered
from m2s.models import NETWORKS
from m2s.ops.backend import DEFAULT_BACKEND, Backend
from m2s.registry import option_types

Count = Annotated[int | None, tyro.conf.arg(metavar="INT")]
Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
RECORD = "train.json"  # the file of a run's folder that holds its configuration

__all__ = [
    "RECORD",
    "Config",
    "Count",
    "DataConfig",
    "HeadConfig",
    "NetworkConfig",
    "Number",
    "OptimizerConfig",
    "ProcessConfig",
    "RunConfig",
    "plain",
    "replace",
    "resolve",
]


@dataclass(frozen=True)
class NetworkConfig:
    """The network."""

    kind: Annotated[str, registered(NETWORKS)] = "dit"
    """dit: a transformer, for text. unet: a U-Net, for images. Autoregressive models (ar) always use a transformer, of about
    the size of the given U-Net."""
    size: str = "tiny"
    """dit: tiny, small, medium; unet: tiny, mnist, md4. The options below change single numbers of it."""
    width: AutoInt = None
    """Features of a position."""
    depth: AutoInt = None
    """dit: the number of blocks."""
    heads: AutoInt = None
    """dit: the number of attention heads."""
    layers: AutoInt = None
    """unet: residual blocks at each resolution."""
    multipliers: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT ...")] = ()
    """unet: channels at each resolution, as multiples of width."""
    input: Literal["embedding", "level"] = "embedding"
    """unet: the input of a position is an embedding of its token, or its gray level."""
    groups: AutoInt = None
    """unet: groups of channels in every norm, a divisor of width (MD4: 32). By default groups of 4 channels, at most 32:
    MD4's number from width 128 on."""
    sinusoids: Literal["cos-first", "sin-first"] = "cos-first"
    """unet: features of the time. cos-first: of frequencies 10000^(-i/half), as in the transformer. sin-first, MD4's: of
    frequencies 10000^(-i/(half-1))."""
    dropout: AutoFloat = None
    """Dropout in the residual branches."""
    time: Literal["auto", "yes", "no"] = "auto"
    """Whether the network sees the time. auto: yes, except for methods that leave it out (RADD)."""
    clock: Literal["auto", "time", "sigma"] = "auto"
    """dit: the input of the time features: t itself, or the total noise sigma(t) of the run's schedule (SEDD). auto: as in the
    checkpoint of --init; without one, time."""
    labels: bool = False
    """Condition the network on the labels of the data, where there are any. Its samples can then be guided."""
    label_dropout: float = 0.1
    """The probability with which a label is dropped in training."""
    label_after_silu: bool = False
    """dit with labels: condition on silu(time) + silu(label), as UDLM does, in place of silu(time + label)."""
    norm_bias: bool = False
    """dit: every LayerNorm has a bias, which is initialized to one (RADD's network)."""
    qk_norm: bool = False
    """dit: divide queries and keys by their root mean square over a head."""
    gates: Literal["zero", "one"] = "zero"
    """dit: initial gates of the residual branches. zero: adaLN-zero. one: the last projection of a branch starts at zero."""
    embedding_std: float = 0.02
    """dit: standard deviation of the initial token embeddings."""
    options: Options = ()
    """Options of a plugin's network, such as layers=3."""


@dataclass(frozen=True)
class DataConfig:
    """The data."""

    name: Annotated[str, registered(DATASETS)] = "digits"
    """A data set, or text: a folder that `m2s data prepare` made."""
    folder: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """The folder of the data. By default it is in $M2S_DATA (~/.cache/m2s)."""
    length: int = 512
    """text: the number of tokens of an example."""
    hub: bool = False
    """Images: read them from the Hugging Face hub."""
    options: Options = ()
    """Options of a plugin's data set, such as size=100."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and the moving average of the weights."""

    kind: Literal["adamw", "muon"] = "adamw"
    """adamw: AdamW for all parameters. muon: Muon for the matrices of a transformer's blocks, and AdamW for all others. The
    updates of both have the same scale, so that one learning rate serves both."""
    lr: float = 1e-3
    """The largest learning rate."""
    warmup: int = 100
    """Steps over which the learning rate rises from zero."""
    decay: Literal["cosine", "constant"] = "cosine"
    """The learning rate after that: a cosine down to zero at the last step, or constant."""
    weight_decay: float = 0.0
    """Weight decay, on every parameter."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.999
    """AdamW: decay of the second moment."""
    clip: float = 1.0
    """The largest norm of the gradient; 0: no clipping."""
    ema: float = 0.9999
    """Decay of the averaged weights (EMA), which are validated and saved as the checkpoint. After n steps it is
    min(ema, (1 + n)/(10 + n))."""


@dataclass(frozen=True)
class RunConfig:
    """The run: its length, its random numbers, its devices and its files."""

    out: Path = Path("runs/run")
    """The folder of the run. The same command, given again, resumes the run."""
    steps: int = 1000
    """The number of training steps."""
    batch: int = 128
    """Examples of a training step, over all processes."""
    micro_batch: AutoInt = None
    """Examples of one call of the network; gradients are accumulated over the calls. By default all examples of a process."""
    seed: int = 0
    """The seed of all random numbers: weights, data order, times, noise, dropout."""
    t_min: float = 1e-3
    """Times are drawn from [t_min, 1 - t_min]."""
    importance: Number = None
    """Draw t with density proportional to 1/(t + this) and correct the weight. None: t is uniform."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """The precision of the network's body. auto: bf16 on a GPU and float32 elsewhere. Logits and loss are always float32.
    float32 also keeps a GPU from rounding the operands of products (to bf16, or to TF32 in convolutions)."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """Compile blocks and loss (torch.compile), which takes half a minute at the start. auto: on a GPU, where it works."""
    kernels: Backend = DEFAULT_BACKEND
    """Fused (Triton) kernels or the reference: for AdamW and random numbers, and in a transformer for the last layer with the
    loss (never all logits at once), norms and rotary positions. auto: fused on a GPU where triton is installed."""
    recompute: bool = False
    """Activation checkpointing: less memory, about a third more work."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: a copy of the weights on each process (DDP), or shards of them (FSDP2)."""
    init: Annotated[str | None, tyro.conf.arg(metavar="CHECKPOINT")] = None
    """Start from the weights of this checkpoint, whatever its head."""
    log_every: int = 50
    """Steps between lines of log.jsonl."""
    validate_every: int = 1000
    """Steps between evaluations of the NELBO on held-out data; 0: only at the end."""
    validation_samples: int = 256
    """Held-out examples of each evaluation."""
    validation_passes: int = 1
    """Times drawn for each of these examples."""
    save_every: int = 1000
    """Steps between states from which the run can resume."""
    keep: int = 2
    """The number of these states that are kept; older ones are deleted."""
    on_nan: Literal["stop", "skip"] = "stop"
    """When a loss or gradient is not finite: stop with a saved state, or skip that step."""
    on_low_memory: Literal["stop", "warn"] = "stop"
    """Where the estimated memory of a step exceeds the available memory: stop before the first step, or start anyway."""
    device: str = AUTO
    """cpu or cuda. auto: cuda where there is a GPU."""
    other_data: bool = False
    """Resume a run on other data than it was trained on so far. Length and vocabulary must be the same."""
    tensorboard: bool = False
    """Also write the log for TensorBoard (pip install tensorboard)."""
    wandb: bool = False
    """Also send the log to Weights & Biases (pip install wandb)."""


@dataclass(frozen=True)
class Config:
    """All of a run. `method` chooses the process, the head and the loss that are not given."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    """The run."""
    method: str = "m2s-offset"
    """m2s-offset, m2s (the paper's head), sedd, md4, gidd, ...: see `m2s cite`, and docs/methods.md for what each computes."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The network."""
    process: ProcessConfig = field(default_factory=ProcessConfig)
    """The process."""
    head: HeadConfig = field(default_factory=HeadConfig)
    """The head and the loss."""
    data: DataConfig = field(default_factory=DataConfig)
    """The data."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""


def replace(config: Config, key: str, value: Any) -> Config:
    """Return a configuration with one value changed.

    Args:
        config: The configuration.
        key: The name of the value, such as "head.offset", or "steps" for a value of `run`.
        value: The new value.

    Returns:
        The new configuration.
    """
    section, _, name = key.rpartition(".")
    if not section and name not in {f.name for f in dataclasses.fields(Config)}:
        section = "run"
    if not section:
        return dataclasses.replace(config, **{name: value})
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{name: value})})


# The transformer that an autoregressive model uses in place of each U-Net, which would see later positions.
TRANSFORMERS = {"mnist": "tiny", "md4": "small"}


def resolve(config: Config) -> Config:
    """Fill in the method's values and check every value.

    Args:
        config: The configuration.

    Returns:
        A configuration whose process, head and network have no "auto" that belongs to the method.

    Raises:
        UserError: A name is unknown, a value is out of range, or an option has no effect on the chosen parts.
    """
    method = METHODS.find(config.method, "method")
    process, head = method.resolve(config.process, config.head)
    network = config.network
    if network.time == AUTO:
        network = dataclasses.replace(network, time="yes" if method.network_time else "no")
    if process.kind == "none" and network.kind == "unet":
        network = dataclasses.replace(network, kind="dit", size=TRANSFORMERS.get(network.size, network.size))
    config = dataclasses.replace(config, process=process, head=head, network=network)
    _check_run(config.run)
    if not (config.run.out / RECORD).exists():  # a run that was started with an unread option can be resumed with it
        _check_unread_process(config)
    _check_loss_options(config)
    _check_optimizer(config.optimizer)
    return config


def _check_run(run: RunConfig) -> None:
    """Check the range of every value."""
    lowest = {"steps": 1, "batch": 1, "log_every": 1, "validate_every": 0, "validation_samples": 1, "validation_passes": 1}
    lowest |= {"save_every": 1, "keep": 1, "seed": 0}
    for name, low in lowest.items():
        validation.positive_int(name, getattr(run, name), low)
    if run.micro_batch is not None and (run.micro_batch < 1 or run.batch % run.micro_batch):
        raise UserError(option="micro_batch", value=run.micro_batch, expected=f"a divisor of batch = {run.batch}")
    validation.in_interval("t_min", run.t_min, "(0, 0.5)")
    if run.importance is not None and not (math.isfinite(run.importance) and run.importance >= 0):
        raise UserError(option="importance", value=run.importance, expected="a number >= 0, such as 0.1")


def _check_unread_process(config: Config) -> None:
    """Raise an error for an option of the process that nothing would read; the method's schedule does not count as given."""
    check_unread(config.process, dataclasses.replace(ProcessConfig(), schedule=METHODS[config.method].process.schedule))


def _check_loss_options(config: Config) -> None:
    """Check the loss with its options."""
    name, largest = config.head.loss, config.head.max_weight
    loss = LOSSES.find(name, "head.loss")
    if loss.without_time and config.network.time != "no":
        raise UserError(
            option="head.loss",
            value=name,
            reason="it averages over times, so that the network must not see them",
            hint="give --network.time no",
        )
    if "max_weight" in option_types(loss.function):
        validation.positive_number("head.max_weight", largest)


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    """Check the range of every value."""
    validation.positive_number("optimizer.lr", optimizer.lr)
    for name in ("ema", "beta1", "beta2"):
        validation.in_interval(f"optimizer.{name}", getattr(optimizer, name), "[0, 1)")
    for name in ("warmup", "clip", "weight_decay"):
        if not getattr(optimizer, name) >= 0:
            raise UserError(option=f"optimizer.{name}", value=getattr(optimizer, name), expected="at least 0")


def plain(config: Config) -> dict[str, Any]:
    """Return the configuration as JSON holds it.

    Args:
        config: The configuration.

    Returns:
        A dictionary of sections. It has no tuples and no paths, and no KEY=VALUE options where none are given.
    """
    value = dataclasses.asdict(config)
    value["run"]["out"] = str(config.run.out)
    value["network"]["multipliers"] = list(config.network.multipliers)
    for section in ("network", "process", "head", "data"):
        if options := value[section].pop("options"):
            value[section]["options"] = list(options)
    return value
