"""Train every method on digits, and draw the pictures of docs/methods.md.

    python experiments/gallery.py out/gallery [NAME ...]

For each method: 400 training steps (`m2s train digits`), the NELBO on the held-out images (`m2s evaluate bpd`), and 24 samples
in 64 steps of its sampler (`m2s sample`). It takes under a minute for each method on an idle core. Finished parts are skipped.
With names it runs these methods only. The script writes docs/gallery/NAME.png for each method, held-out images as
docs/gallery/data.png, and experiments/results/gallery.json. Then `python -m m2s.methods.docs_page > docs/methods.md` writes the
page.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from matplotlib.image import imsave

import m2s
from m2s.cli import main as command
from m2s.io import atomic_write, write_json
from m2s.methods import METHODS
from m2s.provenance import provenance

ROOT = Path(__file__).parents[1]
RESULTS, PICTURES = ROOT / "experiments" / "results" / "gallery.json", ROOT / "docs" / "gallery"
TRAINING_STEPS, SAMPLES, STEPS, PASSES, SEED = 400, 24, 64, 8, 1
COLUMNS, SCALE, GAP, LEVELS = 12, 4, 2, 17


def sprites(tokens: Int[np.ndarray, "n L"]) -> Float[np.ndarray, "H W 4"]:
    """Arrange 8 x 8 images in lines, each pixel as a square, with transparent lines between them.

    Args:
        tokens: The images, with levels 0..16.

    Returns:
        Red, green, blue and opacity of each pixel.
    """
    images = tokens.reshape(-1, COLUMNS, 8, 8) / (LEVELS - 1)
    images = np.stack([images, images, images, np.ones_like(images)], -1)
    images = images.repeat(SCALE, 2).repeat(SCALE, 3)
    images = np.pad(images, ((0, 0), (0, 0), (0, GAP), (0, GAP), (0, 0)))
    rows, columns, height, width, _ = images.shape
    return images.transpose(0, 2, 1, 3, 4).reshape(rows * height, columns * width, 4)[:-GAP, :-GAP]


def draw(name: str, tokens: Int[np.ndarray, "n L"]) -> None:
    """Write docs/gallery/NAME.png.

    Args:
        name: The method.
        tokens: Its samples.
    """
    PICTURES.mkdir(exist_ok=True)
    with atomic_write(PICTURES / f"{name}.png") as temporary:
        imsave(temporary, sprites(tokens), format="png", metadata={"Software": None})


def measure(name: str, out: Path) -> dict[str, object]:
    """Train, evaluate and sample a method, draw its picture, and return its row.

    Args:
        name: The method.
        out: Folder of all methods.
    """
    run, nelbo, samples = (out / name / part for part in ("run", "bpd.json", "samples.npz"))
    sampler = METHODS[name].sampler
    options = ["--steps", str(TRAINING_STEPS), "--seed", str(SEED), "--validate-every", "0"]
    command(["train", "digits", "--method", name, *options, "--out", str(run)])
    if not nelbo.exists():
        command(["evaluate", "bpd", str(run), "--passes", str(PASSES), "--out", str(nelbo)])
    if not samples.exists():
        drawn = ["--n", str(SAMPLES), "--steps", str(STEPS), "--sampler", sampler, "--micro-batch", str(SAMPLES)]
        command(["sample", str(run), *drawn, "--out", str(samples)])
    with np.load(samples) as file:
        draw(name, file["tokens"])
    bits = json.loads(nelbo.read_text())["nelbo"]["bits"]
    parameters = sum(weight.numel() for weight in m2s.load(run).model.parameters())
    return {"method": name, "bits": bits["value"], "error": bits["error"], "sampler": sampler, "parameters": parameters}


def main(out: Path, names: list[str]) -> None:
    """Compute some methods, and write gallery.json. Rows of other methods stay.

    Args:
        out: Folder of all methods.
        names: The methods; none: all of them.
    """
    draw("data", m2s.data.load("digits").test[:SAMPLES].numpy())
    rows = {row["method"]: row for row in json.loads(RESULTS.read_text())["rows"]} if names and RESULTS.exists() else {}
    for name in names or METHODS:
        rows[name] = measure(name, out)
        print(f"{name:16s} {rows[name]['bits']:.4f} bits per pixel", flush=True)
        settings = {"training_steps": TRAINING_STEPS, "samples": SAMPLES, "steps": STEPS, "passes": PASSES, "seed": SEED}
        settings["threads"] = torch.get_num_threads()
        found = [rows[method] for method in METHODS if method in rows]
        write_json(RESULTS, {**provenance("cpu"), "settings": settings, "rows": found})


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python experiments/gallery.py FOLDER [NAME ...]")
    main(Path(sys.argv[1]), sys.argv[2:])
