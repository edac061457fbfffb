"""What a run leaves on the disk: the state to go on from, and the averaged weights as a checkpoint that m2s.load reads."""

import sys
from dataclasses import asdict

import torch
from torch import Tensor

from m2s import hub
from m2s.model import build
from m2s.train import state
from m2s.train.parallel import reshard, shard_like, whole
from m2s.train.update import Learner


def save(learner: Learner) -> None:
    """The state, and then the checkpoint; by the first process, with every process's shards."""
    run, progress = learner.config.run, learner.progress
    reshard(learner.model)
    tensors: dict[str, Tensor] = {}
    for name, weight in learner.model.named_parameters():
        mine = {"model": weight, "ema": learner.average.values[name]}
        mine |= {f"optimizer.{key}": value for key, value in learner.optimizer.state[weight].items()}
        for prefix, value in mine.items():
            gathered = whole(value)  # every process takes part, the first one keeps it
            if learner.world.first:
                tensors[f"{prefix}/{name}"] = gathered
    if learner.world.first:
        info = {**asdict(progress), "validation": learner.validation}
        state.write(run.out / "state", progress.step, tensors, info, run.keep)
        publish(learner, tensors)
    learner.world.wait()


def publish(learner: Learner, tensors: dict[str, Tensor]) -> None:
    """config.json and model.safetensors of the run's folder."""
    with torch.random.fork_rng(devices=[]):
        model = build(learner.description)
    model.load_state_dict({name.removeprefix("ema/"): value for name, value in tensors.items() if name.startswith("ema/")})
    extra = {"step": learner.progress.step, "method": learner.config.method, **learner.validation}
    source = learner.source
    hub.save(learner.config.run.out, model, learner.head, source.description, source.tokenizer, extra)


def resume(learner: Learner) -> None:
    """Take up the newest whole state, if there is one."""
    run, world = learner.config.run, learner.world
    folder = run.out / "state"
    found = state.newest(folder, lambda text: print(text, file=sys.stderr)) if world.first else None
    step = world.agree(found.step if found is not None else -1)
    if step < 0:
        return
    found = state.read(folder, step)
    tensors = found.tensors()
    with torch.no_grad():
        for name, weight in learner.model.named_parameters():
            weight.copy_(shard_like(tensors[f"model/{name}"], weight))
            learner.average.values[name].copy_(shard_like(tensors[f"ema/{name}"], weight))
            for key in (key for key in tensors if key.startswith("optimizer.") and key.endswith(f"/{name}")):
                value = tensors[key]
                moment = value.ndim > 0  # the count of steps is a number
                placed = shard_like(value, weight) if moment else value.to(world.device)
                learner.optimizer.state[weight][key.removeprefix("optimizer.").removesuffix(f"/{name}")] = placed
    for name in asdict(learner.progress):
        setattr(learner.progress, name, found.info[name])
    learner.validation = found.info["validation"]
    if world.first:
        print(f"going on from step {step} of {run.steps} in {run.out}", file=sys.stderr)
        if step == run.steps:  # it may have been stopped between the two
            publish(learner, tensors)
