"""The animated picture of the home page: M2S and SEDD turn the same noise into digits.

    python scripts/docs_site/denoising_picture.py     # writes docs/assets/denoising.svg and denoising-dark.svg

Both networks ship with m2s. They have the same size, and were trained on the same batches for the same number of steps.
"""

import base64
import io
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

import m2s

FOLDER = Path(__file__).parents[2] / "docs" / "assets"
MODELS = {"M2S": "builtin:digits-m2s-offset", "SEDD": "builtin:digits-sedd"}
COUNT, STEPS, SEED = 10, 16, 0
SIDE, GAP, CELL = 8, 1, 6  # pixels of a digit, between digits, and of the screen for one of them
FRAME, LAST = 0.22, 2.4  # seconds of a frame, and of the last one
TOP, ROW, BAR = 22, 78, 14
LABEL = "Animation: M2S and SEDD turn the same noise into ten digits each"
# The color of the paper, of the ink, of letters, and of the bar.
THEMES = {
    "denoising": ((246, 246, 251), (32, 38, 104), "#3b3f5c", "#3d47a8"),
    "denoising-dark": ((38, 42, 62), (234, 236, 255), "#c9cce6", "#a3adff"),
}


def trajectories() -> dict[str, Tensor]:
    """Return the states of each model, [frames, count, 64]; both begin with the same noise."""
    found = {}
    for name, weights in MODELS.items():
        states = m2s.Trajectory()
        model, head = m2s.load(weights)
        sampler = "analytic" if name == "SEDD" else "bayes"
        m2s.sample(model, head, (COUNT, 64), steps=STEPS, sampler=sampler, grid="linear", seed=SEED, callback=states)
        found[name] = states.states
    frames = max(map(len, found.values()))  # the last step of SEDD's sampler, which removes all noise, is one more
    return {name: torch.cat([tokens, tokens[-1:].expand(frames - len(tokens), -1, -1)]) for name, tokens in found.items()}


def picture(digits: Tensor, paper: tuple[int, int, int], ink: tuple[int, int, int]) -> str:
    """Return a row of digits as a PNG in base64.

    Args:
        digits: The tokens, [count, 64].
        paper: The color of level 0.
        ink: The color of level 16.
    """
    colors = [tuple(round(p + (i - p) * level / 16) for p, i in zip(paper, ink, strict=True)) for level in range(17)]
    image = Image.new("P", (len(digits) * (SIDE + GAP) - GAP, SIDE), 17)
    image.putpalette([channel for color in [*colors, (0, 0, 0)] for channel in color])
    for number, digit in enumerate(digits.to(torch.uint8)):
        image.paste(Image.frombytes("P", (SIDE, SIDE), bytes(digit.tolist())), (number * (SIDE + GAP), 0))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=17, bits=8)
    return base64.b64encode(buffer.getvalue()).decode()


def drawing(states: dict[str, Tensor], theme: str) -> str:
    """Return the animated SVG.

    Args:
        states: The states of each model, by its name.
        theme: A key of `THEMES`.
    """
    paper, ink, letters, accent = THEMES[theme]
    width = (COUNT * (SIDE + GAP) - GAP) * CELL
    height = 2 * ROW + BAR + 18
    last = len(next(iter(states.values()))) - 1
    duration = last * FRAME + LAST
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{LABEL}">',
        "<style>",
        f"text{{font:600 13px system-ui,sans-serif;fill:{letters}}}.small{{font-weight:400;font-size:11px}}",
        f"image{{image-rendering:pixelated;opacity:0;animation:{duration:.2f}s step-end infinite}}",
    ]
    for frame in range(last + 1):
        begin, end = (100 * seconds / duration for seconds in (frame * FRAME, (frame + 1) * FRAME))
        after = f"{end:.2f}%,100%{{opacity:0}}" if frame < last else ""
        before = "0%{opacity:0}" if frame else ""
        parts.append(f"@keyframes f{frame}{{{before}{begin:.2f}%{{opacity:1}}{after}}}.f{frame}{{animation-name:f{frame}}}")
    done = 100 * last * FRAME / duration
    parts += [
        f"@keyframes bar{{0%{{transform:scaleX(0)}}{done:.2f}%,100%{{transform:scaleX(1)}}}}",
        f".bar{{animation:bar {duration:.2f}s linear infinite}}",
        f"@media (prefers-reduced-motion:reduce){{image,.bar{{animation:none}}.f{last}{{opacity:1}}}}",
        "</style>",
    ]
    for row, (name, tokens) in enumerate(states.items()):
        y = row * ROW
        parts.append(f'<text x="0" y="{y + 14}">{name}</text>')
        for frame, digits in enumerate(tokens):
            place = f'y="{y + TOP}" width="{width}" height="{SIDE * CELL}"'
            parts.append(f'<image class="f{frame}" {place} href="data:image/png;base64,{picture(digits, paper, ink)}"/>')
    y = 2 * ROW + 2
    parts += [
        f'<rect y="{y}" width="{width}" height="4" rx="2" fill="{letters}" opacity=".18"/>',
        f'<rect class="bar" y="{y}" width="{width}" height="4" rx="2" fill="{accent}"/>',
        f'<text class="small" x="0" y="{y + 20}">noise</text>',
        f'<text class="small" x="{width}" y="{y + 20}" text-anchor="end">{STEPS} sampling steps</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the pictures of both themes."""
    states = trajectories()
    for theme in THEMES:
        (FOLDER / f"{theme}.svg").write_text(drawing(states, theme))


if __name__ == "__main__":
    main()
