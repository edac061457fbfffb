"""How a sampler turns noise into images: a film strip (.png, .pdf, .svg), an animation (.gif) or a page (.html)."""

import base64
import io
import math
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from m2s.heads import Head
from m2s.io import atomic_write, output_file
from m2s.report.page import content_security_policy, template_environment
from m2s.report.style import SUFFIXES
from m2s.samplers import Trajectory, sample

MASK_COLOR = (0.27, 0.45, 0.77)
MOVING = (".gif", ".html")
GRID, FRAMES = 4, 33  # of an animation: images in a row, and states
TITLE = "From noise to data"
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
        fractions, states = film_frames(model, head, int(np.prod(shape)), GRID**2, FRAMES, steps, sampler, seed)
        with atomic_write(path) as temporary:
            if path.suffix == ".gif":
                _write_gif(temporary, [image_grid(each, shape, levels) for each in states])
            else:
                pictures = [image_grid(each, shape, levels, transparent=True) for each in states]
                masked = head.process.mask is not None
                temporary.write_text(_page(pictures, fractions, masked), encoding="utf-8")
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


def image_grid(states: Int[Tensor, "n L"], shape: tuple[int, ...], levels: int, transparent: bool = False) -> np.ndarray:
    """Return a square of images with a line of one pixel between them.

    Args:
        states: n tokens of images, [n, L], n a square number.
        shape: Height, width and channels of an image.
        levels: Number of levels of a pixel.
        transparent: The line is transparent, and the result has a fourth channel; otherwise it is white.

    Returns:
        [H, W, 3] or [H, W, 4] values 0..255, enlarged by a whole number.
    """
    height, width = shape[:2]
    side = math.isqrt(len(states))
    picture = np.ones((side * (height + 1) - 1, side * (width + 1) - 1, 4))
    picture[..., 3] = 0
    for number, tokens in enumerate(states):
        top, left = number // side * (height + 1), number % side * (width + 1)
        picture[top : top + height, left : left + width, :3] = rgb_image(tokens, shape, levels)
        picture[top : top + height, left : left + width, 3] = 1
    factor = max(1, -(-SIDE // max(picture.shape[:2])))
    chosen = picture if transparent else picture[..., :3]
    return np.rint(255 * chosen).astype(np.uint8).repeat(factor, 0).repeat(factor, 1)


def _write_gif(path: Path, pictures: list[np.ndarray]) -> None:
    """Write an animation."""
    from PIL import Image  # matplotlib requires it; only films need it

    first, *others = (Image.fromarray(picture) for picture in pictures)
    times = [MILLISECONDS] * len(others) + [PAUSE]
    first.save(path, format="GIF", save_all=True, append_images=others, duration=times, loop=0)


def _page(pictures: list[np.ndarray], fractions: list[float], masked: bool) -> str:
    """A page with all states, a slider and a button. It loads nothing from elsewhere."""
    from PIL import Image  # matplotlib requires it; only films need it

    sources = []
    for picture in pictures:
        memory = io.BytesIO()
        Image.fromarray(picture).save(memory, format="PNG")
        sources.append("data:image/png;base64," + base64.b64encode(memory.getvalue()).decode())
    labels = [f"{fraction:.0%}" for fraction in fractions]
    environment = template_environment()
    shown = {"sources": sources, "labels": labels}
    script = environment.get_template("film.js.jinja").render(shown, milliseconds=MILLISECONDS)
    facts = {"title": TITLE, "count": GRID**2, "masked": masked}
    return environment.get_template("film.html.jinja").render(
        shown, **facts, script=script, policy=content_security_policy(script)
    )
