"""Memory and time of a training step, estimated before the step is made.

The network and the loss run once on fake tensors, which have shapes but no values. This takes no memory, and the storage that
they would hold is counted. With N parameters and micro-batches of B examples the estimate in bytes is

    20 N + B (activations + loss) + 2 A (8 L + 40)

The 20 bytes are the weight, its average, two moments and the gradient, in float32. Activations are what the forward pass of
one example keeps for the backward pass, logits included. The loss is the most that its forward and backward pass hold beside
them, the gradient of the logits included. The last term is small: the A examples of a step, with L tokens, index, time, weight
and loss each, and those of the next step.

A tabulated process adds its tables. Its loss reads values, so that it cannot be traced: a constant takes its place.
`m2s.training.step_trace` makes the trace, and `m2s.training.memory_check` compares the estimate with the memory.

On a GPU three things differ, and the constants below come from runs on one H200 (RESULTS.md). Activations are in bf16. A
compiled network keeps fewer of them: `COMPILED` of what the eager one keeps. Fused kernels never hold all logits.

`benchmarks/memory.py` compares the estimate with the peak that the operating system reports.
"""

import dataclasses
import os
from dataclasses import dataclass

import torch

from m2s.data.source import Source
from m2s.devices import available_memory
from m2s.distributed import World
from m2s.losses.registry import has_fused_form
from m2s.methods import METHODS
from m2s.ops import why_unavailable
from m2s.training.compilation import COMPILED as COMPILED_DEVICES
from m2s.training.config import Config
from m2s.training.step_trace import Step, trace_step
from m2s.training.validate import validation_rows

GIB = 2**30
WEIGHT_BYTES = 20  # weight, average, two moments, gradient
BATCHES = 2  # batches in memory: that of the step, and the next one
TOKEN_BYTES, EXAMPLE_BYTES = 8, 40  # of a batch: a token, and index, row, time, weight and loss of an example
COMPILED = 0.8  # activations of a compiled network over those of the eager one
COMPILED_LOSS = 8.0  # bytes per logit of a compiled loss, with the last layer of a transformer
TABULATED_COMPILED_LOSS = 64.0  # the same for a tabulated process
FUSED_LOSS = 2.0**30  # bytes of the fused last layer and loss, whatever the batch
TABLES = 1000  # matrices that a tabulated process holds
SCORE_VALIDATION = 32.0  # bytes per logit of the validation of a score, whose posterior is computed in float64
GPU_VALIDATION = 8.0  # bytes per logit of an eager loss without its gradient


@dataclass(frozen=True)
class Estimate:
    """The memory of a run on one process and the work of a step.

    Args:
        step: The memory of an example.
        examples: Examples of one call of the network.
        weights: Bytes of weights, average, moments and gradients on this process, and of the tables of a tabulated process.
        activations: Bytes of the activations of a call.
        loss: Bytes of the loss of a call.
        validation: Bytes of a call of the validation, without the weights.
        batch: Bytes of the tokens, times and losses of this step and of the next one.
        operations: Floating point operations of a training step on this process, forward and backward.
        available: Bytes that are available; None where that is unknown.
    """

    step: Step
    examples: int
    weights: float
    activations: float
    loss: float
    validation: float
    batch: float
    operations: float
    available: float | None

    @property
    def total(self) -> float:
        """Bytes of the run: weights, batch, and the larger of training and validation."""
        return self.weights + self.batch + max(self.activations + self.loss, self.validation)

    def of(self, examples: int) -> "Estimate":
        """Return the estimate with another number of examples in a call of the network.

        Args:
            examples: The number.
        """
        share = examples / self.examples
        loss = self.loss if self.loss == FUSED_LOSS else self.loss * share
        return dataclasses.replace(self, examples=examples, activations=self.activations * share, loss=loss)

    @property
    def fits(self) -> bool:
        """Whether the memory suffices, as far as it is known."""
        return self.available is None or self.total <= self.available


def estimate(config: Config, source: Source, world: World) -> Estimate:
    """Estimate the memory and the work of a run.

    Args:
        config: The resolved configuration.
        source: The data.
        world: The processes and their device.

    Returns:
        The estimate for one process.

    Raises:
        UserError: The configuration does not describe a network.
    """
    run, device, transformer = config.run, world.device, config.network.kind == "dit"
    gpu = device.type == "cuda"
    parts = METHODS[config.method].build(source.vocab, config.process, config.head)
    fused = gpu and transformer and run.kernels != "reference" and not why_unavailable(device)
    fused = fused and has_fused_form(parts.loss, parts.head)
    compiled = run.compile == "yes" or (run.compile == "auto" and device.type in COMPILED_DEVICES)
    step = trace_step(config, source, is_bf16(config, device), transformer and (fused or compiled), run.recompute)
    logits = source.length * parts.head.process.states
    local = run.batch // world.size
    examples = run.micro_batch or local
    tables = 8.0 * TABLES * parts.head.process.states**2 if parts.head.process.tabulated else 0.0
    loss = step.loss
    if compiled:
        loss = (TABULATED_COMPILED_LOSS if tables else COMPILED_LOSS) * logits
    # Validation keeps no activations, and the weights beside their average take the place of the gradients.
    rows = min(validation_rows(device, logits), run.validation_samples, source.held_out)
    validated = step.loss if parts.head.has_posterior else max(step.loss, SCORE_VALIDATION * logits)
    if gpu:
        validated = GPU_VALIDATION * logits
    available = available_memory(device)
    if available is not None and not gpu:
        available /= int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return Estimate(
        step=step,
        examples=examples,
        weights=WEIGHT_BYTES * step.parameters / (world.size if run.parallel == "fsdp" else 1) + tables,
        activations=step.activations * (COMPILED if compiled else 1) * examples,
        loss=FUSED_LOSS if fused else loss * examples,
        validation=0.0 if fused else rows * (4 * logits + validated),
        batch=float(BATCHES * local * (TOKEN_BYTES * source.length + EXAMPLE_BYTES)),
        operations=3 * step.operations * local,
        available=available,
    )


def is_bf16(config: Config, device: torch.device) -> bool:
    """Return whether the body of the network runs in bf16.

    Args:
        config: The configuration.
        device: The device.
    """
    return config.run.precision == "bf16" or (config.run.precision == "auto" and device.type == "cuda")
