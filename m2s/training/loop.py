"""The training loop: one for every head, process, loss and network, on one process or many.

    result = train(Config(...))      # or: m2s train digits

A run is a function of its configuration: stopped anywhere and started again, it ends with the same bits on a CPU.
"""

import contextlib
import importlib
import math
import signal
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from m2s.data import batch_indices
from m2s.data.source import ImageSource, Source, TextSource, open_source
from m2s.distributed import World
from m2s.errors import UserError
from m2s.io import write_json
from m2s.ops import probe_triton, use_backend, why_unavailable
from m2s.training.build import make_objects
from m2s.training.config import Config, RunConfig, resolve
from m2s.training.log import Log
from m2s.training.run_folder import RunFolder
from m2s.training.save import resume, save
from m2s.training.trainer import LocalBatch, Trainer, copy_to_host, learning_rate
from m2s.training.validate import validate


class Diverged(RuntimeError):
    """A loss or gradient was not finite. The state before that update is saved."""


@dataclass(frozen=True)
class Result:
    """Where a run ended: the step and the last validation. The network, with averaged weights, is in the folder. Of several
    processes, which all have the same result, one is the first."""

    step: int
    validation: dict[str, float]
    first: bool


def train(config: Config, source: Source | None = None) -> Result:
    """Train to the last step, going on from the newest state in `config.run.out`. `source` stands in for `config.data`."""
    given, config = config, resolve(config)
    check_log_packages(config.run)
    source = source or open_source(**vars(config.data))
    with World.start(config.run.device) as world:
        if world.first and given.network.kind != config.network.kind:
            size = config.network.size
            print(f"a U-Net sees what is to come: {config.method} is trained with a transformer (dit {size})", file=sys.stderr)
        warmup, steps = config.optimizer.warmup, config.run.steps
        if world.first and warmup >= steps > 1:
            print(
                f"the learning rate rises over {warmup} updates, and there are {steps}: it will not reach "
                f"{config.optimizer.lr:g}. A tenth of them would be --optimizer.warmup {max(1, steps // 10)}",
                file=sys.stderr,
            )
        return _train(config, source, world)  # a call of its own: what holds on to the connections is gone when it returns


LOGS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def check_log_packages(run: RunConfig) -> None:
    """What shall be told of the run besides log.jsonl is installed."""
    for option, module in LOGS.items():
        if getattr(run, option):
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise UserError(f"--{option} needs {option}: pip install {option} ({error})") from error


def _train(config: Config, source: Source, world: World) -> Result:
    calls = world.size * (config.run.micro_batch or 1)
    if config.run.batch % calls:
        raise UserError(f"batch is {config.run.batch}, but it must be a multiple of {calls}: processes times micro_batch")
    if config.run.kernels == "fused" and (why := why_unavailable(world.device)):
        raise UserError(f"kernels is fused, but {why}")
    with use_backend(config.run.kernels):
        probe_triton(world.device)
    model, head, description = make_objects(config, source)
    with contextlib.ExitStack() as stack:
        if world.first:
            stack.enter_context(RunFolder(config, source))
        stopper = stack.enter_context(Stopper())
        learner = Trainer(config, source, world, model, head, description)
        if world.first:
            print(opening(learner), file=sys.stderr, flush=True)
        resume(learner)
        log = None
        if world.first:
            run = config.run
            log = Log(run.out, learner.progress.step, run.steps, run.tensorboard, run.wandb)
            stack.callback(log.close)
        loop(learner, stopper, log)
    return Result(learner.progress.step, learner.validation, world.first)


def opening(learner: Trainer) -> str:
    """What is trained, on what, with what data and where, in one line."""
    config, source, world = learner.config, learner.source, learner.world
    parameters = sum(weight.numel() for weight in learner.model.parameters())  # whole ones, also where they are sharded
    device = f"{world.size} processes on {world.device.type}" if world.size > 1 else str(world.device)
    data = type(source).__name__
    if isinstance(source, TextSource) and config.data.folder:
        data = config.data.folder
    if isinstance(source, ImageSource):
        data = source.images.name
    return (
        f"{config.method}: {config.network.kind} {config.network.size} ({parameters:,} parameters), {device}, "
        f"{'bf16' if learner.bf16 else 'float32'}; {data} ({source.size:,} rows of {source.length:,}); "
        f"{config.run.steps:,} steps of {config.run.batch:,} into {config.run.out}"
    )


