"""Figures of runs, samples and results."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import m2s
import m2s.hub
from m2s.cli import main
from m2s.errors import UserError
from m2s.heads import NextToken, Shifted
from m2s.models import DiT, DiTConfig
from m2s.realizability import SCORE_CLASSES
from m2s.report.audit import read_audit
from m2s.report.film_strip import film_frames, rgb_image
from m2s.report.read_run import read_runs
from m2s.report.traces import plot_audits_and_losses, plot_losses, plot_perplexity_over_steps, plot_sample_grids, trailing_mean

QUICK = ["--batch", "8", "--network.width", "8", "--validation-samples", "4", "--device", "cpu", "--log-every", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "md4"
    main(["train", "digits", "--method", "md4", "--steps", "12", "--optimizer.warmup", "4", "--out", str(out), *QUICK])
    return out


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the error of `m2s figure`."""
    with pytest.raises(SystemExit) as exit_:
        main(["figure", *arguments])
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_trailing_mean_is_over_previous_values() -> None:
    values = np.random.default_rng(0).normal(size=9)
    for width in (1, 3, 20):
        expected = [values[max(0, i + 1 - width) : i + 1].mean() for i in range(9)]
        np.testing.assert_allclose(trailing_mean(values, width), expected)


def test_traces_show_epochs_and_the_last_quarter(run: Path, tmp_path: Path) -> None:
    figure = plot_losses(read_runs([run]))
    full, end = figure.axes
    bits = [json.loads(line)["bits"] for line in (run / "log.jsonl").read_text().splitlines() if "grad_norm" in line]
    pale, strong, warm = full.lines
    np.testing.assert_allclose(pale.get_ydata(), bits)
    np.testing.assert_allclose(pale.get_xdata(), np.arange(1, 13) * 8 / 1541)  # 1,541 images in batches of 8
    assert warm.get_xdata()[0] == pytest.approx(4 * 8 / 1541) and len(strong.get_ydata()) == 12
    assert list(end.lines[0].get_ydata()) == pytest.approx(bits[8:])
    main(["figure", "losses", "--source", str(run), "--out", str(tmp_path / "losses.svg")])
    assert "<svg" in (tmp_path / "losses.svg").read_text()


