"""The training loop: one for every head, process, loss and network, on one process or many.

    result = train(Config(...))      # or: m2s train digits

A run is a function of its configuration. If it is interrupted and resumed, it ends with the same bits on a CPU.
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
from m2s.data.source import ImageSource, Source, TextSource
from m2s.distributed import World
from m2s.errors import UserError, counted, print_escaped
from m2s.io import write_json
from m2s.ops import probe_triton, use_backend, why_unavailable
from m2s.training.build import make_objects, open_data
from m2s.training.config import Config, RunConfig, resolve
from m2s.training.log import Log
from m2s.training.memory_check import check_memory, describe_estimate
from m2s.training.run_folder import RunFolder
from m2s.training.save import resume, save
from m2s.training.step_time import Pace
from m2s.training.trainer import LocalBatch, Trainer, copy_to_host, learning_rate
from m2s.training.validate import validate

LOG_PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


class Diverged(RuntimeError):
    """A loss or gradient was not finite. The state before that step is saved.

    Attributes:
        kept: The part of the message that says what the folder of the run holds.
    """

    kept = ""


@dataclass(frozen=True)
class Result:
    """The end of a run. The network, with averaged weights, is in the run's folder.

    Args:
        step: The last step.
        validation: The last validation.
        first: Whether this is the first of several processes, which all have the same result.
    """

    step: int
    validation: dict[str, float]
    first: bool


def train(config: Config, source: Source | None = None, quiet: bool = False, temporary: bool = False) -> Result:
    """Train to the last step. A run whose folder exists is resumed from its newest state.

    Args:
        config: The configuration.
        source: The data; None: the data of the configuration.
        quiet: Print nothing while the run goes as planned. The files are the same.
        temporary: The caller removes the folder of the run, so that a run that is stopped cannot be resumed.

    Returns:
        The last step and the last validation.

    Raises:
        UserError: The configuration or the data is invalid, or the memory is too small. Nothing has been written then.
        Diverged: A loss or gradient was not finite.
        SystemExit: A signal stopped the run, after its state was saved.
    """
    given, config = config, resolve(config)
    run = config.run
    check_log_packages(run)
    source = source or open_data(config.data)
    with World.start(run.device) as world, contextlib.ExitStack() as stack:
        _check_world(config, world)
        # Weights and dropout are seeded through torch's default generators: the caller's state returns at the end.
        stack.enter_context(torch.random.fork_rng([world.device] if world.device.type == "cuda" else []))
        estimate = check_memory(config, source, world)
        objects = make_objects(config, source)
        if world.first:
            stack.enter_context(RunFolder(config, source))
            if not quiet:
                _print_notes(given, config)
        stopper = stack.enter_context(Stopper())
        trainer = stack.enter_context(Trainer(config, source, world, *objects))
        if world.first and not quiet:
            print_escaped(start_message(trainer, temporary), file=sys.stderr)
            print_escaped(describe_estimate(estimate, config, world.device), file=sys.stderr)
        resume(trainer, quiet)
        log = None
        if world.first:
            log = Log(run.out, trainer.progress.step, run.steps, run.tensorboard, run.wandb, quiet)
            stack.callback(log.close)
        timer, pace = RunTimer(trainer), Pace(world.device)
        batch = trainer.local_batch(trainer.progress.step)
        while batch is not None:
            world.reach(f"step {trainer.progress.step}")
            begin = time.monotonic()
            losses, weights = trainer.gradient(batch)
            done = finish_step(trainer, losses, weights, stopper)
            batch = done.next_batch
            text = pace.add(time.monotonic() - begin, run.steps - trainer.progress.step)
            if log is not None and text is not None and not quiet:
                log.say(text)
            log_and_validate(trainer, log, done.loss, *timer.read())
            save_and_stop(trainer, log, done.stop, stopper, temporary)
        result = Result(trainer.progress.step, trainer.validation, world.first)
        # A wrapped network holds connections, which are closed at the end of `world`: nothing may refer to it then.
        stack.close()
        del objects, trainer, timer
    return result


def check_log_packages(run: RunConfig) -> None:
    """Check that the packages of --tensorboard and --wandb are installed, where they are asked for.

    Args:
        run: The run.

    Raises:
        UserError: A package is missing.
    """
    for option, module in LOG_PACKAGES.items():
        if getattr(run, option):
            try:
                importlib.import_module(module)
            except ImportError as error:
                reason = f"the package is missing ({error})"
                raise UserError(option=option, value=True, reason=reason, hint=f"pip install {option}") from error


def _check_world(config: Config, world: World) -> None:
    """Check that the batch can be split over the processes and that the kernels can be used."""
    calls = world.size * (config.run.micro_batch or 1)
    if config.run.batch % calls:
        expected = f"a multiple of {calls}, the number of processes times micro_batch"
        raise UserError(option="batch", value=config.run.batch, expected=expected)
    if config.run.kernels == "fused" and (why := why_unavailable(world.device)):
        raise UserError(option="kernels", value="fused", reason=why)
    with use_backend(config.run.kernels):
        probe_triton(world.device)


def _print_notes(given: Config, config: Config) -> None:
    """Print what a user may not expect: another network than was given, a warmup longer than the run."""
    if given.network.kind != config.network.kind:
        size = config.network.size
        print(f"a U-Net reads later positions: {config.method} is trained with a transformer (dit {size})", file=sys.stderr)
    warmup, steps = config.optimizer.warmup, config.run.steps
    if warmup >= steps > 1:
        print(
            f"warmup ({warmup} steps) is as long as the run ({steps} steps) or longer: the learning rate never reaches "
            f"{config.optimizer.lr:g}. Try --optimizer.warmup {max(1, steps // 10)}",
            file=sys.stderr,
        )


def start_message(trainer: Trainer, temporary: bool = False) -> str:
    """Return the first lines of a run: method, network, device, data and folder.

    Args:
        trainer: The trainer.
        temporary: The folder of the run is removed, and not named.

    Returns:
        One line, and another one where fused kernels are active but the loss has no fused form.
    """
    config, source, world = trainer.config, trainer.source, trainer.world
    parameters = sum(weight.numel() for weight in trainer.model.parameters())  # of full tensors, also where they are sharded
    device = f"{world.size} processes on {world.device.type}" if world.size > 1 else str(world.device)
    data = type(source).__name__
    if isinstance(source, TextSource) and config.data.folder:
        data = config.data.folder
    if isinstance(source, ImageSource):
        data = source.images.name
    text = (
        f"{config.method}: {config.network.kind} {config.network.size} ({parameters:,} parameters), {device}, "
        f"{'bf16' if trainer.bf16 else 'float32'}; {data} ({source.size:,} examples of {source.length:,}); "
        f"{counted(config.run.steps, 'step')} of {config.run.batch:,}{'' if temporary else f' into {config.run.out}'}"
    )
    if trainer.unfused_loss:
        text += (
            f"\nthe loss {config.head.loss} has no fused form for {type(trainer.head).__name__}: the last layer and the "
            "loss run unfused, and all logits are in memory"
        )
    return text


class Stopper:
    """A context in which the first SIGTERM or SIGINT asks for a stop after the current step. A second one stops at once."""

    signal = 0
    """The number of the signal that came; 0: none."""

    def __enter__(self) -> "Stopper":
        self._previous_handlers: dict[int, Any] = {}
        with contextlib.suppress(ValueError):  # only the main thread can handle signals
            self._previous_handlers = {
                number: signal.signal(number, self._request_stop) for number in (signal.SIGTERM, signal.SIGINT)
            }
        return self

    def _request_stop(self, number: int, _: FrameType | None) -> None:
        """Remember the signal and restore the handlers, so that a second signal stops at once."""
        self.signal = number
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)


class RunTimer:
    """Seconds and tokens per second since the start or the resumption of a run.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.progress = trainer.progress
        self.begin, self.tokens = time.monotonic(), trainer.progress.tokens

    def read(self) -> tuple[float, float]:
        """Return the seconds and the tokens per second."""
        seconds = time.monotonic() - self.begin
        return seconds, (self.progress.tokens - self.tokens) / seconds


