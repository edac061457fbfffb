"""A whole update of the weights on a GPU: the trainer against a plain eager loop over the same network.

The plain loop has autocast to bf16, the loss that builds s, r and h, clipping, AdamW and an average of the weights, nothing
compiled. The trainer is `m2s.training` as it runs by default. Each form runs in a process of its own. MFU is 6 x parameters
(without the embedding table) + 12 x depth x width x length operations a token, over the rate of a bf16 product of two matrices
measured in the same run.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import common
from loss import direct

from m2s.benchmark.comparison import synchronize
from m2s.benchmark.train import Random, matrix_rate, operations_a_token, trainer
from m2s.data import batch_indices
from m2s.distributed import World
from m2s.presets import PRESETS
from m2s.training import Config, resolve
from m2s.training.build import make_objects
from m2s.training.config import replace

LEAST_SPEED, LEAST_MEMORY = 2.6, 2.0
FORMS = ("plain", "m2s")
DATA = {"owt": (50_257, 512, None), "cifar10": (256, 3072, (32, 32, 3)), "mnist": (256, 784, (28, 28))}


def plain(config: Config, source: Random) -> tuple[Callable[[], float], torch.nn.Module]:
    """One update as a short script does it."""
    device = World.start(config.run.device).device
    model, _, _ = make_objects(config, source)
    model = model.to(device).train()
    average = [weight.detach().clone() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr)
    step = 0

    def update() -> float:
        nonlocal step
        x_0 = source.train(batch_indices(source.size, config.run.batch, step, 0)).x_0.to(device).long()
        t = torch.rand(len(x_0), device=device) * (1 - 2 * config.run.t_min) + config.run.t_min
        x_t = torch.where(torch.rand(x_0.shape, device=device) < t[:, None], torch.randint_like(x_0, source.vocab), x_0)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(x_t, t)
        loss = direct(logits[..., : source.vocab].float(), x_0, x_t, t).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average, model.parameters(), strict=True):
                mean.lerp_(weight, 1 - config.optimizer.ema)
        step += 1
        return loss.item()

    return update, model


def setting(options: argparse.Namespace) -> Config:
    config = resolve(PRESETS[options.network])
    for key, value in {
        "batch": options.batch,
        "micro_batch": None,
        "device": options.device,
        "compile": options.compile,
    }.items():
        config = replace(config, key, value)
    for key, value in (pair.split("=") for pair in options.set):
        config = replace(config, key, int(value))
    return config


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of updates, and the peak of the memory in use by tensors from the start."""
    torch.manual_seed(options.seed)
    config, source = setting(options), Random(*DATA[options.network])
    start = time.perf_counter()
    update, model = {"plain": plain, "m2s": trainer}[options.measure](config, source)
    device = next(model.parameters()).device
    losses = [update() for _ in range(options.warmup)]
    warm = time.perf_counter() - start
    times = []
    for _ in range(options.repeats):
        synchronize(device)
        start = time.perf_counter()
        losses.append(update())
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    if options.profile:
        profile(update, options.profile)
    found = {"ms": times, "peak_gib": peak, "start_s": warm, "losses": losses[:3]}
    if options.network == "owt":
        found["operations_a_token"] = operations_a_token(model, source.length)
        found["matrix_rate"] = matrix_rate(device, 8192 if device.type == "cuda" else 512)
    return found


def profile(update: Callable[[], float], path: str) -> None:
    """Where the time of three updates goes, by kernel."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(3):
            update()
    Path(path).write_text(seen.key_averages().table(sort_by="self_device_time_total", row_limit=45, max_name_column_width=90))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--network", choices=DATA, default="owt", help="the preset whose network is trained")
    parser.add_argument("--batch", type=int, default=32, help="rows of an update")
    parser.add_argument("--repeats", type=int, default=30, help="timed updates in each process")
    parser.add_argument("--warmup", type=int, default=5, help="updates before that")
    parser.add_argument("--rounds", type=int, default=2, help="processes started for each form, in turns")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", default="auto", help="as of m2s train")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="A.B=N", help="numbers of the preset to change")
    parser.add_argument("--measure", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--profile", default="", metavar="FILE", help="with --measure: write where the time goes")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options)))
        return 0
    runs = common.in_turns(__file__, FORMS, options.rounds)
    config, (_, length, _) = setting(options), DATA[options.network]
    times = {form: statistics.median(ms for run in runs[form] for ms in run["ms"]) for form in FORMS}
    memory = {form: max(run["peak_gib"] for run in runs[form]) for form in FORMS}
    tokens = {form: config.run.batch * length / times[form] * 1e3 for form in FORMS}
    results: dict[str, Any] = {
        "what": f"one update of the {options.network} preset's network, {options.batch} x {length} tokens",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "median_ms": times,
        "peak_gib": memory,
        "tokens_per_second": tokens,
        "rows_per_second": {form: value / length for form, value in tokens.items()},
        "start_s": {form: statistics.median(run["start_s"] for run in runs[form]) for form in FORMS},
        "times_faster": times["plain"] / times["m2s"],
        "times_less_memory": memory["plain"] / max(memory["m2s"], 1e-9),
    }
    if options.network == "owt":
        first = runs["m2s"][0]
        results["matrix_rate"] = max(run["matrix_rate"] for form in FORMS for run in runs[form])
        results["operations_a_token"] = first["operations_a_token"]
        results["mfu"] = {form: tokens[form] * first["operations_a_token"] / results["matrix_rate"] for form in FORMS}
    rows = [[form, f"{times[form]:.1f}", f"{tokens[form]:,.0f}", f"{memory[form]:.2f}"] for form in FORMS]
    print(results["what"])
    common.table(["", "median ms", "tokens/s", "peak GiB"], rows)
    if "mfu" in results:
        mine, theirs = (results["mfu"][form] for form in ("m2s", "plain"))
        print(f"MFU {mine:.1%} of {results['matrix_rate'] / 1e12:.0f} Tflop/s, plain {theirs:.1%}")
    common.save(f"train-{options.network}", options, results)
    if options.network != "owt":
        print(f"        times faster than the plain loop: {results['times_faster']:.2f}")
        return 0
    return common.verdict(
        [
            ("times faster than the plain eager loop", results["times_faster"], LEAST_SPEED),
            ("times less peak memory than the plain eager loop", results["times_less_memory"], LEAST_MEMORY),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
