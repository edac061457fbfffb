"""Part "train": a training step of the paper's text model on random tokens, in tokens per second and MFU."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from m2s.benchmark.comparison import Comparison, Stopwatch, interleave, peak_gib, release, summarize_times
from m2s.benchmark.gpu_clock import monitor_clock
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting
from m2s.data.source import Source
from m2s.distributed import World
from m2s.ops.backend import Backend
from m2s.presets.owt import OWT
from m2s.training import Batch, Config, resolve
from m2s.training.build import make_objects, make_process
from m2s.training.loop import Stopper, finish_step
from m2s.training.trainer import Trainer

WARMUP_STEPS = 6  # the fourth step is recorded as a CUDA graph, which the steps after it replay
ROUNDS = 3  # in each, every form takes several steps in succession: a step is timed from the end of the one before
FORMS: dict[str, Backend] = {"kernels fused": "fused", "kernels reference": "reference"}
MIN_SPEEDUP, MIN_MFU = 3.3, 0.55
SUSTAINED_SECONDS = 2.0  # of matrix products

Step = Callable[[], float]  # takes one training step and returns its loss
MakeStep = Callable[[], tuple[Step, torch.nn.Module]]


class RandomTokens:
    """Random tokens in the place of a data set (`m2s.data.source.Source`).

    Args:
        vocab: Number of tokens.
        length: Sites of an example.
        shape: Shape of an image; None for text.
        rows: Number of examples.
    """

    tokenizer = None
    classes = None

    def __init__(self, vocab: int, length: int, shape: tuple[int, ...] | None = None, rows: int = 4096) -> None:
        self.vocab, self.length, self.shape = vocab, length, shape
        self.rows = torch.randint(vocab, (rows, length), dtype=torch.int32)
        self.size = self.held_out = rows
        self.description: dict[str, Any] = {}

    def train(self, indices: Tensor) -> Batch:
        """Return the examples with these indices.

        Args:
            indices: Indices below `size`, [B].

        Returns:
            The examples, [B, L].
        """
        return Batch(self.rows[indices])

    validation = train


@PARTS.register("train")
def measure(setting: Setting) -> dict[str, Any]:
    """Compare training steps with fused and with readable operations.

    Args:
        setting: Sizes, device and method.

    Returns:
        Times, memory, tokens per second, MFU, bars, and the clock of the GPU.
    """
    source = RandomTokens(setting.vocab, setting.length, rows=max(64, setting.batch))
    comparison, device = Comparison(setting), setting.device
    makers: dict[str, MakeStep] = {}
    for name, backend in FORMS.items():
        reason = setting.why_unavailable("fused") if backend == "fused" else None
        if reason:
            comparison.skipped.append(f"{name}: {reason}")
        else:
            makers[name] = partial(trainer, configuration(setting, backend), source)
    models, clock = time_training(comparison, makers)
    operations = operations_per_token(next(iter(models.values())), setting.length) if models else None
    rank_one = make_process(configuration(setting, "auto").process, 2).rank_one
    if rank_one is not None and rank_one.is_pure_mask:
        operations = None
        comparison.skipped.append("MFU: only sites with a mask go through the last layer, and their number varies")
    models.clear()
    release()
    size = 8192 if device.type == "cuda" else 256
    rate = matrix_rate(device, size)
    sustained = matrix_rate(device, size, SUSTAINED_SECONDS) if device.type == "cuda" else None
    add_token_rates(comparison, setting.batch * setting.length, operations, rate)
    return comparison.result(
        f"one training step of a DiT {setting.depth} x {setting.width} x {setting.heads}, {setting.batch} x {setting.length} "
        f"tokens, method {setting.method}",
        {"kernels reference / kernels fused": comparison.ratio("kernels reference", "kernels fused")},
        _bars(comparison),
        operations_a_token=operations,
        matrix_rate=rate,
        matrix_rate_that_lasts=sustained,
        clock=clock,
    )


def _bars(comparison: Comparison) -> list[dict[str, Any]]:
    """Judge the fused form, or the first that could run."""
    setting, first = comparison.setting, next(iter(comparison.results), "")
    bars = [comparison.bar("MFU of the training step (an aim)", comparison.value(first, "mfu"), at_least=MIN_MFU)]
    if setting.against is None:
        comparison.skipped.append("tokens a second over another implementation's: give --against TOKENS_PER_SECOND")
        return bars
    tokens = comparison.value(first, "tokens_per_second")
    ratio = None if tokens is None else tokens / setting.against
    return [*bars, comparison.bar(f"tokens a second over {setting.against:,.0f}", ratio, at_least=MIN_SPEEDUP)]


def time_training(
    comparison: Comparison, makers: Mapping[str, MakeStep], rounds: int = ROUNDS
) -> tuple[dict[str, torch.nn.Module], dict[str, Any]]:
    """Time training steps of several trainers, and measure the memory of each from its start.

    Args:
        comparison: Receives the results, and what fails.
        makers: Functions that set up a trainer, by name.
        rounds: Rounds over all trainers; each takes about `setting.repeats / rounds` timed steps in a round.

    Returns:
        The networks by name, and the clock of the GPU (`monitor_clock`). A result has the median of each round as `rounds_ms`.
    """
    device, repeats = comparison.setting.device, comparison.setting.repeats
    steps: dict[str, Step] = {}
    models: dict[str, torch.nn.Module] = {}

    def start(name: str) -> None:
        steps[name], models[name] = makers[name]()
        for _ in range(WARMUP_STEPS):
            steps[name]()

    for name in makers:
        peak = comparison.attempt(name, lambda name=name: {"peak_gib": peak_gib(partial(start, name), device)})  # type: ignore[misc]
        if peak is not None:
            comparison.results[name] = peak
        else:
            steps.pop(name, None)
            models.pop(name, None)
    times: dict[str, list[list[float]]] = {name: [] for name in steps}
    with monitor_clock(device) as clock:
        for _ in range(rounds):
            for name, step in steps.items():
                watch = Stopwatch(device)
                for _ in range(1 + max(1, repeats // rounds)):
                    step()
                    watch.stamp()
                times[name].append(watch.intervals())
    for name, milliseconds in times.items():
        medians = [statistics.median(one) for one in milliseconds]
        comparison.results[name] |= {**summarize_times([time for one in milliseconds for time in one]), "rounds_ms": medians}
    return models, clock


def configuration(setting: Setting, kernels: Backend) -> Config:
    """Return the owt preset with the sizes and the method of a setting.

    Args:
        setting: Sizes, device and method.
        kernels: Backend of the operations.

    Returns:
        The resolved configuration.
    """
    network = dataclasses.replace(OWT.network, width=setting.width, depth=setting.depth, heads=setting.heads)
    run = dataclasses.replace(OWT.run, batch=setting.batch, device=str(setting.device), kernels=kernels, on_nan="skip")
    return resolve(dataclasses.replace(OWT, run=run, network=network, method=setting.method))


def trainer(config: Config, source: Source) -> tuple[Step, torch.nn.Module]:
    """Set up training as `m2s train` does it.

    Args:
        config: The configuration.
        source: The data.

    Returns:
        A function that takes one training step and returns its loss, and the network.
    """
    world = World.start(config.run.device)
    model, head, description = make_objects(config, source)
    training = Trainer(config, source, world, model, head, description)
    local_batch = training.local_batch(0)

    def step() -> float:
        nonlocal local_batch
        assert local_batch is not None
        result = finish_step(training, *training.gradient(local_batch), Stopper())
        local_batch = result.next_batch
        return result.loss

    return step, model


def add_token_rates(comparison: Comparison, tokens: int, operations: int | None, rate: float) -> None:
    """Add tokens per second and MFU to the results of training steps.

    Args:
        comparison: The measured steps.
        tokens: Tokens of a step.
        operations: Operations per token; None: MFU is None.
        rate: Operations per second of a matrix product, from `matrix_rate`.
    """
    for result in comparison.results.values():
        result["tokens_per_second"] = tokens / result["median_ms"] * 1e3
        result["mfu"] = None if operations is None else result["tokens_per_second"] * operations / rate


def operations_per_token(model: torch.nn.Module, length: int) -> int:
    """Return the operations of a training step per token: 6 parameters + 12 depth width length.

    Args:
        model: A DiT. Its embedding table does not count, because no matrix product reads it.
        length: Sites of a sequence.

    Returns:
        Floating-point operations of the forward and the backward pass.
    """
    body = sum(value.numel() for name, value in model.named_parameters() if not name.startswith("embedding"))
    return 6 * body + 12 * int(model.config.depth) * int(model.config.width) * length  # type: ignore[union-attr, arg-type]


def matrix_rate(device: torch.device, size: int, seconds: float = 0) -> float:
    """Measure the rate of a matrix product of two size x size matrices, in bf16 on a GPU.

    Args:
        device: The device.
        size: Rows and columns.
        seconds: 0 takes the best of ten products. Otherwise products run for so long, and the second half counts: a GPU at its
            power limit does not sustain its best rate.

    Returns:
        Operations per second.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    best = min(interleave({"": lambda: a @ b}, device, 10)[""])
    watch, count = Stopwatch(device), round(seconds * 1e3 / best)
    for _ in range(count):
        watch.stamp()
        a @ b
    milliseconds = watch.intervals()[count // 2 :]
    return 2e3 * size**3 / (statistics.fmean(milliseconds) if milliseconds else best)
