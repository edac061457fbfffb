"""The files of a run: the state from which it resumes, and the averaged weights as a checkpoint that m2s.load reads."""

import sys
from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from m2s import hub
from m2s.errors import UserError, print_escaped
from m2s.models import build
from m2s.training import state
from m2s.training.parallel import gather_full, reshard
from m2s.training.trainer import Trainer

FIELDS: dict[str, type] = {"tokens": int, "skipped": int, "losses": list, "norms": list, "validation": dict}
"""What state.json has besides the step: the fields of `Progress`, and the last validation."""


def save(trainer: Trainer) -> None:
    """Write the state, of which every process writes its part, and then the checkpoint.

    Args:
        trainer: The trainer. Every process must call this.

    Raises:
        OSError: A file cannot be written. Older states are intact.
    """
    run, progress = trainer.config.run, trainer.progress
    folder, step = run.out / "state", progress.step
    if not trainer.world.once(lambda: state.place(folder, step).exists()):  # the run was resumed from it, and made no step
        info = {**asdict(progress), "validation": trainer.validation}
        state.write(folder, step, tensors(trainer), info, run.keep)
    publish(trainer)


def tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return the tensors of a state, which share memory with the trainer's.

    Args:
        trainer: The trainer.

    Returns:
        Weights, averages and optimizer moments by name: this process's shards, or all of unsharded tensors.
    """
    reshard(trainer.model)
    found: dict[str, Tensor] = {}
    for name, weight in trainer.model.named_parameters():
        found[f"model/{name}"] = weight.detach()
        found[f"ema/{name}"] = trainer.average.values[name]
        found |= {f"optimizer.{key}/{name}": value for key, value in trainer.optimizer.state(name).items()}
    # A resumed optimizer has its moments in another order. Sorted, the files of a state do not depend on that.
    return dict(sorted(found.items()))


def publish(trainer: Trainer) -> None:
    """Write config.json and model.safetensors to the run's folder, in the first process.

    Args:
        trainer: The trainer. Every process must call this: the tensors are gathered one by one.
    """
    averaged: dict[str, Tensor] = {}
    for name, value in trainer.average.values.items():
        gathered = gather_full(value)  # every process takes part; only the first one stores it
        if trainer.world.first:
            averaged[name] = gathered

    def write() -> None:
        with torch.random.fork_rng(devices=[]):
            model = build(trainer.description)
        model.load_state_dict(averaged)
        extra = {
            "step": trainer.progress.step,
            "method": trainer.config.method,
            "seed": trainer.config.run.seed,
            **trainer.validation,
        }
        source = trainer.source
        hub.save(trainer.config.run.out, model, trainer.head, source.description, source.tokenizer, extra)

    trainer.world.once(write)


def resume(trainer: Trainer, quiet: bool = False) -> None:
    """Load the newest intact state of the run's folder, if there is one.

    Args:
        trainer: The trainer. Every process must call this.
        quiet: Do not print the step from which the run resumes.

    Raises:
        UserError: There are states, but all are damaged.
    """
    run, world = trainer.config.run, trainer.world
    found = world.once(lambda: state.newest(run.out / "state", lambda text: print_escaped(text, file=sys.stderr), FIELDS))
    if found is None:
        return
    # The process that wrote the newest state may have ended before it had removed the older ones.
    world.once(lambda: state.remove_old(run.out / "state", run.keep))
    weights = dict(trainer.model.named_parameters())
    described = found.describe()
    _check_tensors(found, trainer, {key: size for key, (size, _) in described.items()})
    for key, (size, dtype) in described.items():
        kind, _, name = key.partition("/")
        if kind.startswith("optimizer."):  # a new optimizer has no moments: make tensors to load into
            moment = size == weights[name].shape  # the count of steps is a number
            empty = (
                torch.zeros_like(weights[name], dtype=dtype) if moment else torch.zeros(size, dtype=dtype, device=world.device)
            )
            trainer.optimizer.state(name)[kind.removeprefix("optimizer.")] = empty
    found.load(tensors(trainer))
    for name in asdict(trainer.progress):
        setattr(trainer.progress, name, found.info[name])
    trainer.validation = found.info["validation"]
    if found.step == run.steps and not trainer.validation.keys() >= {"validation_bits", "validation_error"}:
        raise UserError(
            f"{found.path} is the last state of the run but has no validation: remove it to make the last steps again"
        )
    if world.first and not quiet:
        print_escaped(f"resuming from step {found.step} of {run.steps} in {run.out}", file=sys.stderr)
    if found.step == run.steps:  # the process may have ended after the state and before the checkpoint
        publish(trainer)


def _check_tensors(found: state.State, trainer: Trainer, sizes: Mapping[str, torch.Size]) -> None:
    """Raise an error where the tensors of a state are not those of the network and its optimizer."""
    has_moments = any(key.startswith("optimizer.") for key in sizes)  # not before the first step
    expected: dict[str, torch.Size] = {}
    for name, weight in trainer.model.named_parameters():
        moments = trainer.optimizer.state_names(name) if has_moments else ()
        expected |= {f"{kind}/{name}": weight.shape for kind in ("model", "ema", *(f"optimizer.{key}" for key in moments))}
    faults = [f"{key} is missing" for key in expected if key not in sizes]
    faults += [f"{key} is unexpected" for key in sizes if key not in expected]
    faults += [
        f"{key} has shape {list(size)}, expected {list(expected[key])}"
        for key, size in sizes.items()
        if key in expected and size != expected[key] and not (key.startswith("optimizer.") and not size)
    ]
    if faults:
        more = f"; and {len(faults) - 4} more" if len(faults) > 4 else ""
        raise UserError(f"{found.path} does not fit the network of this run: {'; '.join(faults[:4])}{more}")