@dataclass(frozen=True)
class StepResult:
    """The result of a training step.

    Args:
        loss: The loss in nats per position.
        stop: Whether some process was asked to stop.
        next_batch: The batch of the next step; None after the last.
    """

    loss: float
    stop: bool
    next_batch: LocalBatch | None


def finish_step(trainer: Trainer, losses: Tensor, weights: Tensor, stopper: Stopper) -> StepResult:
    """Update the weights, or not where the loss or the gradient is not finite.

    Work that does not depend on the loss is done while the device computes the gradient. The device decides whether to update
    the weights. So it does not wait for the host, which reads the numbers meanwhile.

    Args:
        trainer: The trainer, with the gradient of this step.
        losses: This process's losses, [batch].
        weights: The weight of all positions.
        stopper: Whether a signal asked for a stop.

    Returns:
        The loss and the next batch.

    Raises:
        Diverged: The loss or the gradient is not finite, and --on-nan is stop.
    """
    run, world, progress = trainer.config.run, trainer.world, trainer.progress
    next_batch = trainer.local_batch(progress.step + 1)
    asked = torch.full((1,), float(stopper.signal != 0), dtype=torch.float64, device=world.device)
    losses, asked = world.sum(torch.cat([losses, asked])).split([run.batch, 1])
    norm = trainer.gradient_norm()
    numbers = torch.stack([losses.sum() / weights, norm.double(), asked[0], weights])
    read = copy_to_host(numbers)
    finish = trainer.update_weights(norm, numbers[:2])
    loss, size, stop, total = read()
    if math.isfinite(loss) and math.isfinite(size):
        finish()
        progress.losses.append(loss)
        progress.norms.append(size)
    elif run.on_nan == "skip":
        progress.skipped += 1
    else:
        raise_diverged(trainer, losses, loss, size)
    progress.step += 1
    progress.tokens += round(total)
    return StepResult(loss, bool(stop), next_batch)


