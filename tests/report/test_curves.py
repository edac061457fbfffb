"""Curves show the log of a run; labels are literal and do not overlap."""

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from m2s.report.blocks import svg_text
from m2s.report.curves import plot_gradient_norm, plot_integrand, plot_loss, running_mean, smoothing_window
from m2s.report.read_run import TrainingRun, read_runs
from m2s.report.style import plain_label, spread_labels


def test_names_are_literal_in_a_legend() -> None:
    assert plain_label("$a$") == r"\$a\$" and plain_label("_a") == " _a"
    log = [{"step": step, "bits": 2.0, "grad_norm": 1.0, "grad_norm_max": 2.0} for step in range(3)]
    runs = [TrainingRun(Path(), name, {}, log=log) for name in (r"$\frac{", "_a")]
    for figure in (plot_loss(runs), plot_gradient_norm(runs)):
        assert figure is not None
        texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        assert texts == [r"\$\frac{", " _a"] and svg_text(figure).startswith("<svg")


def test_running_mean_is_centered() -> None:
    values = np.random.default_rng(0).normal(size=40)
    for width in (1, 3, 9):
        half = width // 2
        expected = [values[max(0, i - half) : i + half + 1].mean() for i in range(40)]
        assert np.allclose(running_mean(values, width), expected, atol=1e-12)
    assert [smoothing_window(n) for n in (1, 24, 49, 50, 1000)] == [1, 1, 1, 3, 41]


def test_training_time_is_summed_over_starts() -> None:
    run = TrainingRun(
        Path(), "a", {}, log=[{"step": i, "seconds": s} for i, s in enumerate([10.0, 20.0, 20.0, 5.0, 15.0, 3.0])]
    )
    assert run.seconds == 20 + 15 + 3


def test_curves_show_the_log(runs: Path) -> None:
    (run,) = read_runs([runs / "m2s"])
    axes = plot_loss([run]).axes[0]  # type: ignore[union-attr]
    drawn = {line.get_label(): line for line in axes.lines}
    log = [json.loads(line) for line in (runs / "m2s" / "log.jsonl").read_text().splitlines()]
    assert np.allclose(drawn["m2s"].get_ydata(), [line["bits"] for line in log if "bits" in line])
    (held,) = axes.containers
    assert np.allclose(held.lines[0].get_ydata(), [line["validation_bits"] for line in log if "validation_bits" in line])
    curve = json.loads((runs / "m2s" / "bpd.json").read_text())["curve"]
    curve[1] |= {"bits": None, "error": None}
    (stairs,) = plot_integrand([("a", "token", curve)]).axes[0].patches
    values, edges, _ = stairs.get_data()
    assert np.isnan(values[1]) and values[0] == curve[0]["bits"] and edges[-1] == curve[-1]["to"] and len(values) == 5


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_spread_labels_is_the_nearest_arrangement_without_overlap(places: list[float]) -> None:
    gap = 0.1
    found = np.array(spread_labels(places, gap))
    assert found.min() >= 0 and found.max() <= 1 + 1e-12
    order = np.argsort(places, kind="stable")
    assert np.all(np.diff(found[order]) >= gap - 1e-12)
    # No small shift of any group of neighbors that keeps the constraints comes nearer.
    for first in range(len(places)):
        for last in range(first, len(places)):
            for step in (-1e-4, 1e-4):
                moved = found.copy()
                moved[order[first : last + 1]] += step
                if moved.min() >= 0 and moved.max() <= 1 and np.all(np.diff(moved[order]) >= gap):
                    assert np.sum((moved - places) ** 2) >= np.sum((found - places) ** 2) - 1e-12
