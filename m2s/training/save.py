"""What a run leaves on the disk: the state to go on from, and the averaged weights as a checkpoint that m2s.load reads."""

import sys
from dataclasses import asdict

import torch
from torch import Tensor

from m2s import hub
from m2s.models import build
from m2s.training import state
from m2s.training.parallel import gather_full, reshard
from m2s.training.trainer import Trainer


def save(learner: Trainer) -> None:
    """The state, of which every process writes its part, and then the checkpoint."""
    run, progress = learner.config.run, learner.progress
    folder, step = run.out / "state", progress.step
    if not learner.world.once(lambda: state.place(folder, step).exists()):  # else it went on from there and made no update
        info = {**asdict(progress), "validation": learner.validation}
        state.write(folder, step, tensors(learner), info, run.keep)
    publish(learner)


def tensors(learner: Trainer) -> dict[str, Tensor]:
    """All tensors of a state, sharing memory with the learner's: this process's shards, or all of it."""
    reshard(learner.model)
    found: dict[str, Tensor] = {}
    for name, weight in learner.model.named_parameters():
        found[f"model/{name}"] = weight.detach()
        found[f"ema/{name}"] = learner.average.values[name]
        found |= {f"optimizer.{key}/{name}": value for key, value in learner.optimizer.state[weight].items()}
    return found


def publish(learner: Trainer) -> None:
    """config.json and model.safetensors of the run's folder, by the first process; the tensors are gathered one by one."""
    averaged: dict[str, Tensor] = {}
    for name, value in learner.average.values.items():
        gathered = gather_full(value)  # every process takes part, the first one keeps it
        if learner.world.first:
            averaged[name] = gathered

    def write() -> None:
        with torch.random.fork_rng(devices=[]):
            model = build(learner.description)
        model.load_state_dict(averaged)
        extra = {"step": learner.progress.step, "method": learner.config.method, **learner.validation}
        source = learner.source
        hub.save(learner.config.run.out, model, learner.head, source.description, source.tokenizer, extra)

    learner.world.once(write)


def resume(learner: Trainer) -> None:
    """Take up the newest whole state, if there is one."""
    run, world = learner.config.run, learner.world
    found = world.once(lambda: state.newest(run.out / "state", lambda text: print(text, file=sys.stderr)))
    if found is None:
        return
    weights = dict(learner.model.named_parameters())
    for key, (size, dtype) in found.describe().items():
        kind, _, name = key.partition("/")
        if kind.startswith("optimizer."):  # a new optimizer has no moments yet
            moment = size == weights[name].shape  # the count of steps is a number
            empty = (
                torch.zeros_like(weights[name], dtype=dtype) if moment else torch.zeros(size, dtype=dtype, device=world.device)
            )
            learner.optimizer.state[weights[name]][kind.removeprefix("optimizer.")] = empty
    found.load(tensors(learner))
    for name in asdict(learner.progress):
        setattr(learner.progress, name, found.info[name])
    learner.validation = found.info["validation"]
    if world.first:
        print(f"going on from step {found.step} of {run.steps} in {run.out}", file=sys.stderr)
    if found.step == run.steps:  # it may have been stopped between the two
        publish(learner)
