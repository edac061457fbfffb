"""The command to train on a prepared text, sized to the machine and to the number of tokens."""

import os
import shlex
from pathlib import Path
from typing import Any

EPOCHS = 10  # how often a run reads a small text
CPU_LENGTH, CPU_STEPS, CPU_BATCH = 128, 5_000, 32
CPU_LOGITS = 2**23  # logits of a step for each core: a step of the smallest network then takes seconds at most
GPU_TOKENS = 10_000_000  # with fewer tokens a GPU trains the small network, too
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

    tokens = {split: meta["splits"][split]["tokens"] for split in ("train", "validation")}
    folder, run = shlex.quote(str(out)), shlex.quote(f"runs/{out.resolve().name}")
    if not min(tokens.values()):
        return f"m2s evaluate bpd RUN --data {folder}"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = _options(meta["vocab"], tokens, device, _cores())
    options |= _micro_batch(out, options, device)
    words = " ".join(f"--{name} {value}" for name, value in options.items())
    return f"m2s train owt --data.folder {folder} {words} --out {run}"


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


def _micro_batch(out: Path, options: dict[str, int | str], device: Any) -> dict[str, int | str]:
    """The option --micro-batch, where all examples of a step at once would take too much of the memory."""
    from m2s.distributed import World
    from m2s.presets import PRESETS
    from m2s.training.build import open_data
    from m2s.training.config import replace, resolve
    from m2s.training.estimate import estimate

    config = replace(PRESETS["owt"], "data.folder", str(out))
    for name, value in options.items():
        config = replace(config, name.replace("-", "_"), value)
    found = estimate(resolve(config), open_data(config.data), World(0, 1, device))
    limit = float("inf") if found.available is None else MEMORY * found.available
    sizes = (size for size in range(found.examples, 0, -1) if found.examples % size == 0)
    size = next((size for size in sizes if found.of(size).total <= limit), 1)
    return {} if size == found.examples else {"micro-batch": size}


def _power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`, at least 1."""
    return 2 ** (max(1, number).bit_length() - 1)