class Stopper:
    """Inside, the first SIGTERM or SIGINT asks for a stop after this step; a second one stops at once."""

    signal = 0

    def __enter__(self) -> "Stopper":
        self._before: dict[int, Any] = {}
        with contextlib.suppress(ValueError):  # not the main thread: signals go elsewhere
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class StepResult:
    """What came of an update: the loss in nats per site, whether a process was asked to stop, and the next one's share."""

    loss: float
    stop: bool
    following: LocalBatch | None


def training_step(learner: Trainer, share: LocalBatch, stopper: Stopper) -> StepResult:
    """One update of the weights, or none where loss or gradient is not finite.

    What does not depend on the loss is done while an accelerator is at work on the gradient. Where it can tell itself whether
    there is a step to make, it goes on with that while the host waits for the numbers, and finds the next update waiting.
    """
    run, world, progress = learner.config.run, learner.world, learner.progress
    losses, weights = learner.gradient(share)
    following = learner.share(progress.step + 1)
    asked = torch.full((1,), float(stopper.signal != 0), dtype=torch.float64, device=world.device)
    losses, asked = world.sum(torch.cat([losses, asked])).split([run.batch, 1])
    norm = learner.norm()
    numbers = torch.stack([losses.sum() / weights, norm.double(), asked[0], weights])
    read = copy_to_host(numbers)
    finish = learner.descend(norm, numbers[:2])
    loss, size, stop, total = read()
    if math.isfinite(loss) and math.isfinite(size):
        finish()
        progress.losses.append(loss)
        progress.norms.append(size)
    elif run.on_nan == "skip":
        progress.skipped += 1
    else:
        diverged(learner, losses, loss, size)
    progress.step += 1
    progress.tokens += round(total)
    return StepResult(loss, bool(stop), following)


def loop(learner: Trainer, stopper: Stopper, log: Log | None) -> None:
    run, progress = learner.config.run, learner.progress
    begin, tokens = time.monotonic(), progress.tokens
    share = learner.share(progress.step)
    while share is not None:
        made = training_step(learner, share, stopper)
        share = made.following
        seconds = time.monotonic() - begin
        rate = (progress.tokens - tokens) / seconds
        if log is not None:
            log.advance(made.loss, made.loss / math.log(2), rate)
        report(learner, log, seconds, rate)
        if made.stop or progress.step % run.save_every == 0 or progress.step == run.steps:
            if log is not None:
                log.sync()
            save(learner)
        if made.stop and progress.step < run.steps:
            if log is not None:
                log.say(f"stopped at step {progress.step}, which is saved: the same command goes on")
            sys.exit(128 + (stopper.signal or signal.SIGTERM))


def report(learner: Trainer, log: Log | None, seconds: float, rate: float) -> None:
    """The lines of the log that belong to this step, and the validation that belongs to it. Until the first of them people see
    what it would hold so far."""
    config, progress = learner.config, learner.progress
    run, step = config.run, progress.step
    closes = step % run.log_every == 0 or step == run.steps
    if log is not None and progress.losses and (closes or log.silent):
        loss, norm = (sum(values) / len(values) for values in (progress.losses, progress.norms))
        (log.record if closes else log.show)(
            step=step,
            loss=loss,
            bits=loss / math.log(2),
            grad_norm=norm,
            grad_norm_max=max(progress.norms),
            lr=learning_rate(config.optimizer, step - 1, run.steps),
            tokens=progress.tokens,
            skipped=progress.skipped,
            tokens_per_second=rate,
            seconds=seconds,
            **({"tau": learner.tau} if config.head.curriculum == "duo" else {}),
        )
    if closes:
        progress.losses.clear()
        progress.norms.clear()
    if step == run.steps or (run.validate_every and step % run.validate_every == 0):
        with learner.average.applied(), use_backend("reference" if run.kernels == "reference" else "auto"):
            learner.validation = validate(learner)
        if log is not None:
            log.record(step=step, **learner.validation, seconds=seconds)


def diverged(learner: Trainer, losses: Tensor, loss: float, norm: float) -> NoReturn:
    """Save the state before this update, write nan.json with the rows of the batch, and stop."""
    run, step = learner.config.run, learner.progress.step
    save(learner)
    indices = batch_indices(learner.source.size, run.batch, step, run.seed)
    bad = indices[~losses.cpu().isfinite()].tolist()
    path = run.out / "nan.json"
    if learner.world.first:
        write_json(path, {"step": step, "loss": str(loss), "grad_norm": str(norm), "bad": bad, "batch": indices.tolist()})
    shown = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
    raise Diverged(
        f"at step {step} the loss is {loss:g} and the gradient's norm {norm:g}; rows of the data whose loss is not finite: "
        f"{shown or 'none'} (the whole batch is in {path}). The state before it is saved. Lower optimizer.lr, or give --on-nan "
        "skip to leave such updates out"
    )
