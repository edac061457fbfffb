"""The gallery of docs/methods.md: pictures and numbers of every method."""

import importlib.util
import json
import re
from types import ModuleType

import numpy as np
import pytest
from doc_pages import ROOT
from matplotlib.image import imread

from m2s.methods import METHODS
from m2s.methods.docs_page import page


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """experiments/gallery.py as a module."""
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "experiments" / "gallery.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_method_has_a_picture_and_numbers(script: ModuleType) -> None:
    files = {path.stem: path for path in script.PICTURES.glob("*.png")}
    assert set(files) == {*METHODS, "data"}
    assert sum(path.stat().st_size for path in files.values()) < 400_000
    rows = json.loads(script.RESULTS.read_text(encoding="utf-8"))["rows"]
    assert [row["method"] for row in rows] == list(METHODS)
    assert [row["sampler"] for row in rows] == [method.sampler for method in METHODS.values()]
    text = page()
    for row in rows:
        section = text.partition(f"\n## {row['method']}\n")[2].partition("\n## ")[0]
        assert f"| {row['bits']:.3f}" in section and f"(gallery/{row['method']}.png)" in section


def test_every_method_is_once_among_the_pictures_at_the_top() -> None:
    pictures = page().partition("\n## All methods\n")[2].partition("\n| name |")[0]
    linked = re.findall(r"^\[!\[Samples of (\S+)\]\(gallery/\1\.png\)<br>`\1`\]\(#\1\)$", pictures, re.M)
    assert sorted(linked) == sorted(METHODS)


def test_a_pixel_is_a_square_and_lines_between_images_are_transparent(script: ModuleType) -> None:
    tokens = np.random.default_rng(0).integers(script.LEVELS, size=(script.SAMPLES, 64))
    picture = script.sprites(tokens)
    scale, step = script.SCALE, 8 * script.SCALE + script.GAP
    lines, columns = script.SAMPLES // script.COLUMNS, script.COLUMNS
    assert picture.shape == (lines * step - script.GAP, columns * step - script.GAP, 4)
    for number in (0, 13, script.SAMPLES - 1):
        top, left = number // columns * step, number % columns * step
        image = picture[top : top + 8 * scale, left : left + 8 * scale]
        assert (image[..., 3] == 1).all()
        for corner in (0, scale - 1):
            np.testing.assert_allclose(image[corner::scale, corner::scale, 0] * 16, tokens[number].reshape(8, 8), atol=1e-12)
    assert (picture[:, step - script.GAP : step, 3] == 0).all()


def test_the_picture_of_the_data_is_the_data(script: ModuleType) -> None:
    from m2s.data import load

    stored = imread(script.PICTURES / "data.png")
    expected = script.sprites(load("digits").test[: script.SAMPLES].numpy())
    assert np.abs(stored - expected).max() < 1 / 255
