"""The fused kernels against the reference in training: 300 updates of the paper's text network on the same batches.

    m2s data prepare texts/ --out packed/
    python experiments/kernels.py out/kernels packed/

Three runs of the owt preset, its first 300 updates at 32 x 512 tokens: kernels fused, kernels reference, and the reference from
another seed. (Rounding errors grow with the learning rate, which the preset raises over 3,200 updates.)
At every update the loss of the fused run is compared with the reference's, and the other seed's with it: the first difference
must be, on average, below 1% of the second. Prints both and writes kernels.json into the folder. A run that was done before is
not done again. `--set A.B=C` (C as JSON) changes the runs, for a rehearsal on a small machine.
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

MOST = 0.01
RUNS = {"fused": ("fused", 0), "reference": ("reference", 0), "another seed": ("reference", 1)}


def configuration(data: Path, changes: list[str]) -> Config:
    config = PRESETS["owt"]
    settings = {
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
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="A.B=C", help="what to change of the runs")
    options = parser.parse_args()
    found = {}
    for name, (kernels, seed) in RUNS.items():
        config = replace(replace(configuration(options.data, options.set), "kernels", kernels), "seed", seed)
        folder = options.out / name.replace(" ", "-")
        train(replace(config, "out", folder))
        found[name] = losses(folder)
    pairs = {name: zip(found[name], found["reference"], strict=True) for name in ("fused", "another seed")}
    apart = {name: fmean(abs(a - b) for a, b in pair) for name, pair in pairs.items()}
    ratio = apart["fused"] / apart["another seed"]
    print(
        f"mean difference to the reference, nats a token: fused {apart['fused']:.3g}, another seed {apart['another seed']:.3g}"
    )
    print(f"ratio {ratio:.3g} (at most {MOST}), over {len(found['fused'])} updates")
    result = {
        "updates": len(found["fused"]),
        "mean_difference": apart,
        "ratio": ratio,
        "at_most": MOST,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "losses": found,
    }
    write_json(options.out / "kernels.json", result)
    return ratio < MOST


if __name__ == "__main__":
    sys.exit(not main())
