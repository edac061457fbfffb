"""How a sampler turns noise into images: a film strip (.png, .pdf, .svg), an animation (.gif) or a page (.html)."""

import base64
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from jinja2 import Template
from torch import Tensor, nn

from m2s.heads import Head
from m2s.io import atomic_write, output_file
from m2s.report.style import SUFFIXES
from m2s.samplers import Trajectory, sample

MASK_COLOR = (0.27, 0.45, 0.77)
MOVING = (".gif", ".html")
GRID, FRAMES = 4, 33  # of an animation: images in a row, and states
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>From noise to data</title>
<style>
:root { color-scheme: light dark; font-family: system-ui, sans-serif; }
body { max-width: {{ width }}px; margin: 1rem auto; padding: 0 1rem; }
img { width: 100%; image-rendering: pixelated; } input { width: 100%; }
</style></head><body>
<img id="picture" src="{{ sources[-1] }}" alt="samples of the model">
<input id="step" type="range" min="0" max="{{ last }}" value="{{ last }}" aria-label="step">
<p id="label">{{ labels[-1] }}</p>
<script>
const sources = {{ sources | tojson }}, labels = {{ labels | tojson }};
document.getElementById("step").addEventListener("input", event => {
  document.getElementById("picture").src = sources[event.target.value];
  document.getElementById("label").textContent = labels[event.target.value];
});
</script></body></html>
"""
SIDE = 384  # pixels of an animation, at least
MILLISECONDS, PAUSE = 80, 1500  # for each state, and for the last one


def film_frames(
    model: nn.Module, head: Head, length: int, rows: int, columns: int, steps: int, sampler: str, seed: int | None
) -> tuple[list[float], Int[Tensor, "columns rows L"]]:
    """Draw samples and return their states at evenly spaced steps.

    Args:
        model: The network.
        head: Its head.
        length: Positions of a sample, L.
        rows: Number of samples.
        columns: Number of states of each.
        steps: Steps of the sampler.
        sampler: Its name.
        seed: Its seed; None: drawn from torch's generator.

    Returns:
        The fractions of the steps taken, in [0, 1], and the [columns, rows, L] states. A masked position is state K.
    """
    trajectory = Trajectory()
    sample(model, head, (rows, length), steps=steps, sampler=sampler, seed=seed, callback=trajectory)
    last = len(trajectory.states) - 1
    chosen = np.linspace(0, last, columns).round().astype(int)
    return [float(i) / last for i in chosen], trajectory.states[torch.from_numpy(chosen)]


def write_film(
    path: Path,
    model: nn.Module,
    head: Head,
    shape: tuple[int, ...],
    levels: int,
    rows: int = 5,
    columns: int = 9,
    steps: int = 64,
    sampler: str = "auto",
    seed: int | None = None,
) -> None:
    """Draw samples of images and write their states at evenly spaced steps. Masked positions are blue.

    Args:
        path: The file. .png, .pdf and .svg have a row for each sample and a column for each state. A .gif shows all samples
            at one state after another; an .html does so with a slider, and needs no other file.
        model: The network.
        head: Its head.
        shape: Height, width and channels of an image.
        levels: Number of levels of a pixel.
        rows: Number of samples.
        columns: Number of states of each.
        steps: Steps of the sampler.
        sampler: Its name.
        seed: Its seed; None: drawn from torch's generator.

    Raises:
        UserError: `path` cannot be written.
    """
    path = output_file(path, (*SUFFIXES, *MOVING))
    if path.suffix in MOVING:
        _write_moving(
            path, *film_frames(model, head, int(np.prod(shape)), GRID**2, FRAMES, steps, sampler, seed), shape, levels
        )
        return
    import matplotlib.pyplot as plt  # slow to import, and only films need it

    fractions, states = film_frames(model, head, int(np.prod(shape)), rows, columns, steps, sampler, seed)
    figure, axes = plt.subplots(rows, columns, figsize=(columns, rows + 0.3), squeeze=False)
    for column, fraction in enumerate(fractions):
        axes[0, column].set_title(f"{fraction:.0%}", fontsize=9)
        for row in range(rows):
            axes[row, column].imshow(rgb_image(states[column, row], shape, levels))
    for axis in axes.flat:
        axis.set_axis_off()
    figure.suptitle("Share of the steps taken", fontsize=9, y=0.995)
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=1 - 0.5 / (rows + 0.3), wspace=0.06, hspace=0.06)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=150)
    plt.close(figure)


def rgb_image(tokens: Int[Tensor, "L"], shape: tuple[int, ...], levels: int) -> np.ndarray:
    """Return one image in RGB, with masked positions in blue.

    Args:
        tokens: [L] tokens; those from `levels` on are masks.
        shape: Height, width and channels.
        levels: Number of levels of a pixel.

    Returns:
        [H, W, 3] values in [0, 1].
    """
    height, width = shape[:2]
    image = tokens.numpy().reshape(height, width, -1)
    masked = (image >= levels).any(-1, keepdims=True)
    colors = np.broadcast_to(np.minimum(image, levels - 1) / (levels - 1), (height, width, 3))
    return np.where(masked, np.array(MASK_COLOR), colors)


def image_grid(states: Int[Tensor, "n L"], shape: tuple[int, ...], levels: int) -> np.ndarray:
    """Return a square of images with one white pixel between them.

    Args:
        states: n tokens of images, [n, L], n a square number.
        shape: Height, width and channels of an image.
        levels: Number of levels of a pixel.

    Returns:
        [H, W, 3] values 0..255, enlarged by a whole number.
    """
    height, width = shape[:2]
    side = math.isqrt(len(states))
    picture = np.ones((side * (height + 1) - 1, side * (width + 1) - 1, 3))
    for number, tokens in enumerate(states):
        top, left = number // side * (height + 1), number % side * (width + 1)
        picture[top : top + height, left : left + width] = rgb_image(tokens, shape, levels)
    factor = max(1, -(-SIDE // max(picture.shape[:2])))
    return np.rint(255 * picture).astype(np.uint8).repeat(factor, 0).repeat(factor, 1)


def _write_moving(
    path: Path, fractions: list[float], states: Int[Tensor, "M n L"], shape: tuple[int, ...], levels: int
) -> None:
    """Write an animation or a page with a slider."""
    from PIL import Image  # matplotlib requires it; only films need it

    pictures = [Image.fromarray(image_grid(each, shape, levels)) for each in states]
    with atomic_write(path) as temporary:
        if path.suffix == ".gif":
            times = [MILLISECONDS] * (len(pictures) - 1) + [PAUSE]
            options = {"save_all": True, "append_images": pictures[1:], "duration": times, "loop": 0}
            pictures[0].save(temporary, format="GIF", **options)
        else:
            temporary.write_text(_page(pictures, fractions), encoding="utf-8")


def _page(pictures: list[Any], fractions: list[float]) -> str:
    """A page with all states and a slider. It loads nothing from elsewhere."""
    sources = []
    for picture in pictures:
        memory = io.BytesIO()
        picture.save(memory, format="PNG")
        sources.append("data:image/png;base64," + base64.b64encode(memory.getvalue()).decode())
    labels = [f"{fraction:.0%} of the steps" for fraction in fractions]
    template = Template(PAGE, autoescape=True)
    return template.render(sources=sources, labels=labels, last=len(sources) - 1, width=pictures[0].width)
