"""A training step of a preset's network on a GPU: `m2s train` against a plain eager loop over the same network.

    python benchmarks/train.py --network cifar10 --batch 128

The plain loop has autocast to bf16, the direct form of score entropy, clipping, AdamW and an average of the weights. Nothing in
it is compiled. MFU is 6 parameters (without the embedding table) + 12 depth width length operations per token, over the rate of
a bf16 matrix product in the same run. Writes benchmarks/results/train-NETWORK.json. It is a script, and not a part of
`m2s benchmark`, because it trains the networks of all presets and writes profiles.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # runs from a checkout that is not installed

from m2s.benchmark.comparison import Comparison
from m2s.benchmark.direct_loss import direct_score_entropy
from m2s.benchmark.format import format_bar, format_part
from m2s.benchmark.setting import Setting
from m2s.benchmark.train import MakeStep, RandomTokens, Step, matrix_rate, operations_per_token, time_training, trainer
from m2s.data import batch_indices
from m2s.distributed import World
from m2s.io import write_json
from m2s.presets import PRESETS
from m2s.provenance import provenance
from m2s.training import Config, resolve
from m2s.training.build import make_objects
from m2s.training.config import replace

RESULTS = Path(__file__).parent / "results"
MIN_SPEEDUP, MIN_MEMORY = 2.6, 2.0
PROFILED_STEPS = 3
DATA = {"owt": (50_257, 512, None), "cifar10": (256, 3072, (32, 32, 3)), "mnist": (256, 784, (28, 28))}


def plain_loop(config: Config, source: RandomTokens) -> tuple[Step, torch.nn.Module]:
    """Set up training as a short script does it.

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


def configuration(options: argparse.Namespace) -> Config:
    """Return a preset's configuration with the paper's head, the one of the recorded results.

    Args:
        options: The options of the command line.

    Returns:
        The resolved configuration of the preset, with the options.
    """
    config = resolve(replace(PRESETS[options.network], "method", "m2s"))
    settings = {"batch": options.batch, "micro_batch": None, "device": options.device, "compile": options.compile}
    settings |= {key: int(value) for key, value in (pair.split("=") for pair in options.set)}
    for key, value in settings.items():
        config = replace(config, key, value)
    return config


def write_profile(step: Step, path: Path) -> None:
    """Write the time of three training steps by kernel.

    Args:
        step: Takes one training step.
        path: The text file.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(PROFILED_STEPS):
            step()
    table = profile.key_averages().table(sort_by="self_device_time_total", row_limit=45, max_name_column_width=90)
    path.write_text(table)


def summarize(comparison: Comparison, models: dict[str, torch.nn.Module], options: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers of the result file.

    Args:
        comparison: The measured times and memory.
        models: The networks by form.
        options: The options of the command line.

    Returns:
        Times, memory, tokens per second, ratios where both forms ran, and MFU for the owt network.
    """
    length = DATA[options.network][1]
    median, peak = ({variant: one[key] for variant, one in comparison.results.items()} for key in ("median_ms", "peak_gib"))
    tokens = {variant: options.batch * length / ms * 1e3 for variant, ms in median.items()}
    numbers: dict[str, Any] = {
        "what": f"one training step of the {options.network} preset's network, {options.batch} x {length} tokens",
        "median_ms": median,
        "peak_gib": peak,
        "tokens_per_second": tokens,
        "rows_per_second": {variant: value / length for variant, value in tokens.items()},
        "times_faster": comparison.ratio("plain", "m2s"),
        "times_less_memory": comparison.memory_ratio("plain", "m2s"),
    }
    if options.network == "owt":
        device = comparison.setting.device
        operations = operations_per_token(next(iter(models.values())), length)
        rate = matrix_rate(device, 8192 if device.type == "cuda" else 512)
        numbers |= {"operations_a_token": operations, "matrix_rate": rate}
        numbers["mfu"] = {variant: value * operations / rate for variant, value in tokens.items()}
        for variant, one in comparison.results.items():
            one |= {"tokens_per_second": tokens[variant], "mfu": numbers["mfu"][variant]}
    return numbers


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=DATA, default="owt", help="the preset whose network is trained")
    parser.add_argument("--batch", type=int, default=32, help="examples of a training step")
    parser.add_argument("--repeats", type=int, default=30, help="timed steps of each form")
    parser.add_argument("--rounds", type=int, default=2, help="rounds in which both forms take their steps alternately")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--compile", default="auto", help="as of m2s train")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--set", nargs="*", default=[], metavar="A.B=N", help="numbers of the preset to change")
    parser.add_argument("--measure", choices=FORMS, help="only this form; no result file is written")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="with --measure: write the time of each kernel")
    options = parser.parse_args()
    if options.profile and not options.measure:
        parser.error("--profile needs --measure, the form to profile")
    return options


def main() -> int:
    """Measure, print and write the results; return 1 where a bar was missed."""
    options = parse()
    torch.manual_seed(options.seed)
    config, source = configuration(options), RandomTokens(*DATA[options.network])
    device = World.start(config.run.device).device
    setting = Setting.of(device, False, repeats=options.repeats, seed=options.seed)
    comparison = Comparison(setting)
    makers: dict[str, MakeStep] = {
        variant: partial(make, config, source) for variant, make in FORMS.items() if options.measure in (None, variant)
    }
    models, clock = time_training(comparison, makers, options.rounds)
    numbers = summarize(comparison, models, options)
    judged = options.network == "owt" and device.type == "cuda" and not options.measure
    bars = [
        comparison.bar("times faster than the plain loop", numbers["times_faster"], at_least=MIN_SPEEDUP, judged=judged),
        comparison.bar("times less peak memory", numbers["times_less_memory"], at_least=MIN_MEMORY, judged=judged),
    ]
    print(format_part(comparison.result(numbers["what"], {"plain / m2s": comparison.ratio("plain", "m2s")}, [])))
    if options.measure:
        if options.profile:
            step, _ = makers[options.measure]()
            for _ in range(options.repeats):
                step()
            write_profile(step, options.profile)
        return 0
    print("\n".join(f"  {format_bar(bar)}" for bar in bars))
    result = {**provenance(device), "repeats": options.repeats, **numbers, "clock": clock}
    write_json(RESULTS / f"train-{options.network}.json", result)
    return int(any(bar["met"] is False for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
