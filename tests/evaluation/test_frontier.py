"""The area below frontiers: hand-made curves with known areas, and how files become curves."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2s.evaluation.genppl import area_below, format_areas, frontier_areas, frontier_curves, plot_frontier


def result(
    file: str, settings: dict[str, Any], entropy: float, log_perplexity: float, spread: float = 0.0, count: int = 50
) -> dict[str, Any]:
    """A summary of `count` sequences of 10 tokens, whose entropies and NLLs alternate around their means."""
    sign = np.where(np.arange(count) % 2, 1, -1)
    nll, nats = 10 * (log_perplexity + spread * sign), entropy + spread * sign
    interval = {"value": math.exp(log_perplexity), "low": math.exp(log_perplexity), "high": math.exp(log_perplexity)}
    bits = {"value": entropy / math.log(2), "low": entropy / math.log(2), "high": entropy / math.log(2)}
    columns = {"nll": nll, "tokens": np.full(count, 10), "bytes": np.full(count, 40), "entropy_nats": nats}
    return {
        "file": file,
        "settings": settings,
        "judge": {"name": "j"},
        "protocol": {"average": "tokens"},
        "perplexity": interval,
        "entropy_nats": {"value": entropy, "low": entropy, "high": entropy},
        "entropy_bits": bits,
        "sequences": {name: values.tolist() for name, values in columns.items()},
    }


def curve(name: str, points: list[tuple[float, float]], **more: Any) -> list[dict[str, Any]]:
    """The results of one model with the given points of entropy and log perplexity."""
    return [
        result(f"{name}/{at}.npz", {"weights": name, "temperature": 0.5 + at, "seed": at}, x, y, **more)
        for at, (x, y) in enumerate(points)
    ]


@pytest.mark.parametrize(
    ("points", "low", "high", "area"),
    [
        ([(4, 3), (6, 5)], 4, 6, 8),  # a line: the mean of 3 and 5 times 2
        ([(4, 3), (6, 5)], 4.5, 5.5, 4),
        ([(6, 5), (4, 3)], 5, 6, 4.5),  # in any order
        ([(4, 3), (5, 3), (6, 5)], 4, 6, 3 + 4),
        ([(4, 1), (5, 3), (6, 1)], 4.5, 5.5, 2 * 0.5 * (2 + 3) / 2),
        ([(4, 2), (6, 2)], 3, 7, 8),  # constant outside the points
    ],
)
def test_known_areas(points: list[tuple[float, float]], low: float, high: float, area: float) -> None:
    x, y = np.array(points, float).T
    assert area_below(x, y, float(low), float(high)) == pytest.approx(area)


def test_curves_are_compared_over_the_entropies_that_all_cover() -> None:
    """a: log perplexity = entropy over 3..6; b: one nat more over 4..7, with another point in between."""
    results = curve("runs/a", [(3, 3), (6, 6)]) + curve("runs/b", [(4, 5), (5, 6), (7, 8)])
    found = frontier_areas(results, resamples=100)
    assert found is not None and found["entropy_nats"] == [4, 6]
    first, second = found["curves"]
    assert (first["name"], second["name"]) == ("a", "b") and second["temperatures"] == [0.5, 1.5, 2.5]
    assert first["area"]["value"] == pytest.approx(10) and second["area"]["value"] == pytest.approx(12)
    assert second["mean_log_perplexity"]["value"] - first["mean_log_perplexity"]["value"] == pytest.approx(1)
    assert first["area"]["low"] == pytest.approx(10) and first["area"]["high"] == pytest.approx(10)  # equal sequences
    printed = format_areas(found)
    assert "4.000 .. 6.000 nats" in printed[0] and "10.0000" in printed[2] and "12.0000" in printed[3]
    alone = frontier_areas(results[:2], resamples=100)
    assert alone is not None and alone["entropy_nats"] == [3, 6] and alone["curves"][0]["area"]["value"] == pytest.approx(13.5)


def test_the_interval_is_that_of_the_delta_method() -> None:
    """All points of y = 2 (x - 3) move by the same e in x and in y, since all files have the same resamples.

    Over an interval of length 1 inside the curve the area changes by e - 2 e. Here e has the standard error of a mean.
    """
    spread, count = 0.01, 400
    points = curve("a", [(3, 0), (4, 2), (5, 4), (6, 6)], spread=spread, count=count)
    other = curve("b", [(4, 1), (5, 1)], count=count)
    found = frontier_areas(points + other, resamples=4000)
    assert found is not None and found["entropy_nats"] == [4, 5]
    area = found["curves"][0]["area"]
    assert area["value"] == pytest.approx(3)
    deviation = (area["high"] - area["low"]) / (2 * 1.96)
    assert deviation == pytest.approx(spread / math.sqrt(count), rel=0.1)


def test_curves_without_common_entropies_have_no_areas() -> None:
    results = curve("a", [(3, 3), (4, 4)]) + curve("b", [(5, 5), (6, 6)])
    found = frontier_areas(results)
    assert found is not None and found["entropy_nats"] is None and "area" not in found["curves"][0]
    assert "no entropy in common" in format_areas(found)[0]
    assert frontier_areas(results[:1]) is None and format_areas(None) == []


def test_files_become_curves() -> None:
    """By all settings but temperature and seed. A temperature that occurs twice, or none, makes a point of its own."""
    results = [
        *curve("x/a", [(4, 4), (3, 3)]),
        result("x/b.npz", {}, 5, 5),
        result("x/c.npz", {"temperature": 1.0, "steps": 8}, 4, 4),
        result("x/d.npz", {"temperature": 1.0, "steps": 8}, 4, 4),
    ]
    curves = frontier_curves([results[1], results[0], *results[2:]])
    assert [[Path(one["file"]).stem for one in curve.results] for curve in curves] == [["0", "1"], ["b"], ["c"], ["d"]]
    assert [curve.is_frontier for curve in curves] == [True, False, False, False]


def test_the_figure_has_a_line_for_each_model() -> None:
    results = curve("runs/a", [(3, 3), (6, 6)]) + curve("runs/b", [(4, 5), (7, 8)]) + [result("p.npz", {}, 5, 2)]
    axes = plot_frontier(results).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert [text.get_text() for text in axes.texts] == ["T = 0.5", "T = 1.5", "T = 0.5", "T = 1.5", "p"]
    (shaded,) = axes.patches
    assert shaded.get_x() == pytest.approx(4 / math.log(2)) and shaded.get_width() == pytest.approx(2 / math.log(2))
    lines = [line.get_ydata() for line in axes.lines if len(line.get_ydata()) == 2 and line.get_linestyle() == "-"]
    assert np.allclose(lines[0], np.exp([3, 6])) and np.allclose(lines[1], np.exp([5, 8]))
