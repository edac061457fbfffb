"""Measure how importance sampling of t changes the variance of the gradient, at a network from `m2s train digits`.

    python experiments/importance.py runs/digits

Each density uses the same network, data and steps. The script prints the variance of the gradient of a batch, the median and
the maximum of its norm, and writes importance.json into the folder.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch

from m2s.distributed import World
from m2s.io import write_json
from m2s.presets import PRESETS
from m2s.training.build import load_weights, make_objects, open_data
from m2s.training.config import replace, resolve
from m2s.training.trainer import Trainer

STEPS = 60
DENSITIES = (None, 1.0, 0.3, 0.1, 0.03, 0.01)


def measure(run: Path) -> list[dict[str, float | None]]:
    """Return variance, squared mean, and median and maximum norm of the gradient for each density of t.

    Args:
        run: Folder of a training run.
    """
    record = json.loads((run / "train.json").read_text())["config"]
    config = dataclasses.replace(PRESETS["digits"], method=record["method"])
    for section, values in record.items():
        if isinstance(values, dict):
            for name, value in values.items():
                if name not in ("out", "multipliers"):
                    config = replace(config, f"{section}.{name}", value)
    rows = []
    for density in DENSITIES:
        changed = resolve(replace(config, "run.importance", density))
        source = open_data(changed.data)
        model, head, description = make_objects(changed, source)
        load_weights(model, description, str(run))
        trainer = Trainer(changed, source, World.start("cpu"), model, head, description)
        trainer.model.eval()
        gradients = []
        for step in range(STEPS):
            trainer.progress.step = step
            batch = trainer.local_batch(step)
            assert batch is not None
            trainer.gradient(batch)
            gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]))
        each = torch.stack(gradients)
        mean = each.mean(0)
        variance = float((each - mean).square().sum(1).mean() * STEPS / (STEPS - 1))
        signal = float(mean.square().sum()) - variance / STEPS  # unbiased for the square of the expected gradient
        norms = each.norm(dim=1)
        rows.append(
            {"importance": density, "variance": variance, "signal": signal, "median": float(norms.median())}
            | {"greatest": float(norms.max())}
        )
        name = "uniform" if density is None else f"{density:g}"
        print(
            f"{name:>8s}  variance {variance:12.4g}  median norm {norms.median():8.3g}  maximum {norms.max():8.3g}", flush=True
        )
    return rows


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "train.json").is_file():
        sys.exit("usage: python experiments/importance.py RUN, where RUN is a folder of m2s train, such as runs/digits")
    torch.set_num_threads(1)
    write_json(Path(sys.argv[1]) / "importance.json", measure(Path(sys.argv[1])))
