"""Compare training with fused kernels and with the reference: 300 steps of the paper's text network on the same batches.

    m2s data prepare texts/ --out packed/
    python experiments/kernels.py out/kernels packed/

The script runs the first 300 training steps of the owt preset at 32 x 512 tokens three times: with fused kernels, with the
reference, and with the reference and another seed. (Rounding errors grow with the learning rate, which the preset increases
over 3,200 steps.) The mean difference of the losses between fused and reference must be below 1% of that between the two
seeds. The script prints both and writes kernels.json into the folder. Finished runs are skipped. `--set A.B=C` (C as JSON)
changes settings, for a quick trial on a small machine.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

import torch

from m2s.io import write_json
from m2s.presets import PRESETS
from m2s.training import Config, train
from m2s.training.config import replace

MAX_RATIO = 0.01
RUNS = {"fused": ("fused", 0), "reference": ("reference", 0), "another seed": ("reference", 1)}


def configuration(data: Path, changes: list[str]) -> Config:
    """Return the configuration of the runs.

    Args:
        data: Folder of the prepared text.
        changes: Settings as "A.B=C".
    """
    config = PRESETS["owt"]
    settings = {
        "method": "m2s",
        "validation_samples": 64,
        "batch": 32,
        "steps": 300,
        "log_every": 1,
        "validate_every": 0,
        "save_every": 300,
    }
    given = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in changes)}
    for key, value in {**settings, "data.folder": str(data), **given}.items():
        config = replace(config, key, value)
    return config


def losses(folder: Path) -> list[float]:
    """Return the loss of every training step.

    Args:
        folder: Folder of the run.
    """
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def main() -> bool:
    """Train and compare the runs; return whether the ratio is below the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="A.B=C", help="change settings of the runs")
    options = parser.parse_args()
    found = {}
    for name, (kernels, seed) in RUNS.items():
        config = replace(replace(configuration(options.data, options.set), "kernels", kernels), "seed", seed)
        folder = options.out / name.replace(" ", "-")
        train(replace(config, "out", folder))
        found[name] = losses(folder)
    pairs = {name: zip(found[name], found["reference"], strict=True) for name in ("fused", "another seed")}
    difference = {name: fmean(abs(a - b) for a, b in pair) for name, pair in pairs.items()}
    ratio = difference["fused"] / difference["another seed"]
    print(
        f"mean difference to the reference in nats per token: fused {difference['fused']:.3g}, "
        f"another seed {difference['another seed']:.3g}"
    )
    print(f"ratio {ratio:.3g} (limit {MAX_RATIO}), over {len(found['fused'])} training steps")
    result = {
        "updates": len(found["fused"]),
        "mean_difference": difference,
        "ratio": ratio,
        "at_most": MAX_RATIO,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "losses": found,
    }
    write_json(options.out / "kernels.json", result)
    return ratio < MAX_RATIO


if __name__ == "__main__":
    sys.exit(not main())
