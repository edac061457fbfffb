"""One update of the weights: the batch, its gradient, the optimizer's step."""

import functools
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from m2s.data import batch_indices
from m2s.data.source import Batch, Source
from m2s.distributed import World
from m2s.heads import Head
from m2s.losses.duo import latent, soft_embedding, temperature
from m2s.losses.noise import corrupt_by_counter, normals_by_counter, sample_times
from m2s.losses.weighted_sum import skips_unmasked
from m2s.ops import use_backend, uses_triton
from m2s.ops.adamw import OptimizerStep
from m2s.process import Process, RateMatrix, Uniform
from m2s.process.chain import snap_times, time_interval
from m2s.rng import derived_seed
from m2s.training.bf16_weights import BF16Weights
from m2s.training.build import BOUNDS, make_loss
from m2s.training.config import Config, OptimizerConfig
from m2s.training.cuda_graph import CUDAGraphRunner, masked_capacity
from m2s.training.ema import EMA
from m2s.training.parallel import accumulating, compile_parts, recompute, wrap
from m2s.training.training_loss import TrainingLoss

COMPILED = ("cuda",)  # where "auto" compiles


@dataclass(frozen=True)
class LocalBatch:
    """One process's rows of a global batch: their places in it, the data, the times and the weights of the times; and how many
    sites of each call will be masked, where that is to be known beforehand."""

    rows: Tensor
    batch: Batch
    t: Tensor
    weight: Tensor
    masked: Callable[[], list[float]] | None = None


@dataclass
class Progress:
    """What a state keeps besides tensors: the updates made, and what the next line of the log averages."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """`value` on the device, where work goes on meanwhile: a copy to a GPU from memory that is not pinned would wait for it."""
    if device.type != "cuda" or value.is_cuda:
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)


def copy_to_host(numbers: Tensor) -> Callable[[], list[float]]:
    """The numbers on the host, to which they are on their way: the call waits for them, and for nothing started since."""
    if not numbers.is_cuda:
        return numbers.tolist
    here = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(numbers.device))

    def read() -> list[float]:
        arrived.synchronize()
        return here.tolist()

    return read


def balance_micro_batches(t: Tensor, calls: int) -> Tensor:
    """The rows in an order in which every call gets early and late times alike: so its masks are about as many as another's."""
    order = t.argsort().unflatten(0, (-1, calls))
    order[1::2] = order[1::2].flip(1)
    return order.t().flatten()


def learning_rate(optimizer: OptimizerConfig, step: int, steps: int) -> float:
    """That of update `step`, counted from 0."""
    if step < optimizer.warmup:
        return optimizer.lr * (step + 1) / optimizer.warmup
    if optimizer.decay == "constant":
        return optimizer.lr
    return optimizer.lr * 0.5 * (1 + math.cos(math.pi * (step - optimizer.warmup) / max(1, steps - optimizer.warmup)))


def is_graph_safe(process: Process, device: torch.device) -> bool:
    """Whether its kernels are found without a look at the times, so that a graph can hold it: those of a tabulated process by
    tables, which are made here, and where there are none by doubling, some times more often than others."""
    return not isinstance(process, RateMatrix) or process.prepare(device)


