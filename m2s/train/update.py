"""One update of the weights: the batch, its gradient, the optimizer's step."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from m2s.belief import Head
from m2s.data import batch_indices
from m2s.train.build import LOSSES
from m2s.train.config import Config, OptimizerConfig
from m2s.train.ema import Average
from m2s.train.noise import corrupt, derived_seed, times
from m2s.train.parallel import World, recompute
from m2s.train.scored import Scored
from m2s.train.source import Batch, Source


@dataclass(frozen=True)
class Share:
    """One process's rows of a global batch: their places in it, the data, the times and the weights of the times."""

    rows: Tensor
    batch: Batch
    t: Tensor
    weight: Tensor


@dataclass
class Progress:
    """What a state keeps besides tensors: the updates made, and what the next line of the log averages."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def learning_rate(optimizer: OptimizerConfig, step: int, steps: int) -> float:
    """That of update `step`, counted from 0."""
    if step < optimizer.warmup:
        return optimizer.lr * (step + 1) / optimizer.warmup
    if optimizer.decay == "constant":
        return optimizer.lr
    return optimizer.lr * 0.5 * (1 + math.cos(math.pi * (step - optimizer.warmup) / max(1, steps - optimizer.warmup)))


class Learner:
    """The network, its average, its optimizer, and how far they have come."""

    def __init__(
        self, config: Config, source: Source, world: World, model: nn.Module, head: Head, description: dict[str, Any]
    ) -> None:
        self.config, self.source, self.world, self.head, self.description = config, source, world, head, description
        run, optimizer, kind = config.run, config.optimizer, world.device.type
        self.loss = LOSSES[config.head.loss]
        self.model = model.to(world.device).train()
        if run.recompute:
            recompute(self.model)
        self.wrapped = world.wrap(Scored(self.model, head, self.loss, run.t_min), run.parallel)
        if run.compile:
            self.wrapped.compile(dynamic=False)
        self.average = Average(self.model, optimizer.ema)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
            fused=kind in ("cpu", "cuda"),
        )
        self.bf16 = run.precision == "bf16" or (run.precision == "auto" and kind == "cuda")
        self.end = head.process.last_time(run.t_min)
        self.progress = Progress()
        self.validation: dict[str, float] = {}

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bf16)

    def share(self, step: int) -> Share | None:
        """What this process does of update `step`; None after the last."""
        run, world = self.config.run, self.world
        if step >= run.steps:
            return None
        indices = batch_indices(self.source.size, run.batch, step, run.seed, world.rank, world.size)
        rows = torch.arange(run.batch // world.size) + world.rank * (run.batch // world.size)
        t, weight = times(rows, run.batch, run.seed, step, run.t_min, self.end, run.importance)
        batch = self.source.train(indices).to(world.device)
        return Share(rows.to(world.device), batch, t.to(world.device), weight.to(world.device))

    def gradient(self, share: Share) -> tuple[Tensor, Tensor]:
        """Put the gradient of the loss (nats; sum over sites, mean over rows) into the parameters.

        Returns this process's part of the losses [batch] of the global batch's rows, and the weight of all its sites.
        """
        run, world, length, rows = self.config.run, self.world, self.source.length, share.rows
        if share.batch.weight is None:
            weights = torch.tensor(float(run.batch * length), dtype=torch.float64, device=world.device)
        else:
            weights = world.sum(share.batch.weight.double().sum())
        losses = torch.zeros(run.batch, dtype=torch.float64, device=world.device)
        size = run.micro_batch or len(rows)
        self.optimizer.zero_grad()
        for start in range(0, len(rows), size):
            at = slice(start, start + size)
            part, x_0 = share.batch.part(at), share.batch.x_0[at].long()
            label = part.label if self.config.network.labels else None
            x_t = corrupt(self.head.process, x_0, share.t[at], rows[at], run.seed, self.progress.step)
            # dropout is a function of the step and of the first row of the call
            torch.manual_seed(derived_seed(run.seed, self.progress.step, "network", world.rank * len(rows) + start))
            with world.accumulating(self.wrapped, last=start + size == len(rows)):
                with self.autocast():
                    site = self.wrapped(x_0, x_t, share.t[at], label)
                site = site * share.weight[at].to(site.dtype).unsqueeze(-1)
                if part.weight is not None:
                    site = torch.where(part.weight == 0, 0, part.weight * site)
                row = site.sum(-1)
                (row.sum() * (length * world.size / weights).to(row.dtype)).backward()
            losses[rows[at]] = row.detach().double()
        return losses, weights

    def norm(self) -> Tensor:
        """The 2-norm of the gradient over all parameters and all shards."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def apply(self, norm: Tensor) -> None:
        """One step of the optimizer, with the gradient clipped, and of the average."""
        config, step = self.config.optimizer, self.progress.step
        if config.clip:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), config.clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step, self.config.run.steps)
        self.optimizer.step()
        self.average.update(step)
