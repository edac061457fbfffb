"""Part "plain-loop": a training step of `m2s train` against a plain eager loop over the same network.

The plain loop has autocast to bf16, the direct form of score entropy, clipping, AdamW and an average of the weights. Nothing in
it is compiled. `benchmarks/train.py` measures the same for the networks of other presets.
"""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from m2s.benchmark.comparison import Comparison, release
from m2s.benchmark.direct_loss import direct_score_entropy
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import METHOD, Setting
from m2s.benchmark.train import (
    MakeStep,
    RandomTokens,
    Step,
    add_token_rates,
    configuration,
    matrix_rate,
    operations_per_token,
    time_training,
    trainer,
)
from m2s.data import batch_indices
from m2s.distributed import World
from m2s.models import DiT
from m2s.training import Config
from m2s.training.build import make_objects

ROUNDS = 2
MIN_SPEEDUP, MIN_MEMORY = 2.6, 2.0


def plain_loop(config: Config, source: RandomTokens) -> tuple[Step, torch.nn.Module]:
    """Set up training as a short script does it, with uniform noise and the linear schedule.

    Args:
        config: The configuration.
        source: The data.

    Returns:
        A function that takes one training step and returns its loss, and the network.
    """
    device = World.start(config.run.device).device
    model, _, _ = make_objects(config, source)
    model = model.to(device).train()
    average = [weight.detach().clone() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr)
    number = 0

    def step() -> float:
        nonlocal number
        x_0 = source.train(batch_indices(source.size, config.run.batch, number, 0)).x_0.to(device).long()
        t = torch.rand(len(x_0), device=device) * (1 - 2 * config.run.t_min) + config.run.t_min
        x_t = torch.where(torch.rand(x_0.shape, device=device) < t[:, None], torch.randint_like(x_0, source.vocab), x_0)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(x_t, t)
        loss = direct_score_entropy(logits[..., : source.vocab].float(), x_0, x_t, t).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average, model.parameters(), strict=True):
                mean.lerp_(weight, 1 - config.optimizer.ema)
        number += 1
        return loss.item()

    return step, model


FORMS = {"plain": plain_loop, "m2s": trainer}


@PARTS.register("plain-loop")
def measure(setting: Setting) -> dict[str, Any]:
    """Compare training steps of `m2s train` and of a plain loop, with the sizes of a setting.

    Args:
        setting: Sizes and device. The method is m2s: the plain loop has its loss.

    Returns:
        As `compare`.
    """
    config = configuration(dataclasses.replace(setting, method=METHOD), "auto")
    return compare(setting, config, RandomTokens(setting.vocab, setting.length, rows=max(64, setting.batch)))


def compare(
    setting: Setting,
    config: Config,
    source: RandomTokens,
    forms: Iterable[str] = tuple(FORMS),
    rounds: int = ROUNDS,
    judged: bool | None = None,
) -> dict[str, Any]:
    """Compare training steps of `m2s train` and of a plain loop.

    Args:
        setting: Device, repeats and seed.
        config: The resolved configuration, of a method with uniform noise and score entropy.
        source: The data.
        forms: Names in `FORMS`.
        rounds: Rounds in which the forms take their steps alternately.
        judged: Whether the bars are judged; None: at the sizes of the bars.

    Returns:
        Times, memory, tokens per second, bars, the clock of the GPU, and MFU where the network is a transformer.
    """
    comparison = Comparison(setting)
    makers: dict[str, MakeStep] = {name: partial(FORMS[name], config, source) for name in forms}
    models, clock = time_training(comparison, makers, rounds)
    model = next(iter(models.values()), None)
    operations = operations_per_token(model, source.length) if isinstance(model, DiT) else None
    del model
    models.clear()
    release()
    rate = matrix_rate(setting.device, 8192 if setting.device.type == "cuda" else 256)
    add_token_rates(comparison, config.run.batch * source.length, operations, rate)
    speed, memory = comparison.ratio("plain", "m2s"), comparison.memory_ratio("plain", "m2s")
    bars = [
        comparison.bar("times faster than the plain loop", speed, at_least=MIN_SPEEDUP, judged=judged),
        comparison.bar("times less peak memory", memory, at_least=MIN_MEMORY, judged=judged),
    ]
    return comparison.result(
        f"one training step against a plain eager loop, {config.run.batch} x {source.length} tokens",
        {"plain / m2s": speed},
        bars,
        operations_a_token=operations,
        matrix_rate=rate,
        clock=clock,
    )