class Trainer:
    """The network, its average, its optimizer, and how far they have come."""

    def __init__(
        self, config: Config, source: Source, world: World, model: nn.Module, head: Head, description: dict[str, Any]
    ) -> None:
        self.config, self.source, self.world, self.head, self.description = config, source, world, head, description
        run, optimizer, kind = config.run, config.optimizer, world.device.type
        self.loss = make_loss(config.head)
        self.bound = BOUNDS.get(config.head.loss, self.loss)
        self.model = model.to(world.device).train()
        traced = is_graph_safe(head.process, world.device)
        if run.recompute:
            recompute(self.model)
        scored = TrainingLoss(self.model, head, self.loss, run.t_min)
        with use_backend(run.kernels):
            fuses = hasattr(self.model, "unprojected") and uses_triton(next(self.model.parameters()))
        if fuses:
            self.model.unprojected = True  # type: ignore[assignment]
        self.undo_compile: Callable[[], None] | None = None  # until the first gradient is found, where compiling may fail
        if run.compile == "yes" or (run.compile == "auto" and kind in COMPILED):
            undo = compile_parts(scored, traced)
            self.undo_compile = undo if run.compile == "auto" and world.size == 1 else None
        self.wrapped = wrap(scored, world, run.parallel)
        replays = kind == "cuda" and world.size == 1 and traced
        # masked sites are picked out before a fused last layer: they are counted first, for a graph has room for so many
        self.counts = replays and fuses and skips_unmasked(self.loss, head)
        self.max_masked: int | None = None
        self.step: Callable[..., Tensor] = CUDAGraphRunner(self.backward) if replays and not self.counts else self.backward
        self.soft = (
            CUDAGraphRunner(self.backward) if replays and config.head.curriculum == "duo" else self.step
        )  # another graph
        self.average = EMA(self.model, optimizer.ema)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
            fused=kind in ("cpu", "cuda"),
        )
        self.bf16 = run.precision == "bf16" or (run.precision == "auto" and kind == "cuda")
        self.narrow = BF16Weights(self.model) if kind == "cuda" and world.size == 1 and fuses and self.bf16 else None
        self.descent = OptimizerStep(self.optimizer, self.narrow.weights if self.narrow else None)
        torch.backends.cudnn.allow_tf32 = self.bf16  # for the last layer of a U-Net, a convolution of float32
        self.start, self.end = time_interval(head.process, run.t_min)
        self.progress = Progress()
        self.validation: dict[str, float] = {}

    @property
    def tau(self) -> float:
        """How soft the tokens are that the network sees in the next update; 0 without a curriculum, and after it."""
        if self.config.head.curriculum != "duo":
            return 0.0
        return temperature(self.progress.step, 0, self.config.run.steps // 2)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bf16)

    def share(self, step: int) -> LocalBatch | None:
        """What this process does of update `step`; None after the last."""
        run, world = self.config.run, self.world
        if step >= run.steps:
            return None
        indices = batch_indices(self.source.size, run.batch, step, run.seed, world.rank, world.size)
        rows = torch.arange(run.batch // world.size) + world.rank * (run.batch // world.size)
        t, weight = sample_times(rows, run.batch, run.seed, step, self.start, self.end, run.importance)
        t = snap_times(self.head.process, t)
        if self.head.exact:  # there is no integral over times
            weight = torch.ones_like(weight)
        if self.counts and run.micro_batch:
            order = balance_micro_batches(t, len(rows) // run.micro_batch)
            indices, rows, t, weight = (value[order] for value in (indices, rows, t, weight))
        batch, device = self.source.train(indices), world.device
        given = (None if value is None else to_device(value, device) for value in (batch.weight, batch.label))
        rows, t, batch = to_device(rows, device), to_device(t, device), Batch(to_device(batch.x_0, device), *given)
        return LocalBatch(
            rows, batch, t, to_device(weight, device), self.masked(batch.x_0, t, rows, step) if self.counts else None
        )

    def masked(self, x_0: Tensor, t: Tensor, rows: Tensor, step: int) -> Callable[[], list[float]]:
        """How many sites will be masked in each call of update `step`: its noise is drawn here for once, and again there."""
        now = torch.full((), step, dtype=torch.int64, device=x_0.device)
        with use_backend(self.config.run.kernels):
            x_t, _ = self.noised(x_0.long(), t, rows, now, None)
        calls = torch.eq(x_t, self.head.process.vocab).unflatten(0, (-1, self.config.run.micro_batch or len(rows)))
        return copy_to_host(calls.sum((1, 2)).double())

    def reserve_masked(self, counts: list[float], sites: int) -> None:
        """For calls with so many masked ones among their `sites`: with less room than that there is another recording."""
        count = round(max(counts))
        if self.max_masked is None or count > self.max_masked:
            self.max_masked = masked_capacity(count, sites)
            self.step = CUDAGraphRunner(functools.partial(self.backward, max_masked=self.max_masked))

    def gradient(self, share: LocalBatch) -> tuple[Tensor, Tensor]:
        """`_gradient`, and once more without a compiler if that fails at its first attempt."""
        undo, self.undo_compile = self.undo_compile, None
        if undo is None:
            return self._gradient(share)
        try:
            return self._gradient(share)
        except torch._dynamo.exc.TorchDynamoException as error:
            why = str(error).strip().splitlines()
            print(f"this network cannot be compiled here ({why[0] if why else error}): going on without", file=sys.stderr)
            undo()
            self.optimizer.zero_grad()
            return self._gradient(share)

    def _gradient(self, share: LocalBatch) -> tuple[Tensor, Tensor]:
        """Put the gradient of the loss (nats; sum over sites, mean over rows) into the parameters.

        Returns this process's part of the losses [batch] of the global batch's rows, and the weight of all its sites.
        """
        run, world, length, rows = self.config.run, self.world, self.source.length, share.rows
        if share.batch.weight is None:
            weights = torch.full((), run.batch * length, dtype=torch.float64, device=world.device)
        else:
            weights = world.sum(share.batch.weight.double().sum())
        losses = torch.zeros(run.batch, dtype=torch.float64, device=world.device)
        size = run.micro_batch or len(rows)
        if self.narrow is not None:
            self.narrow.refresh()
        if share.masked is not None:
            self.reserve_masked(share.masked(), size * length)
        step = torch.full((), self.progress.step, dtype=torch.int64, device=world.device)
        tau = torch.full((), value, device=world.device) if (value := self.tau) else None
        work = self.step if tau is None else self.soft
        single, replay = size == len(rows), work if isinstance(work, CUDAGraphRunner) else None
        if not (single and replay and replay.recorded):  # a replay writes over the gradient that the last one wrote
            self.optimizer.zero_grad(set_to_none=single or not replay)
        if tau is None and self.soft is not self.step:  # recorded of a curriculum, or with less room: let go, and its memory
            self.soft = self.step
            torch.cuda.empty_cache()
        for start in range(0, len(rows), size):
            at = slice(start, start + size)
            part = share.batch.part(at)
            label = part.label if self.config.network.labels else None
            # dropout is a function of the step and of the first row of the call
            torch.manual_seed(derived_seed(run.seed, self.progress.step, "network", world.rank * len(rows) + start))
            with accumulating(self.wrapped, last=start + size == len(rows)):
                given = (part.x_0, share.t[at], rows[at], label, share.weight[at], part.weight)
                losses[rows[at]] = work(*given, length * world.size / weights, step, tau).double()
        return losses, weights

    def backward(
        self,
        x_0: Tensor,
        t: Tensor,
        rows: Tensor,
        label: Tensor | None,
        time_weight: Tensor,
        site_weight: Tensor | None,
        factor: Tensor,
        step: Tensor,
        tau: Tensor | None = None,
        max_masked: int | None = None,
    ) -> Tensor:
        """Add the gradient of `factor` times the loss of some rows to the parameters'; returns the loss of each row. With `tau`
        the network sees softened tokens (DUO); `room` is that of `total`."""
        x_0 = x_0.long()
        weight = (time_weight * factor).unsqueeze(-1).expand(x_0.shape)
        if site_weight is not None:
            weight = weight * site_weight
        with use_backend(self.config.run.kernels):
            x_t, seen = self.noised(x_0, t, rows, step, tau)
            with seen, self.autocast():
                value, terms = self.wrapped(x_0, x_t, t, weight, label, max_masked)
            value.backward()
        return terms.sum(-1, dtype=torch.float64) / factor

    def noised(
        self, x_0: Tensor, t: Tensor, rows: Tensor, step: Tensor, tau: Tensor | None
    ) -> tuple[Tensor, AbstractContextManager[None]]:
        """x_t, and what the network is to be called in to see it, or what stands for it."""
        process, seed = self.head.process, self.config.run.seed
        if tau is None:
            return corrupt_by_counter(process, x_0, t, rows, seed, step), nullcontext()
        assert isinstance(process, Uniform) and isinstance(self.model.embedding, nn.Embedding)
        w = latent(process, x_0, t, normals_by_counter(rows, x_0.shape[1], process.vocab, seed, step))
        return w.argmax(-1), soft_embedding(self.model.embedding, torch.softmax(w / tau, -1))

    def norm(self) -> Tensor:
        """The 2-norm of the gradient over all parameters and all shards."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def descend(self, norm: Tensor, numbers: Tensor) -> Callable[[], None]:
        """`Step.start`: a step of the optimizer by the clipped gradient, and of the average, where the numbers are finite."""
        config, step = self.config.optimizer, self.progress.step
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step, self.config.run.steps)
        with use_backend(self.config.run.kernels):
            return self.descent.start(*self.average.parts(), norm, config.clip, self.average.share(step), numbers)
