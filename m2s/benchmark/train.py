"""A whole update of the weights of the paper's text model, on random tokens."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from m2s.benchmark.comparison import Comparison, Watch, interleave, peak_gib, release, summary
from m2s.benchmark.gpu_clock import watched
from m2s.benchmark.setting import Setting
from m2s.data.source import Source
from m2s.distributed import World
from m2s.ops.backend import Backend
from m2s.presets.owt import OWT
from m2s.process import RankOne
from m2s.training import Batch, Config, resolve
from m2s.training.build import make_objects, make_process
from m2s.training.loop import Stopper, training_step
from m2s.training.trainer import Trainer

WARM = 6  # updates: the fourth is recorded, those after it are replayed
ROUNDS = 3  # of updates one after the other for each form, in turns: an update is timed from the end of the one before
FORMS: dict[str, Backend] = {"kernels fused": "fused", "kernels reference": "reference"}
LEAST, AIM = 3.3, 0.55
LASTING = 2.0  # seconds of products


class Random:
    """Rows of random tokens in the place of a data set."""

    tokenizer = None
    classes = None

    def __init__(self, vocab: int, length: int, shape: tuple[int, ...] | None = None, rows: int = 4096) -> None:
        self.vocab, self.length, self.shape = vocab, length, shape
        self.rows = torch.randint(vocab, (rows, length), dtype=torch.int32)
        self.size = self.held_out = rows
        self.description: dict[str, Any] = {}

    def train(self, indices: Tensor) -> Batch:
        return Batch(self.rows[indices])

    validation = train


def measure(setting: Setting) -> dict[str, Any]:
    source = Random(setting.vocab, setting.length, rows=max(64, setting.batch))
    contest, device = Comparison(setting), setting.device
    operations = None
    for name, kernels in FORMS.items():
        lacking = setting.lacks("fused") if kernels == "fused" else None
        if lacking:
            contest.skipped.append(f"{name}: {lacking}")
            continue
        config = configuration(setting, kernels)
        made: list[tuple[Callable[[], float], torch.nn.Module]] = []

        def start(config: Config = config, made: list[Any] = made) -> None:
            made.append(trainer(config, source))
            for _ in range(WARM):
                made[-1][0]()

        peak = contest.attempt(name, lambda start=start: {"peak_gib": peak_gib(start, device)})  # type: ignore[misc]
        if peak is not None:
            contest.found[name], contest.calls[name] = peak, made[0][0]
            operations = operations_a_token(made[0][1], setting.length)
    if isinstance(process := make_process(configuration(setting, "auto").process, 2), RankOne) and process.is_pure_mask:
        operations = None
        contest.skipped.append("MFU: only sites with a mask go through the last layer, and their number varies")
    times: dict[str, list[float]] = {name: [] for name in contest.calls}
    with watched(device) as clock:
        for _ in range(ROUNDS):
            for name, call in contest.calls.items():
                watch = Watch(device)
                for _ in range(1 + max(1, setting.repeats // ROUNDS)):
                    call()
                    watch.tick()
                times[name] += watch.gaps()
    for name, milliseconds in times.items():
        contest.found[name] |= summary(milliseconds)
    contest.calls.clear()
    release()
    size = 8192 if device.type == "cuda" else 256
    rate, lasting = matrix_rate(device, size), matrix_rate(device, size, LASTING) if device.type == "cuda" else None
    for found in contest.found.values():
        found["tokens_per_second"] = setting.batch * setting.length / found["median_ms"] * 1e3
        found["mfu"] = None if operations is None else found["tokens_per_second"] * operations / rate
    judged = next(iter(contest.found), "")  # the fused form, where it runs
    tokens = contest.value(judged, "tokens_per_second")
    against = None if tokens is None or setting.against is None else tokens / setting.against
    bars = [contest.bar("MFU of the training step (an aim)", contest.value(judged, "mfu"), at_least=AIM)]
    if setting.against is not None:
        bars.append(contest.bar(f"tokens a second over {setting.against:,.0f}", against, at_least=LEAST))
    else:
        contest.skipped.append("tokens a second over another implementation's: give --against TOKENS_PER_SECOND")
    return contest.result(
        f"one update of a DiT {setting.depth} x {setting.width} x {setting.heads}, {setting.batch} x {setting.length} tokens, "
        f"method {setting.method}",
        {"kernels reference / kernels fused": contest.ratio("kernels reference", "kernels fused")},
        bars,
        operations_a_token=operations,
        matrix_rate=rate,
        matrix_rate_that_lasts=lasting,
        clock=clock,
    )


def configuration(setting: Setting, kernels: Backend) -> Config:
    """The owt preset in this setting's size, and its method."""
    network = dataclasses.replace(OWT.network, width=setting.width, depth=setting.depth, heads=setting.heads)
    run = dataclasses.replace(OWT.run, batch=setting.batch, device=str(setting.device), kernels=kernels, on_nan="skip")
    return resolve(dataclasses.replace(OWT, run=run, network=network, method=setting.method))


def trainer(config: Config, source: Source) -> tuple[Callable[[], float], torch.nn.Module]:
    """One update as the training loop makes it, and the network."""
    world = World.start(config.run.device)
    model, head, description = make_objects(config, source)
    learner = Trainer(config, source, world, model, head, description)
    share = learner.share(0)

    def call() -> float:
        nonlocal share
        assert share is not None
        made = training_step(learner, share, Stopper())
        share = made.following
        return made.loss

    return call, model


def operations_a_token(model: torch.nn.Module, length: int) -> int:
    """6 x parameters (without the embedding table) + 12 x depth x width x length."""
    body = sum(value.numel() for name, value in model.named_parameters() if not name.startswith("embedding"))
    return 6 * body + 12 * int(model.config.depth) * int(model.config.width) * length  # type: ignore[union-attr, arg-type]


def matrix_rate(device: torch.device, size: int, seconds: float = 0) -> float:
    """Operations a second of a product of two size x size matrices, bf16 on a GPU: the best of ten, or, over some seconds of
    nothing else, what the second half of them came to. A GPU at its power limit does not keep up its best."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    best = min(interleave({"": lambda: a @ b}, device, 10)[""])
    watch, count = Watch(device), round(seconds * 1e3 / best)
    for _ in range(count):
        watch.tick()
        a @ b
    gaps = watch.gaps()[count // 2 :]
    return 2e3 * size**3 / (statistics.fmean(gaps) if gaps else best)