def save_and_stop(trainer: Trainer, log: Log | None, stop: bool, stopper: Stopper, temporary: bool = False) -> None:
    """Save the state where it is due, and exit where a stop was asked for.

    Args:
        trainer: The trainer.
        log: The log; None in all processes but the first.
        stop: Whether some process was asked to stop.
        stopper: The signal, which becomes the exit code.
        temporary: The folder of the run is removed: a stop saves nothing.

    Raises:
        SystemExit: A stop was asked for before the last step.
    """
    run, progress = trainer.config.run, trainer.progress
    if (stop and not temporary) or progress.step % run.save_every == 0 or progress.step == run.steps:
        if log is not None:
            log.sync()
        save(trainer)
    if stop and progress.step < run.steps:
        if log is not None and not temporary:
            log.say(f"stopped at step {progress.step}, which is saved: the same command resumes the run")
        sys.exit(128 + (stopper.signal or signal.SIGTERM))


def log_and_validate(trainer: Trainer, log: Log | None, loss: float, seconds: float, rate: float) -> None:
    """Log a step and validate, where these are due. Until the first record the terminal shows its values so far.

    Args:
        trainer: The trainer.
        log: The log; None in all processes but the first.
        loss: The loss of the step, nats per position.
        seconds: Seconds since the start.
        rate: Tokens per second.
    """
    config, progress = trainer.config, trainer.progress
    run, step = config.run, progress.step
    if log is not None:
        log.advance(loss, loss / math.log(2), rate)
    closes = step % run.log_every == 0 or step == run.steps
    if log is not None and progress.losses and (closes or log.silent):
        mean_loss, norm = (sum(values) / len(values) for values in (progress.losses, progress.norms))
        (log.record if closes else log.show)(
            step=step,
            loss=mean_loss,
            bits=mean_loss / math.log(2),
            grad_norm=norm,
            grad_norm_max=max(progress.norms),
            lr=learning_rate(config.optimizer, step - 1, run.steps),
            tokens=progress.tokens,
            skipped=progress.skipped,
            tokens_per_second=rate,
            seconds=seconds,
            **trainer.curriculum.log_values(step),
        )
    if closes:
        progress.losses.clear()
        progress.norms.clear()
    if step == run.steps or (run.validate_every and step % run.validate_every == 0):
        with trainer.average.applied(), use_backend("reference" if run.kernels == "reference" else "auto"):
            trainer.validation = validate(trainer)
        if log is not None:
            log.record(step=step, **trainer.validation, seconds=seconds)


def raise_diverged(trainer: Trainer, losses: Tensor, loss: float, norm: float) -> NoReturn:
    """Save the state before this step, write nan.json with the examples of the batch, and stop.

    Args:
        trainer: The trainer.
        losses: The losses of all examples of the batch, [batch].
        loss: The loss of the batch.
        norm: The norm of the gradient.

    Raises:
        Diverged: Always.
    """
    run, step = trainer.config.run, trainer.progress.step
    save(trainer)
    indices = batch_indices(trainer.source.size, run.batch, step, run.seed)
    bad = indices[~losses.cpu().isfinite()].tolist()
    path = run.out / "nan.json"
    if trainer.world.first:
        write_json(path, {"step": step, "loss": str(loss), "grad_norm": str(norm), "bad": bad, "batch": indices.tolist()})
    shown = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
    kept = f" (the full batch is in {path}). The state before it is saved"
    error = Diverged(
        f"at step {step} the loss is {loss:g} and the gradient's norm {norm:g}; examples whose loss is not finite: "
        f"{shown or 'none'}{kept}. Lower --optimizer.lr, or give --on-nan skip to skip such steps"
    )
    error.kept = kept
    raise error
