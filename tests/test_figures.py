"""The figures that are drawn from runs, samples and results."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import m2s
from m2s.cli import main
from m2s.report import Refused
from m2s.report.film import frames, picture
from m2s.report.run import read_runs
from m2s.report.traces import against_steps, grids, losses, trailing

QUICK = ["--batch", "8", "--network.width", "8", "--validation-samples", "4", "--device", "cpu", "--log-every", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "md4"
    main(["train", "digits", "--method", "md4", "--steps", "12", "--optimizer.warmup", "4", "--out", str(out), *QUICK])
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["figure", *arguments])
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_a_trailing_mean_is_over_what_came_before() -> None:
    values = np.random.default_rng(0).normal(size=9)
    for width in (1, 3, 20):
        expected = [values[max(0, i + 1 - width) : i + 1].mean() for i in range(9)]
        np.testing.assert_allclose(trailing(values, width), expected)


def test_traces_show_epochs_and_the_last_quarter(run: Path, tmp_path: Path) -> None:
    figure = losses(read_runs([run]))
    whole, end = figure.axes
    bits = [json.loads(line)["bits"] for line in (run / "log.jsonl").read_text().splitlines() if "grad_norm" in line]
    pale, strong, warm = whole.lines
    np.testing.assert_allclose(pale.get_ydata(), bits)
    np.testing.assert_allclose(pale.get_xdata(), np.arange(1, 13) * 8 / 1541)  # 1,541 images in batches of 8
    assert warm.get_xdata()[0] == pytest.approx(4 * 8 / 1541) and len(strong.get_ydata()) == 12
    assert list(end.lines[0].get_ydata()) == pytest.approx(bits[8:])
    main(["figure", "losses", "--source", str(run), "--out", str(tmp_path / "losses.svg")])
    assert "<svg" in (tmp_path / "losses.svg").read_text()


def test_grids_of_samples_stand_beside_those_of_data(run: Path, tmp_path: Path) -> None:
    main(["sample", str(run), "--n", "4", "--steps", "2", "--out", str(run / "samples.npz"), "--overwrite"])
    out = tmp_path / "grids.png"
    main(["figure", "samples", "--source", "digits:test", str(run / "samples.npz"), "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    from m2s.cli.figure import grid

    data, drawn = grid("digits:test"), grid(str(run / "samples.npz"))
    assert torch.equal(data.tokens, m2s.data.load("digits").test[:36].long()) and data.levels == 17
    assert drawn.name == "md4" and torch.equal(drawn.tokens, torch.from_numpy(np.load(run / "samples.npz")["tokens"]).long())
    assert [axes.get_title() for axes in grids([data, drawn]).axes] == ["digits:test", "md4"]


def test_a_film_begins_with_noise_and_ends_with_samples(run: Path, tmp_path: Path) -> None:
    model, head = m2s.load(run)
    shares, states = frames(model, head, 64, rows=2, columns=3, steps=4, sampler="bayes", seed=7)
    assert shares == [0, 0.5, 1] and (states[0] == 17).all()  # all masked
    assert torch.equal(states[-1], m2s.sample(model, head, (2, 64), steps=4, seed=7))
    assert (picture(states[0, 0], (8, 8), 17) == np.array([0.27, 0.45, 0.77])).all()
    assert picture(torch.arange(17)[:16], (4, 4), 17)[3, 3].tolist() == [15 / 16] * 3
    main(["figure", "film", "--source", str(run), "--out", str(tmp_path / "film.png")])
    assert (tmp_path / "film.png").read_bytes().startswith(b"\x89PNG")


def result(model: str, steps: int, value: float, grid: str = "cosine") -> dict:
    interval = {"value": value, "low": value - 1, "high": value + 2}
    settings = {"steps": steps, "sampler": "bayes", "grid": grid}
    return {"file": f"runs/{model}/{steps}-{grid}.npz", "judge": {"name": "gpt2"}, "settings": settings, "perplexity": interval}


def test_perplexity_over_steps_has_a_curve_for_each_model_and_for_each_grid(tmp_path: Path) -> None:
    results = [result("ours", steps, 100 / steps) for steps in (32, 16)] + [result("ours", 16, 9.0, "linear")]
    results += [result("theirs", 16, 20.0), result("theirs", 32, 11.0)]
    models, samplers = against_steps(results).axes
    lines = {container.get_label(): container.lines[0] for container in models.containers}
    assert list(lines) == ["ours (bayes, cosine)", "theirs (bayes, cosine)"]
    assert lines["ours (bayes, cosine)"].get_xdata().tolist() == [16, 32]
    assert lines["theirs (bayes, cosine)"].get_ydata().tolist() == [20.0, 11.0]
    assert [container.get_label() for container in samplers.containers] == [
        "ours: bayes, cosine",
        "ours: bayes, linear",
        "theirs: bayes, cosine",
    ]
    (tmp_path / "a.json").write_text(json.dumps({"results": results, "differences": []}))
    main(["figure", "genppl", "--source", str(tmp_path / "a.json"), "--out", str(tmp_path / "genppl.pdf")])
    assert (tmp_path / "genppl.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(Refused, match="does not say with how many steps"):
        against_steps([{**results[0], "settings": {}}])


def test_what_cannot_be_drawn_is_refused_in_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "x.png")]
    assert "did you mean losses" in refused(capsys, "loses", *out)
    for name in ("audit", "genppl", "losses", "samples", "film"):
        assert "give --source" in refused(capsys, name, *out)
    assert "leave out --seed" in refused(capsys, "losses", "--source", str(run), "--seed", "1", *out)
    assert "holds no images" in refused(capsys, "samples", "--source", str(run / "config.json"), *out)
    assert "is no result of m2s evaluate genppl" in refused(capsys, "genppl", "--source", str(run / "config.json"), *out)
    assert "no train.json" in refused(capsys, "losses", "--source", str(tmp_path), *out)
    assert not (tmp_path / "x.png").exists()
