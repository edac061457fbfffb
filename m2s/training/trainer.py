"""One training step: local batch, corruption, loss, backward pass, optimizer, moving average of the weights."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from m2s.data import batch_indices
from m2s.data.source import Batch, Source
from m2s.distributed import World
from m2s.heads import Head
from m2s.losses.noise import sample_times
from m2s.losses.objective import TrainingObjective
from m2s.losses.registry import has_fused_form
from m2s.losses.weighted_sum import skips_unmasked
from m2s.methods.build import make_loss, nelbo_loss
from m2s.ops import use_backend, uses_triton
from m2s.patches import AttributePatches
from m2s.process import Process
from m2s.process.chain import snap_times, time_interval
from m2s.rng import derived_seed
from m2s.training.compilation import choose_compilation
from m2s.training.config import Config, OptimizerConfig
from m2s.training.cuda_graph import DirectBackward, GraphedBackward
from m2s.training.curriculum import CURRICULA
from m2s.training.ema import EMA
from m2s.training.optimizer import Optimizer
from m2s.training.parallel import accumulating, recompute, wrap

AUTOTUNE = True  # cuDNN times the algorithms of a convolution in its first call on a GPU, before a CUDA graph is recorded


@dataclass(frozen=True)
class LocalBatch:
    """The part of a global batch that one process trains on.

    Args:
        rows: The examples' indices in the global batch, [n].
        batch: The examples.
        t: A time for each example, [n].
        weight: The weight of each time, [n].
        read_masked_counts: Waits for the number of masked positions of each micro-batch and returns them; None: not needed.
    """

    rows: Tensor
    batch: Batch
    t: Tensor
    weight: Tensor
    read_masked_counts: Callable[[], list[float]] | None = None


@dataclass
class Progress:
    """What a state holds besides tensors.

    Args:
        step: The number of training steps made.
        tokens: The number of tokens trained on; padding does not count.
        skipped: The number of steps skipped because a loss or gradient was not finite.
        losses: The losses that the next line of the log averages.
        norms: The gradient norms that the next line of the log averages.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting for the device.

    Args:
        value: The tensor.
        device: The device. A copy to a GPU from memory that is not pinned would wait for all work before it.

    Returns:
        The copy.
    """
    if device.type != "cuda" or value.is_cuda:
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)


def copy_to_host(numbers: Tensor) -> Callable[[], list[float]]:
    """Start an asynchronous device-to-host copy.

    Args:
        numbers: A vector.

    Returns:
        A function that waits for the copy, but for no work started after it, and returns the numbers.
    """
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
    """Return an order of the examples in which every micro-batch has early and late times.

    The numbers of masked positions of the micro-batches are then nearly equal.

    Args:
        t: The times, [n].
        calls: The number of micro-batches, a divisor of n.

    Returns:
        The indices of the examples, [n].
    """
    order = t.argsort().unflatten(0, (-1, calls))
    order[1::2] = order[1::2].flip(1)
    return order.t().flatten()


def learning_rate(optimizer: OptimizerConfig, step: int, steps: int) -> float:
    """Return the learning rate of a training step.

    Args:
        optimizer: The largest rate, the warmup and the decay.
        step: The step, counted from 0.
        steps: The number of steps of the run.
    """
    if step < optimizer.warmup:
        return optimizer.lr * (step + 1) / optimizer.warmup
    if optimizer.decay == "constant":
        return optimizer.lr
    return optimizer.lr * 0.5 * (1 + math.cos(math.pi * (step - optimizer.warmup) / max(1, steps - optimizer.warmup)))


def is_graph_safe(process: Process, device: torch.device) -> bool:
    """Return whether a CUDA graph can record the process: its transition matrices need no value of t on the host.

    A tabulated process uses tables, which are computed here. Without tables it squares matrices a number of times that depends
    on the time.

    Args:
        process: The process.
        device: The device of the run.
    """
    tabulated = process.tabulated
    return tabulated is None or tabulated.prepare(device)


def uses_channels_last(world: World, parallel: str) -> bool:
    """Return whether the weights of convolutions are stored channels-last, the layout of their kernels on a GPU.

    A contiguous weight is converted in every call and every backward pass.

    Args:
        world: The processes.
        parallel: "ddp" or "fsdp". FSDP2 takes contiguous weights only.
    """
    return world.device.type == "cuda" and (world.size == 1 or parallel == "ddp")


class Trainer:
    """A network in training, with its optimizer and the moving average of its weights.

    A context manager: `close` restores the attributes of the network and torch's global flags.

    Args:
        config: The resolved configuration.
        source: The data.
        world: The processes.
        model: The network.
        head: The head.
        description: The description of the network, for its checkpoint.
    """

    def __init__(
        self, config: Config, source: Source, world: World, model: nn.Module, head: Head, description: dict[str, Any]
    ) -> None:
        self.config, self.source, self.world, self.head, self.description = config, source, world, head, description
        run, optimizer, kind = config.run, config.optimizer, world.device.type
        self.loss, self.nelbo_loss = make_loss(config.head), nelbo_loss(config.head)
        self.model = model.to(world.device).train()
        if uses_channels_last(world, run.parallel):
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.patches = AttributePatches()
        self.bf16 = run.precision == "bf16" or (run.precision == "auto" and kind == "cuda")
        self.patches.set(torch.backends.cudnn, "allow_tf32", self.bf16)  # for a U-Net's last layer, a float32 convolution
        self.patches.set(torch.backends.cudnn, "benchmark", AUTOTUNE and kind == "cuda")
        graph_safe = is_graph_safe(head.process, world.device)
        if run.recompute:
            recompute(self.model, self.patches)
        objective = TrainingObjective(self.model, head, self.loss, run.t_min)
        with use_backend(run.kernels):
            self.fused = hasattr(self.model, "unprojected") and uses_triton(next(self.model.parameters()))
        if self.fused:
            self.patches.set(self.model, "unprojected", True)
        self.compilation = choose_compilation(objective, run.compile, world, graph_safe)
        self.wrapped = wrap(objective, world, run.parallel)
        self.curriculum = CURRICULA[config.head.curriculum](config, head, self.model)
        self.backward_pass = DirectBackward(self.backward)
        if kind == "cuda" and world.size == 1 and graph_safe:
            counts_masked = self.fused and skips_unmasked(self.loss, head)
            self.backward_pass = GraphedBackward(self.backward, counts_masked, config.head.curriculum != "none")
        self.average = EMA(self.model, optimizer.ema)
        self.optimizer = Optimizer(self.model, optimizer, self.average)
        self.start, self.end = time_interval(head.process, run.t_min)
        self.progress = Progress()
        self.validation: dict[str, float] = {}

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the attributes of the network and torch's global flags."""
        self.compilation.close()
        self.patches.close()

    @property
    def unfused_loss(self) -> bool:
        """Whether fused kernels are active, but the loss has no fused form: all logits are then in memory at once."""
        return self.fused and not has_fused_form(self.loss, self.head)

    @property
    def tau(self) -> float:
        """The temperature of the softened tokens in the next step; 0 without a curriculum, and after it."""
        return self.curriculum.tau(self.progress.step)

    def autocast(self) -> torch.autocast:
        """Return the context in which the network is called: bf16, or nothing."""
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bf16)

    def local_batch(self, step: int) -> LocalBatch | None:
        """Return this process's part of the batch of a step; None after the last step.

        Args:
            step: The training step, counted from 0.
        """
        run, world = self.config.run, self.world
        if step >= run.steps:
            return None
        indices = batch_indices(self.source.size, run.batch, step, run.seed, world.rank, world.size)
        rows = torch.arange(run.batch // world.size) + world.rank * (run.batch // world.size)
        t, weight = sample_times(rows, run.batch, run.seed, step, self.start, self.end, run.importance)
        t = snap_times(self.head.process, t)
        if self.head.exact:  # the loss is the likelihood itself, not the integrand of an integral over times
            weight = torch.ones_like(weight)
        counts = self.backward_pass.counts_masked
        if counts and run.micro_batch:
            order = balance_micro_batches(t, len(rows) // run.micro_batch)
            indices, rows, t, weight = (value[order] for value in (indices, rows, t, weight))
        batch, device = self.source.train(indices), world.device
        given = (None if value is None else to_device(value, device) for value in (batch.weight, batch.label))
        rows, t, batch = to_device(rows, device), to_device(t, device), Batch(to_device(batch.x_0, device), *given)
        read_masked_counts = self._count_masked(batch.x_0, t, rows, step) if counts else None
        return LocalBatch(rows, batch, t, to_device(weight, device), read_masked_counts)

    def _count_masked(self, x_0: Tensor, t: Tensor, rows: Tensor, step: int) -> Callable[[], list[float]]:
        """Start to count the masked positions of each micro-batch. The same noise is drawn again in the backward pass."""
        now = torch.full((), step, dtype=torch.int64, device=x_0.device)
        with use_backend(self.config.run.kernels):
            x_t, _ = self._corrupt(x_0.long(), t, rows, now, None)
        calls = torch.eq(x_t, self.head.process.vocab).unflatten(0, (-1, self.config.run.micro_batch or len(rows)))
        return copy_to_host(calls.sum((1, 2)).double())

    def _corrupt(
        self, x_0: Tensor, t: Tensor, rows: Tensor, step: Tensor, tau: Tensor | None
    ) -> tuple[Tensor, AbstractContextManager[None]]:
        """Return x_t [B, L], and a context in which the network reads it or its softened form."""
        return self.curriculum.corrupt(x_0, t, rows, step, tau)

    def gradient(self, batch: LocalBatch) -> tuple[Tensor, Tensor]:
        """Compute the gradient of the loss: nats, summed over positions, averaged over examples.

        Args:
            batch: This process's part of the batch.

        Returns:
            The losses of the global batch's examples [batch], 0 for those of other processes, and the weight of all positions.
        """
        run, world, length, rows = self.config.run, self.world, self.source.length, batch.rows
        if batch.batch.weight is None:
            weights = torch.full((), run.batch * length, dtype=torch.float64, device=world.device)
        else:
            weights = world.sum(batch.batch.weight.double().sum())
        losses = torch.zeros(run.batch, dtype=torch.float64, device=world.device)
        size = run.micro_batch or len(rows)
        if batch.read_masked_counts is not None:
            self.backward_pass.reserve_masked(batch.read_masked_counts(), size * length)
        step = torch.full((), self.progress.step, dtype=torch.int64, device=world.device)
        tau = torch.full((), value, device=world.device) if (value := self.tau) else None
        backward = self.backward_pass.start_step(self.optimizer, single=size == len(rows), soft=tau is not None)
        try:
            for start in range(0, len(rows), size):
                at = slice(start, start + size)
                part = batch.batch.part(at)
                label = part.label if self.config.network.labels else None
                # Dropout is a function of the step and of the first example of the micro-batch.
                torch.manual_seed(derived_seed(run.seed, self.progress.step, "network", world.rank * len(rows) + start))
                with accumulating(self.wrapped, last=start + size == len(rows)):
                    given = (part.x_0, batch.t[at], rows[at], label, batch.weight[at], part.weight)
                    losses[rows[at]] = backward(*given, length * world.size / weights, step, tau).double()
        except self.compilation.errors as error:
            self.compilation.undo(error)
            self.optimizer.zero_grad()
            return self.gradient(batch)
        self.compilation.succeed()
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
        """Add the gradient of a micro-batch. A CUDA graph may record it: it reads no tensor value on the host.

        Args:
            x_0: Clean tokens, [B, L].
            t: Times, [B].
            rows: The examples' indices in the global batch, [B].
            label: Class labels, [B].
            time_weight: The weight of each time, [B].
            site_weight: The weight of each position, [B, L].
            factor: The factor between the sum over positions and the loss of the batch, a scalar.
            step: The training step, a scalar.
            tau: The temperature of softened tokens, a scalar; None: the tokens are plain.
            max_masked: As in `m2s.losses.weighted_sum`.

        Returns:
            The loss of each example, [B].
        """
        x_0 = x_0.long()
        weight = (time_weight * factor).unsqueeze(-1).expand(x_0.shape)
        if site_weight is not None:
            weight = weight * site_weight
        with use_backend(self.config.run.kernels):
            x_t, network_input = self._corrupt(x_0, t, rows, step, tau)
            with network_input, self.autocast():
                value, terms = self.wrapped(x_0, x_t, t, weight, label, max_masked)
            value.backward()
        return terms.sum(-1, dtype=torch.float64) / factor

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of the gradient over all parameters and all shards."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def update_weights(self, norm: Tensor, numbers: Tensor) -> Callable[[], None]:
        """Start the step of the optimizer and of the moving average.

        Args:
            norm: The norm of the gradient, by which it is clipped.
            numbers: The loss and the norm. Where one of them is not finite, the weights stay as they are.

        Returns:
            A function that finishes the step (`m2s.training.optimizer.Optimizer.start`).
        """
        config, step = self.config.optimizer, self.progress.step
        self.optimizer.set_learning_rate(learning_rate(config, step, self.config.run.steps))
        with use_backend(self.config.run.kernels):
            return self.optimizer.start(norm, config.clip, self.average.new_weight_fraction(step), numbers)