@pytest.fixture(scope="module")
def audits(run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Audits of the run, and of the same network with its output read as an unconstrained score."""
    place = tmp_path_factory.mktemp("audits")
    model, head = m2s.load(run)
    m2s.hub.save(place / "free", model, m2s.LogScore(head.process), m2s.load(run).data)
    for checkpoint in (run, place / "free"):
        out = place / f"audit-{checkpoint.name}"
        main(["audit", str(checkpoint), "--n", "2", "--steps", "3", "--device", "cpu", "--out", str(out)])
    return [place / "audit-md4" / "audit.json", place / "audit-free" / "audit.json"]


def on_other_data(run: Path, place: Path, data: str = "digits") -> Path:
    """Return a copy of a run whose record names other data."""
    shutil.copytree(run, place)
    record = json.loads((place / "train.json").read_text())
    record["config"]["data"]["name"] = data
    (place / "train.json").write_text(json.dumps(record))
    return place


def test_figure_of_audits_and_losses_has_a_panel_for_each_data_set(run: Path, audits: list[Path], tmp_path: Path) -> None:
    runs = [run, on_other_data(run, tmp_path / "free"), on_other_data(run, tmp_path / "c" / "md4", "mnist")]
    found = {path: read_audit(path) for path in audits}
    figure = plot_audits_and_losses(found, read_runs(runs))
    classes, weights, digits, mnist = figure.axes
    assert [axes.get_title(loc="left")[:3] for axes in figure.axes] == ["(a)", "(b)", "(c)", "(d)"]
    assert digits.get_title(loc="left").endswith("on digits") and mnist.get_title(loc="left").endswith("on mnist")
    names = [text.get_text().split("\n") for text in classes.get_yticklabels()]
    assert [name[0] for name in names] == ["md4", "free"] and names[0][1] == "100.000%"
    for name, bars in zip(SCORE_CLASSES, classes.containers, strict=True):
        shares = [one["overall"]["before"]["strict"][name] / one["overall"]["position_steps"] for one in found.values()]
        np.testing.assert_allclose([bar.get_width() for bar in bars], shares)
    steps = [step for step in found[audits[1]]["steps"] if step["position_steps"]]
    lines = {line.get_label(): line for line in weights.lines}
    assert list(lines) == ["md4", "md4, projected", "free", "free, projected"]
    before = [step["before"]["negative_weights"] / step["position_steps"] for step in steps]
    np.testing.assert_allclose(lines["free"].get_ydata(), before)
    assert max(before) > 0 and not lines["free, projected"].get_ydata().any()
    bits = [json.loads(line)["bits"] for line in (run / "log.jsonl").read_text().splitlines() if "grad_norm" in line]
    assert len(digits.lines) == 4 and len(mnist.lines) == 2
    for line in (digits.lines[1], digits.lines[3], mnist.lines[1]):
        np.testing.assert_allclose(line.get_ydata(), bits)  # a mean over 3% of twelve records is the records
    colors = {name: lines[name].get_color() for name in ("md4", "free")}
    assert [line.get_color() for line in digits.lines[1::2]] == list(colors.values())
    assert mnist.lines[1].get_color() == colors["md4"] != colors["free"]
    assert mnist.get_legend().get_texts()[0].get_text() == f"md4, {bits[-1]:.3f} at the end"


def test_audits_and_runs_are_distinguished_on_the_command_line(
    run: Path, audits: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = map(str, audits)
    out = ["--out", str(tmp_path / "x.svg")]
    for sources, panels in (([theirs], 4), ([theirs, str(run)], 3), ([theirs, ours], 2)):
        main(["figure", "audit", "--source", *sources, *out])
        assert (tmp_path / "x.svg").read_text().count('id="axes_') == panels
        (tmp_path / "x.svg").unlink()
    capsys.readouterr()
    assert "audit.json that m2s audit writes" in error_of(capsys, "audit", "--source", str(run), *out)
    assert "no train.json" in error_of(capsys, "audit", "--source", theirs, str(tmp_path), *out)
    other = tmp_path / "euler"
    main(["audit", str(run), "--n", "1", "--steps", "2", "--sampler", "euler", "--out", str(other)])
    capsys.readouterr()
    assert "--sampler analytic" in error_of(capsys, "audit", "--source", str(other / "audit.json"), str(run), *out)
    assert not (tmp_path / "x.svg").exists()


def test_grids_of_samples_and_of_data(run: Path, tmp_path: Path) -> None:
    main(["sample", str(run), "--n", "4", "--steps", "2", "--out", str(run / "samples.npz"), "--overwrite"])
    out = tmp_path / "grids.png"
    main(["figure", "samples", "--source", "digits:test", str(run / "samples.npz"), "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    from m2s.cli.figure import grid

    data, drawn = grid("digits:test"), grid(str(run / "samples.npz"))
    assert torch.equal(data.tokens, m2s.data.load("digits").test[:36].long()) and data.levels == 17
    assert drawn.name == "md4" and torch.equal(drawn.tokens, torch.from_numpy(np.load(run / "samples.npz")["tokens"]).long())
    assert [axes.get_title() for axes in plot_sample_grids([data, drawn]).axes] == ["digits:test", "md4"]


def test_film_begins_with_noise_and_ends_with_samples(run: Path, tmp_path: Path) -> None:
    model, head = m2s.load(run)
    shares, states = film_frames(model, head, 64, rows=2, columns=3, steps=4, sampler="bayes", seed=7)
    assert shares == [0, 0.5, 1] and (states[0] == 17).all()  # all masked
    assert torch.equal(states[-1], m2s.sample(model, head, (2, 64), steps=4, seed=7))
    assert (rgb_image(states[0, 0], (8, 8), 17) == np.array([0.27, 0.45, 0.77])).all()
    assert rgb_image(torch.arange(17)[:16], (4, 4), 17)[3, 3].tolist() == [15 / 16] * 3
    main(["figure", "film", "--source", str(run), "--out", str(tmp_path / "film.png")])
    assert (tmp_path / "film.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["next token", "unconstrained score between levels"])
def test_film_of_any_head(name: str, tmp_path: Path) -> None:
    """The default sampler of a head can make a film."""
    process = m2s.RateMatrix.gaussian(17, m2s.Exponential(1.0))
    head = NextToken(Shifted(17)) if name == "next token" else m2s.LogScore(process)
    model = DiT(
        DiTConfig(head.process.states, width=16, depth=1, heads=2, time=name != "next token", causal=name == "next token")
    )
    m2s.hub.save(tmp_path / "run", model, head, {"kind": "image", "shape": [4, 4], "levels": 17})
    main(["figure", "film", "--source", str(tmp_path / "run"), "--out", str(tmp_path / "film.png")])
    assert (tmp_path / "film.png").read_bytes().startswith(b"\x89PNG")


def result(model: str, steps: int, value: float, grid: str = "cosine") -> dict:
    interval = {"value": value, "low": value - 1, "high": value + 2}
    settings = {"steps": steps, "sampler": "bayes", "grid": grid}
    return {"file": f"runs/{model}/{steps}-{grid}.npz", "judge": {"name": "gpt2"}, "settings": settings, "perplexity": interval}


def test_perplexity_over_steps_has_a_curve_for_each_model_and_for_each_grid(tmp_path: Path) -> None:
    results = [result("ours", steps, 100 / steps) for steps in (32, 16)] + [result("ours", 16, 9.0, "linear")]
    results += [result("theirs", 16, 20.0), result("theirs", 32, 11.0)]
    models, samplers = plot_perplexity_over_steps(results).axes
    lines = {container.get_label(): container.lines[0] for container in models.containers}
    assert list(lines) == ["ours (bayes, cosine)", "theirs (bayes, cosine)"]
    assert lines["ours (bayes, cosine)"].get_xdata().tolist() == [16, 32]
    assert lines["theirs (bayes, cosine)"].get_ydata().tolist() == [20.0, 11.0]
    # The second panel compares samplers, so a model with one sampler is not in it, unless no model has several.
    assert [container.get_label() for container in samplers.containers] == ["bayes, cosine", "bayes, linear"]
    both = [*results, result("theirs", 16, 22.0, "linear")]
    labels = [f"{model}: bayes, {grid}" for model in ("ours", "theirs") for grid in ("cosine", "linear")]
    assert [container.get_label() for container in plot_perplexity_over_steps(both).axes[1].containers] == labels
    single = [one for one in results if one["settings"]["grid"] == "cosine"]
    labels = ["ours: bayes, cosine", "theirs: bayes, cosine"]
    assert [container.get_label() for container in plot_perplexity_over_steps(single).axes[1].containers] == labels
    (tmp_path / "a.json").write_text(json.dumps({"results": results, "differences": []}))
    main(["figure", "genppl", "--source", str(tmp_path / "a.json"), "--out", str(tmp_path / "genppl.pdf")])
    assert (tmp_path / "genppl.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(UserError, match="does not hold its number of steps"):
        plot_perplexity_over_steps([{**results[0], "settings": {}}])


def test_invalid_sources_are_errors_of_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "x.png")]
    assert "did you mean losses" in error_of(capsys, "loses", *out)
    for name in ("audit", "genppl", "frontier", "losses", "samples", "film"):
        assert "give --source" in error_of(capsys, name, *out)
    assert "leave out --seed" in error_of(capsys, "losses", "--source", str(run), "--seed", "1", *out)
    assert "holds no images" in error_of(capsys, "samples", "--source", str(run / "config.json"), *out)
    assert "is no result of m2s evaluate genppl" in error_of(capsys, "genppl", "--source", str(run / "config.json"), *out)
    assert "no train.json" in error_of(capsys, "losses", "--source", str(tmp_path), *out)
    assert not (tmp_path / "x.png").exists()
