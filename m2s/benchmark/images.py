"""Part "images": training steps and sampling steps of the U-Nets of the presets cifar10 and mnist, in images per second.

Compare two revisions by running this part in a clone of each, alternately, and `benchmarks/revisions.py` on the results. A
revision without this file measures it as a plugin: m2s benchmark images --plugin FILE
"""

from functools import partial
from typing import Any, NamedTuple

import torch

import m2s
from m2s.benchmark.comparison import Comparison, Stopwatch, peak_gib, release, summarize_times
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting
from m2s.benchmark.train import MakeStep, RandomTokens, time_training, trainer
from m2s.presets import PRESETS
from m2s.samplers.inference_model import InferenceModel
from m2s.training import Config, resolve
from m2s.training.build import make_objects
from m2s.training.config import replace

SHAPES = {"cifar10": (32, 32, 3), "mnist": (28, 28)}
STEPS = 100  # calls of the network for a sample, in images per second of sampling
ROUNDS = 3


class Case(NamedTuple):
    """What is trained or sampled.

    Args:
        preset: The preset whose network is used.
        method: The method.
        batch: Images of a training step, or of a call of the network.
    """

    preset: str
    method: str
    batch: int


TRAINED = {
    "train cifar10": Case("cifar10", "m2s-offset", 128),
    "train mnist": Case("mnist", "m2s-offset", 256),
    "train mnist, d3pm-gaussian": Case("mnist", "d3pm-gaussian", 256),
}
SAMPLED = {"sample cifar10": Case("cifar10", "m2s-offset", 128), "sample mnist": Case("mnist", "m2s-offset", 500)}


def is_small(setting: Setting) -> bool:
    """Return whether networks and images are small: in a rehearsal, and on a CPU.

    Args:
        setting: The setting.
    """
    return setting.quick or setting.device.type != "cuda"


def configuration(setting: Setting, case: Case) -> Config:
    """Return the configuration of a case.

    Args:
        setting: Device and seed, and whether the network is small.
        case: The preset, the method and the batch.

    Returns:
        The resolved configuration.
    """
    config = replace(PRESETS[case.preset], "method", case.method)
    changes: dict[str, Any] = {"batch": case.batch, "device": str(setting.device), "seed": setting.seed, "on_nan": "skip"}
    if is_small(setting):
        changes |= {"batch": 2, "network.size": "tiny", "network.width": 8, "compile": "no"}
        changes |= {"process.chain_steps": 20} if case.method.startswith("d3pm") else {}
    for key, value in changes.items():
        config = replace(config, key, value)
    return resolve(config)


def random_images(setting: Setting, case: Case) -> RandomTokens:
    """Return random images in the place of a data set.

    Args:
        setting: Small images have 8 x 8 pixels with 16 levels.
        case: The preset, which says the shape.
    """
    shape = SHAPES[case.preset]
    shape, levels = ((8, 8, *shape[2:]), 16) if is_small(setting) else (shape, 256)
    return RandomTokens(levels, torch.Size(shape).numel(), shape, rows=1024)


@PARTS.register("images")
def measure(setting: Setting) -> dict[str, Any]:
    """Time training steps and sampling steps of U-Nets.

    Args:
        setting: Device, repeats and seed. Sizes are those of the presets on a GPU.

    Returns:
        Times and memory of a step, and images per second; sampling counts images of 100 steps.
    """
    comparison = Comparison(setting)
    if reason := setting.why_unavailable("fused"):
        comparison.skipped.append(f"kernels fused: {reason}")
    for name, case in TRAINED.items():  # one after the other, since compiled networks take memory
        make: MakeStep = partial(trainer, configuration(setting, case), random_images(setting, case))
        models, _ = time_training(comparison, {name: make}, ROUNDS)
        models.clear()
        release()
    for name, case in SAMPLED.items():
        found = comparison.attempt(name, partial(_time_sampling, setting, case))
        if found is not None:
            comparison.results[name] = found
        release()
    for name, case in {**TRAINED, **SAMPLED}.items():
        if name in comparison.results:
            result, images = comparison.results[name], configuration(setting, case).run.batch
            result["images_per_second"] = images / result["median_ms"] * 1e3 / (STEPS if name in SAMPLED else 1)
    return comparison.result("one step of U-Nets: training, and m2s.sample with the Bayes sampler", {}, [])


@torch.no_grad()
def _time_sampling(setting: Setting, case: Case) -> dict[str, Any]:
    """Times between the steps of m2s.sample, from the second step on."""
    config, source, device = configuration(setting, case), random_images(setting, case), setting.device
    model, head, _ = make_objects(config, source)
    network = InferenceModel(model.to(device).eval(), head.process.states, bf16=device.type == "cuda")
    rows, milliseconds = config.run.batch, []

    def draw(watch: Stopwatch) -> None:
        m2s.sample(
            network,
            head,
            (rows, source.length),
            steps=max(4, setting.repeats // ROUNDS),
            sampler="bayes",
            micro_batch=rows,
            seed=setting.seed,
            callback=lambda _: watch.stamp(),
            device=device,
        )

    peak = peak_gib(partial(draw, Stopwatch(device)), device)
    for _ in range(ROUNDS):
        watch = Stopwatch(device)
        draw(watch)
        milliseconds += watch.intervals()
    return {"peak_gib": peak, **summarize_times(milliseconds)}
