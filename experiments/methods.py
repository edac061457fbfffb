"""Compare all methods on digits: NELBO with standard error, distance of samples from the data, sampling speed.

    python experiments/methods.py out/methods [NAME ...]

For each method: 1,000 training steps (`m2s train digits`), the NELBO on the held-out images (`m2s evaluate bpd`), and 512
samples in 64 steps of its sampler (`m2s sample`). The distance is the Frechet distance between Gaussians fitted to the pixels
of the samples and of the training images. The same distance for the 256 held-out images is the reference. Finished parts are
skipped. The script prints a table and writes methods.json into the folder. With names it runs these methods only, and
replaces their rows in an existing methods.json, with their provenance.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import m2s
from m2s.cli import main as command
from m2s.evaluation.earlier_names import with_current_names
from m2s.evaluation.fid import Statistics, frechet
from m2s.io import write_json
from m2s.methods import METHODS
from m2s.provenance import provenance

SAMPLES, STEPS, PASSES, SEED = 512, 64, 16, 1


def statistics(tokens: Tensor) -> Statistics:
    """Return mean and covariance of the pixels, scaled to [0, 1].

    Args:
        tokens: Images [N, L] with levels 0..16.
    """
    found = Statistics.empty(tokens.shape[1])
    found.update(tokens.double() / 16)
    return found


def measure(name: str, out: Path) -> dict[str, object]:
    """Train, evaluate and sample a method, and return its row.

    Args:
        name: The method.
        out: Folder of all methods.
    """
    run, nelbo, samples, speed = (out / name / part for part in ("run", "bpd.json", "samples.npz", "speed.json"))
    method = METHODS[name]
    command(["train", "digits", "--method", name, "--seed", str(SEED), "--out", str(run)])
    if not nelbo.exists():
        command(["evaluate", "bpd", str(run), "--passes", str(PASSES), "--out", str(nelbo)])
    if not samples.exists() or not speed.exists():
        start = time.monotonic()
        options = ["--n", str(SAMPLES), "--steps", str(STEPS), "--sampler", method.sampler, "--batch-size", "256"]
        command(["sample", str(run), *options, "--overwrite", "--out", str(samples)])
        write_json(speed, {"samples_per_second": SAMPLES / (time.monotonic() - start)})
    drawn = torch.from_numpy(np.load(samples)["tokens"])
    bits = with_current_names(json.loads(nelbo.read_text()))["nelbo"]["bits"]
    return {
        "method": name,
        "bits": bits["value"],
        "error": bits["error"],
        "sampler": method.sampler,
        "distance": frechet(statistics(drawn), statistics(m2s.data.load("digits").train)),
        **json.loads(speed.read_text()),
    }


def replace_rows(out: Path, names: list[str]) -> None:
    """Compute some methods, and replace their rows in an existing methods.json.

    Args:
        out: Folder of all methods.
        names: The methods.
    """
    rows, path = {name: measure(name, out) for name in names}, out / "methods.json"
    if path.exists():
        found = json.loads(path.read_text())
        made = {**provenance("cpu"), "threads": torch.get_num_threads()}
        rows = {row["method"]: row for row in found["rows"]} | {name: {**row, "made": made} for name, row in rows.items()}
        found["rows"] = [rows[name] for name in METHODS if name in rows]
        write_json(path, found)


def main(out: Path) -> None:
    """Compute all methods, print the table and write methods.json.

    Args:
        out: Folder of all methods.
    """
    rows = [measure(name, out) for name in METHODS]
    data = m2s.data.load("digits")
    held_out = frechet(statistics(data.test), statistics(data.train))
    print(f"{'method':16s} {'bits per pixel':>18s} {'distance':>9s} {'samples/s':>9s}")
    for row in rows:
        bits = f"{row['bits']:.4f}" + ("" if row["error"] is None else f" ± {row['error']:.4f}")
        print(f"{row['method']:16s} {bits:>18s} {row['distance']:9.4f} {row['samples_per_second']:9.1f}")
    print(f"{'held-out images':16s} {'':18s} {held_out:9.4f}")
    settings = {"samples": SAMPLES, "steps": STEPS, "passes": PASSES, "seed": SEED, "threads": torch.get_num_threads()}
    write_json(out / "methods.json", {**provenance("cpu"), "settings": settings, "rows": rows, "held_out_distance": held_out})


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python experiments/methods.py FOLDER [NAME ...]")
    if names := sys.argv[2:]:
        replace_rows(Path(sys.argv[1]), names)
    else:
        main(Path(sys.argv[1]))
