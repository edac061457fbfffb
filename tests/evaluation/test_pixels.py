"""The Fréchet distance of pixels, against closed forms, and its standard error by the jackknife."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from m2s.cli import main
from m2s.errors import UserError
from m2s.evaluation.pixels import jackknife, pixel_distances, pixels

GENERATOR = torch.Generator().manual_seed(0)
SAMPLES = torch.randint(5, (40, 3), generator=GENERATOR)
DATA = torch.randint(1, 4, (30, 3), generator=GENERATOR)


def test_distance_of_one_pixel_has_a_closed_form() -> None:
    """For one pixel it is (m - m')^2 + (sigma - sigma')^2."""
    a, b = SAMPLES[:, :1].double() / 4, DATA[:, :1].double() / 4
    expected = (a.mean() - b.mean()) ** 2 + (a.std() - b.std()) ** 2
    found = pixel_distances(SAMPLES[None, :, :1], DATA[:, :1], levels=5)[0, 0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_distance_of_several_pixels_is_that_of_scipy() -> None:
    a, b = SAMPLES.double().numpy() / 4, DATA.double().numpy() / 4
    first, second = (np.cov(one.T) for one in (a, b))
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + (first + second - 2 * sqrtm(first @ second).real).trace()
    assert float(pixel_distances(SAMPLES[None], DATA, levels=5)[0, 0]) == pytest.approx(expected, rel=1e-9)


def test_a_group_is_left_out_of_every_arm() -> None:
    both = torch.stack([SAMPLES, SAMPLES.flip(1)])
    found = pixel_distances(both, DATA, levels=5, groups=8)
    assert found.shape == (2, 9)
    for arm in range(2):
        without = both[arm][torch.arange(40) % 8 != 3]
        assert float(found[arm, 4]) == float(pixel_distances(without[None], DATA, levels=5)[0, 0])


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    """For a mean, leaving out one example at a time gives s / sqrt(n) exactly."""
    values = torch.tensor([1.0, 4.0, 2.0, 7.0, 7.5], dtype=torch.float64)
    left_out = torch.stack([values.mean(), *(values[torch.arange(5) != i].mean() for i in range(5))])
    assert jackknife(left_out) == pytest.approx(float(values.std()) / math.sqrt(5))


def test_the_error_is_the_spread_over_new_samples() -> None:
    """Over 60 sets of 256 images, the mean of the estimated errors is near the true standard deviation."""
    generator = torch.Generator().manual_seed(1)
    sets = torch.randint(17, (60, 256, 4), generator=generator).sort(-1).values
    data = torch.randint(17, (500, 4), generator=generator)
    found = pixel_distances(sets, data, levels=17)
    estimated = torch.tensor([jackknife(row) for row in found]).mean()
    assert 0.75 < float(estimated / found[:, 0].std()) < 1.35


def test_metric_reports_the_distance_and_rejects_what_it_cannot_compare(tmp_path, capsys) -> None:
    found = pixels(SAMPLES, DATA, levels=5)
    assert found["pixel_distance"]["value"] == float(pixel_distances(SAMPLES[None], DATA, 5)[0, 0])
    assert (found["samples"], found["reference"]) == (40, 30)
    for samples, data, levels in ((None, DATA, 5), (SAMPLES, None, 5), (SAMPLES, DATA[:, :2], 5), (SAMPLES, DATA, 4)):
        with pytest.raises(UserError):
            pixels(samples, data, levels=levels)
    np.savez(tmp_path / "samples.npz", tokens=SAMPLES.numpy())
    np.savez(tmp_path / "data.npz", tokens=DATA.numpy())
    words = ["evaluate", "pixels", f"{tmp_path}/samples.npz", "--reference", f"{tmp_path}/data.npz", "--levels", "5"]
    main([*words, "--out", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text())["pixel_distance"] == found["pixel_distance"]
    assert "pixel_distance" in capsys.readouterr().out
