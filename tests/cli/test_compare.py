"""`m2s compare`: every number is that of the files beside it, and every file is that of the command it names."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from m2s.cli import main
from m2s.provenance import command, recorded_command
from m2s.report.comparison import arm_label

QUICK = [
    "--steps",
    "3",
    "--batch",
    "8",
    "--network.width",
    "8",
    "--validation-samples",
    "4",
    "--log-every",
    "1",
    "--device",
    "cpu",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained models of digits, and their comparison."""
    folder = tmp_path_factory.mktemp("compare")
    for method in ("m2s", "sedd"):
        main(["train", "digits", "--method", method, "--out", str(folder / method), *QUICK])
    main(words(folder))
    return folder


def words(folder: Path, *more: str) -> list[str]:
    models = [str(folder / "sedd"), str(folder / "m2s"), "--against", "digits:train"]
    return ["compare", *models, "--n", "8", "--steps", "2", "4", "--device", "cpu", "--out", str(folder / "out"), *more]


def result(folder: Path) -> dict:
    return json.loads((folder / "out" / "compare.json").read_text())


def test_distances_are_those_of_the_samples(runs: Path, tmp_path: Path) -> None:
    found = result(runs)
    assert [arm["name"] for arm in found["arms"]] == ["sedd", "sedd-repaired", "m2s"]
    assert [row["steps"] for row in found["steps"]] == [2, 4]
    for arm in found["arms"]:
        for row in found["steps"]:
            file = str(runs / "out" / arm["files"][str(row["steps"])])
            out, again = tmp_path / "pixels.json", ["--overwrite"]
            main(["evaluate", "pixels", file, "--reference", "digits:train", "--levels", "17", "--out", str(out), *again])
            measured = json.loads(out.read_text())["pixel_distance"]
            assert measured["value"] == pytest.approx(row["distances"][arm["name"]]["value"], rel=1e-9)
    light, dark = ((runs / "out" / name).read_text() for name in ("compare.svg", "compare-dark.svg"))
    assert "#ffffff" in light.lower() and "#ffffff" not in dark.lower() and light.startswith("<svg")


def test_the_recorded_command_makes_the_samples_again(runs: Path, tmp_path: Path) -> None:
    file = runs / "out" / "sedd-repaired-4.npz"
    stored = np.load(file)
    program, *given = json.loads(str(stored["command"]))
    assert program == "m2s" and given[0] == "sample" and "--project" in given
    given[given.index("--out") + 1] = str(tmp_path / "again.npz")
    main(given)
    assert (np.load(tmp_path / "again.npz")["tokens"] == stored["tokens"]).all()


def test_what_the_projection_changes(runs: Path) -> None:
    found = result(runs)["projection"]
    assert (found["of"], found["arm"]) == ("sedd", "sedd-repaired")
    assert [row["steps"] for row in found["dropped"]] == [2, 4] and all(row["mass"] >= 0 for row in found["dropped"])
    assert set(found["mean_scores"][0]) == {"t", "as it is", "projected", "m2s"}
    parts, most = found["parts"], result(runs)["steps"][-1]["distances"]
    assert set(parts["distances"]) == {"as it is", "projected", "raised", "lowered"} and parts["steps"] == 4
    assert parts["distances"]["as it is"]["value"] == most["sedd"]["value"]


def test_complete_samples_are_kept(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in (runs / "out").glob("*-*.npz")}
    assert len(before) == 6
    first = result(runs)
    (runs / "out" / "compare.json").unlink()
    main(words(runs))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert result(runs)["steps"] == first["steps"]
    (runs / "out" / "compare.json").unlink()
    with pytest.raises(SystemExit) as exit_:
        main(words(runs, "--seed", "1"))
    assert exit_.value.code == 2 and "seed" in capsys.readouterr().err
    main(words(runs))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (["--against", "mnist"], "is not a split"),
        (["--n", "3"], "at least 4"),
        (["--steps", "4", "4"], "different numbers"),
        (["--sampler", "none"], "none"),
    ],
)
def test_invalid_input_writes_nothing(runs: Path, tmp_path: Path, change, reason, capsys) -> None:
    out = tmp_path / "new"
    given = {"--against": ["digits:train"], "--n": ["8"], "--steps": ["2"], "--out": [str(out)], change[0]: change[1:]}
    with pytest.raises(SystemExit) as exit_:
        main(["compare", str(runs / "sedd"), *(word for name, values in given.items() for word in (name, *values))])
    assert exit_.value.code == 2 and reason in capsys.readouterr().err
    assert not any(out.glob("*.json")) if out.exists() else True


def test_a_command_that_runs_others_records_theirs() -> None:
    with recorded_command(["m2s", "cite"]):
        assert command() == ["m2s", "cite"]
    assert command() != ["m2s", "cite"]


def test_distance_between_real_images(runs: Path) -> None:
    """The images and the others are disjoint and are all of the data."""
    from m2s.data import load
    from m2s.evaluation.pixels import pixel_distances

    found = result(runs)["reference"]["real"]
    tokens = load("digits").train.long()
    assert (found["images"], found["against"]) == (8, len(tokens) - 8)
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    distance = pixel_distances(tokens[order[:8]][None], tokens[order[8:]], 17, 4)[0, 0]
    assert found["distance"]["value"] == pytest.approx(float(distance), rel=1e-9)


def test_m2s_with_the_offset_is_named() -> None:
    head = "Posterior(Uniform(17, Linear()), offset='{}')"
    arms = [{"name": "m2s", "project": False, "head": head.format(offset)} for offset in ("exact", "none")]
    arms.append({"name": "sedd-repaired", "project": True, "head": "LogScore(Uniform(17, Linear()))"})
    assert [arm_label(arm) for arm in arms] == ["M2S offset", "M2S", "SEDD repaired"]
