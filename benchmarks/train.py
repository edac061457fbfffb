"""The part `plain-loop` of `m2s benchmark` for the network of a preset: `m2s train` against a plain eager loop.

    python benchmarks/train.py --network cifar10 --batch 128

`m2s.benchmark.plain_loop` describes the plain loop and makes the measurement. MFU is 6 parameters (without the embedding table)
+ 12 depth width length operations per token, over the rate of a bf16 matrix product in the same run. Writes
benchmarks/results/train-NETWORK.json. With --measure and --profile it writes the time of each kernel.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # runs from a checkout that is not installed

from m2s.benchmark import Setting
from m2s.benchmark.format import format_part
from m2s.benchmark.plain_loop import FORMS, ROUNDS, compare
from m2s.benchmark.train import RandomTokens, Step
from m2s.distributed import World
from m2s.io import write_json
from m2s.presets import PRESETS
from m2s.provenance import provenance
from m2s.training import Config, resolve
from m2s.training.config import replace

RESULTS = Path(__file__).parent / "results"
PROFILED_STEPS = 3
BY_FORM = ("median_ms", "peak_gib", "tokens_per_second")  # numbers of the result file for each form
DATA = {"owt": (50_257, 512, None), "cifar10": (256, 3072, (32, 32, 3)), "mnist": (256, 784, (28, 28))}


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


def summarize(part: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers of the result file.

    Args:
        part: The result of `compare`.
        options: The options of the command line.

    Returns:
        Times, memory, tokens per second, ratios, the clock, and MFU for the owt network, each by form.
    """
    length = DATA[options.network][1]
    found = {key: {name: one[key] for name, one in part["contenders"].items()} for key in (*BY_FORM, "mfu")}
    numbers: dict[str, Any] = {
        "what": f"one training step of the {options.network} preset's network, {options.batch} x {length} tokens",
        **{key: found[key] for key in BY_FORM},
        "rows_per_second": {name: value / length for name, value in found["tokens_per_second"].items()},
        "times_faster": part["bars"][0]["measured"],
        "times_less_memory": part["bars"][1]["measured"],
        "clock": part["clock"],
    }
    if part["operations_a_token"] is not None:
        numbers |= {key: part[key] for key in ("operations_a_token", "matrix_rate")} | {"mfu": found["mfu"]}
    return numbers


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=DATA, default="owt", help="the preset whose network is trained")
    parser.add_argument("--batch", type=int, default=32, help="examples of a training step")
    parser.add_argument("--repeats", type=int, default=30, help="timed steps of each form")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds in which both forms take their steps alternately")
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
    forms = [options.measure] if options.measure else list(FORMS)
    judged = options.network == "owt" and device.type == "cuda" and not options.measure
    part = compare(setting, config, source, forms, options.rounds, judged)
    print(format_part(part))
    if options.measure:
        if options.profile:
            step, _ = FORMS[options.measure](config, source)
            for _ in range(options.repeats):
                step()
            write_profile(step, options.profile)
        return 0
    result = {**provenance(device), "repeats": options.repeats, **summarize(part, options)}
    write_json(RESULTS / f"train-{options.network}.json", result)
    return int(any(bar["met"] is False for bar in part["bars"]))


if __name__ == "__main__":
    sys.exit(main())
