"""The command to train on a prepared text or on downloaded data, sized to the machine and to the data."""

import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2s.data.files import root

if TYPE_CHECKING:
    from m2s.data.image_set import ImageSet
    from m2s.data.source import Source
    from m2s.training.config import Config

EPOCHS = 10  # how often a run reads a small text
CPU_LENGTH, CPU_STEPS, CPU_BATCH = 128, 5_000, 32
CPU_LOGITS = 2**23  # logits of a step for each core: a step of the smallest network then takes seconds at most
GPU_TOKENS = 10_000_000  # with fewer tokens a GPU trains the small network, too
CPU_IMAGE_LOGITS, CPU_IMAGE_STEPS = 2**21, 1_000  # of images, whose network makes more operations for each logit
MEMORY = 0.5  # the part of the available memory that a run may take


def next_command(out: Path, meta: dict[str, Any]) -> str:
    """Return the command that uses a prepared text next.

    On a CPU it trains the smallest transformer, at a batch whose steps take seconds. On a GPU it trains the preset, in
    micro-batches that fit, or the smallest transformer where there are few tokens. The number of steps is that of `EPOCHS`
    epochs, within limits.

    Args:
        out: The folder of the text.
        meta: Its meta.json.

    Returns:
        The command to train on it, with windows no longer than the text; without training or validation text, the command to
        evaluate on it.
    """
    import torch

    from m2s.presets import PRESETS
    from m2s.training.config import replace

    tokens = {split: meta["splits"][split]["tokens"] for split in ("train", "validation")}
    folder, run = shlex.quote(str(out)), shlex.quote(f"runs/{out.resolve().name}")
    if not min(tokens.values()):
        return f"m2s evaluate bpd RUN --data {folder}"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = _options(meta["vocab"], tokens, device, _cores())
    options |= _micro_batch(replace(PRESETS["owt"], "data.folder", str(out)), options, device)
    return f"m2s train owt --data.folder {folder} {_words(options)} --out {run}"


def next_preset_command(name: str) -> str:
    """Return the command that trains the preset of downloaded data.

    On a GPU it is the preset, in micro-batches that fit. On a CPU the network is the smallest, and there are fewer and smaller
    steps: the presets are the runs of papers, which take a GPU hours or days.

    Args:
        name: The preset, such as cifar10. Its data must be on this machine.

    Returns:
        The command.
    """
    import torch

    from m2s.data import image_sets
    from m2s.data.tokens import read_meta
    from m2s.presets import PRESETS
    from m2s.training.build import open_data

    preset, device = PRESETS[name], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, int | str] = {}
    if preset.data.name == "text":
        if device.type == "cpu":
            return next_command(root() / name, read_meta(root() / name))
        source = open_data(preset.data)
    else:
        source = _blank_images(image_sets()[name], preset.run.validation_samples)
        if device.type == "cpu":
            options = _image_options(source.vocab * source.length, _cores())
    options |= _micro_batch(preset, options, device, source)
    return " ".join(filter(None, [f"m2s train {name}", _words(options)]))


def _blank_images(entry: "ImageSet", count: int) -> "Source":
    """Images of the sizes of a data set, without its files: reading them takes time, and only sizes matter here."""
    import torch

    from m2s.data.images import ImageDataset
    from m2s.data.source import ImageSource

    images = torch.zeros(count, math.prod(entry.shape), dtype=torch.uint8)
    labels = torch.zeros(count, dtype=torch.long)
    return ImageSource(ImageDataset(entry.name, images, labels, images, labels, entry.shape, entry.vocab))


def _words(options: dict[str, int | str]) -> str:
    """Options as they are typed."""
    return " ".join(f"--{name} {value}" for name, value in options.items())


def _image_options(logits: int, cores: int) -> dict[str, int | str]:
    """The options of a run on images on a CPU, where an example has so many logits."""
    batch = _power_of_two(min(CPU_BATCH, CPU_IMAGE_LOGITS * cores // logits))
    every = CPU_IMAGE_STEPS // 10
    return {
        "network.size": "tiny",
        "batch": batch,
        "steps": CPU_IMAGE_STEPS,
        "optimizer.warmup": CPU_IMAGE_STEPS // 20,
        "validate-every": every,
        "save-every": every,
        "validation-samples": 64,
    }


def _cores() -> int:
    """The number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _options(vocab: int, tokens: dict[str, int], device: Any, cores: int) -> dict[str, int | str]:
    """The options of `m2s train owt` besides folders, in the order of the command."""
    from m2s.presets import PRESETS

    preset, gpu = PRESETS["owt"], device.type == "cuda"
    small = not gpu or tokens["train"] < GPU_TOKENS
    longest = min(preset.data.length if gpu else CPU_LENGTH, *tokens.values())
    length = 2 ** (longest.bit_length() - 1)
    batch = preset.run.batch
    if small:
        batch = _power_of_two(min(CPU_BATCH, CPU_LOGITS * (16 if gpu else cores) // (length * vocab)))
    limit = preset.run.steps if gpu else CPU_STEPS
    steps = max(200, min(limit, EPOCHS * tokens["train"] // (batch * length)))
    options: dict[str, int | str] = {"data.length": length}
    if small:
        options["network.size"] = "tiny"
    options |= {"batch": batch, "steps": steps, "optimizer.warmup": max(1, steps // 20)}
    every = max(1, min(preset.run.save_every, steps // 10))
    options |= {"validate-every": every, "save-every": every}
    if not gpu:
        options["validation-samples"] = 64
    return options


def _micro_batch(
    config: "Config", options: dict[str, int | str], device: Any, source: "Source | None" = None
) -> dict[str, int | str]:
    """The option --micro-batch, where all examples of a step at once would take too much of the memory."""
    from m2s.distributed import World
    from m2s.training.build import open_data
    from m2s.training.config import replace, resolve
    from m2s.training.estimate import estimate

    for name, value in options.items():
        config = replace(config, name.replace("-", "_"), value)
    found = estimate(resolve(config), source or open_data(config.data), World(0, 1, device))
    limit = float("inf") if found.available is None else MEMORY * found.available
    sizes = (size for size in range(found.examples, 0, -1) if found.examples % size == 0)
    size = next((size for size in sizes if found.of(size).total <= limit), 1)
    return {} if size == found.examples else {"micro-batch": size}


def _power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`, at least 1."""
    return 2 ** (max(1, number).bit_length() - 1)
