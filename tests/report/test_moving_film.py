"""`m2s figure film` as an animation (.gif) and as a page with a slider (.html)."""

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import m2s
import m2s.hub
from m2s.cli import main
from m2s.models import DiT, DiTConfig
from m2s.report.film_strip import FRAMES, MASK_COLOR, film_frames, image_grid


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = DiT(DiTConfig(states=4, width=16, depth=1, heads=2, condition_width=8, length=6))
    head = m2s.Posterior(m2s.Absorbing(3, m2s.Linear()))
    return m2s.hub.save(tmp_path / "run", model, head, {"kind": "image", "shape": [2, 3], "levels": 3})


def frames(run: Path, transparent: bool = False) -> list[np.ndarray]:
    model, head = m2s.load(run)
    states = film_frames(model, head, 6, 16, FRAMES, 64, "auto", 0)[1]
    return [image_grid(each, (2, 3), 3, transparent) for each in states]


def test_every_pixel_of_the_grid() -> None:
    tokens = torch.arange(24).reshape(4, 6) % 4  # 3 is the mask of 3 levels
    picture = image_grid(tokens, (2, 3), 3)
    factor = picture.shape[1] // 7
    assert picture.shape == (5 * factor, 7 * factor, 3) and factor * 7 >= 384
    small = picture[::factor, ::factor]
    assert bool((small[2] == 255).all()) and bool((small[:, 3] == 255).all())
    mask = np.rint(255 * np.array(MASK_COLOR)).astype(np.uint8)
    for number, each in enumerate(tokens.reshape(4, 2, 3).tolist()):
        for row, column in np.ndindex(2, 3):
            token = each[row][column]
            pixel = small[number // 2 * 3 + row, number % 2 * 4 + column]
            assert pixel.tolist() == (mask.tolist() if token == 3 else [round(255 * token / 2)] * 3)
    layered = image_grid(tokens, (2, 3), 3, transparent=True)
    assert np.array_equal(layered[..., :3], picture)
    line = np.zeros((5, 7), dtype=bool)
    line[2], line[:, 3] = True, True
    assert np.array_equal(layered[::factor, ::factor, 3], np.where(line, 0, 255))


def test_gif(run: Path, tmp_path: Path) -> None:
    main(["figure", "film", "--source", str(run), "--out", str(tmp_path / "film.gif")])
    expected = frames(run)
    with Image.open(tmp_path / "film.gif") as film:
        assert film.format == "GIF" and film.info["loop"] == 0
        for place, wanted in ((0, expected[0]), (film.n_frames - 1, expected[-1])):
            film.seek(place)
            found = np.asarray(film.convert("RGB")).astype(int)
            assert found.shape == wanted.shape and np.abs(found - wanted).max() <= 2  # a palette of 256 colors
        assert film.info["duration"] >= 1500


def test_html(run: Path, tmp_path: Path) -> None:
    main(["figure", "film", "--source", str(run), "--out", str(tmp_path / "film.html")])
    page = (tmp_path / "film.html").read_text()
    listed = re.search(r"const sources = (\[.*?\]), labels", page, re.DOTALL)
    assert listed is not None and "http" not in page.replace("http-equiv", "")
    found = [Image.open(io.BytesIO(base64.b64decode(data))) for data in re.findall(r"base64,([\w+/=]+)\"", listed.group(1))]
    expected = frames(run, transparent=True)
    assert len(found) == len(expected) == FRAMES and f'max="{FRAMES - 1}"' in page
    assert all(np.array_equal(np.asarray(one), other) for one, other in zip(found, expected, strict=True))
