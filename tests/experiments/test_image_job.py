"""experiments/image_job.py on small images: entries, stages of a row, interrupted calls, the final FID and the table."""

import importlib.util
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest
import torch

import m2s
from m2s.cli import main as m2s_main
from m2s.data import DATASETS
from m2s.data.files import sha256
from m2s.evaluation import inception
from m2s.evaluation.fid import Statistics, frechet
from m2s.models import build
from m2s.training import loop
from m2s.training.build import describe_network, make_process
from m2s.training.config import resolve
from small_runs import InMemorySource

FOLDER = Path(__file__).parents[2] / "experiments"
SIDE, LIMIT, STEPS = 4, 4, 6
NETWORK = {"network.width": 8, "network.layers": 1, "network.multipliers": [1], "network.dropout": 0.0}
SETTINGS = {
    **NETWORK,
    "steps": STEPS,
    "batch": 4,
    "save_every": 2,
    "log_every": 1,
    "validate_every": 0,
    "validation_samples": 4,
}
TRIAL = ["--limit", str(LIMIT), "--bundle", "back", "--set", *(f"{key}={value}" for key, value in SETTINGS.items())]


class Averages(torch.nn.Module):
    """Simple features: the mean of each channel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The script as a module, in an empty folder, with simple features and images of 4 x 4 pixels in three colors."""
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("image_job_script", FOLDER / "image_job.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "MARGIN", 0.0)
    Path("data/inception").mkdir(parents=True)
    weights = Path("data/inception/inception-2015-12-05.pt")
    torch.jit.save(torch.jit.script(Averages()), weights)
    monkeypatch.setattr("m2s.evaluation.bpd.plot_integrand", lambda points, unit: matplotlib.figure.Figure())
    monkeypatch.setattr(inception, "KNOWN_SCRIPTS", {sha256(weights)})
    random = np.random.default_rng(0)
    arrays = (random.integers(256, size=(16, SIDE * SIDE * 3), dtype=np.uint8), np.arange(16) % 10)
    small = replace(DATASETS["cifar10"], shape=(SIDE, SIDE, 3), read=lambda folder: arrays + arrays, sha256={})
    monkeypatch.setitem(DATASETS._entries, "cifar10", small)
    return module


def read(path: str | Path) -> dict:
    return json.loads(Path(path).read_text())


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def feature_statistics(images: np.ndarray) -> Statistics:
    """Statistics of the features `Averages`, computed independently: bilinear enlargement keeps means up to rounding."""
    planes = torch.from_numpy(images.reshape(-1, SIDE, SIDE, 3).astype(np.float32)).permute(0, 3, 1, 2) / 255
    large = torch.nn.functional.interpolate(planes, (299, 299), mode="bilinear", align_corners=False)
    found = Statistics.empty(3)
    found.update((2 * large - 1).mean((2, 3)))
    return found


def test_every_row_is_a_valid_run_and_both_networks_have_one_size(job):
    for entry in job.ENTRIES.values():
        trial = job.Job(Path("out"), entry, {}, None, False)
        for name, row in entry.rows.items():
            config = resolve(trial.config(name))
            assert config.method == row.method and config.run.out == Path("out/runs") / entry.run.format(row=name)
            labels = [chosen.label(row.method) for chosen in row.sets]
            assert len(set(labels)) == len(labels)
    rows = job.ENTRIES["cifar10-1m"].rows
    assert len(rows) == 14 and {name.removesuffix("-md4").removesuffix("-multi") for name in rows} == {
        *("m2s", "m2s-offset", "m2s-gaussian", "m2s-gaussian-low", "sedd", "md4", "tauldr")
    }
    trial = job.Job(Path("out"), job.ENTRIES["cifar10-1m"], {}, None, False)
    for name, count in (("sedd-md4", 28_427_520), ("sedd-multi", 28_427_520)):
        config = resolve(trial.config(name))
        assert config.run.steps * config.run.batch == pytest.approx(1e6, rel=1e-3)
        source = InMemorySource(torch.zeros(1, 3072, dtype=torch.long), 256)
        source.shape = (32, 32, 3)
        with torch.device("meta"):
            model = build(describe_network(config.network, make_process(config.process, 256), source))
        assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(count, rel=0.03)
    words = trial.bits("m2s-gaussian-low-md4", Path("run"), Path("bpd.json")).name.split()
    assert words[words.index("--t-min") + 1] == "0.0001"  # the NELBO starts where training does


def test_rows_from_training_to_the_table(job, monkeypatch, capsys):
    rows = ["m2s-offset-multi", "sedd-md4"]
    given = ["out", "--entry", "cifar10-1m", "--rows", ",".join(rows)]
    assert job.main([*given, *TRIAL]) == 0
    assert sys.modules["transfer"].main(["join", "back", "arrived"]) == 0
    expected = {f"runs/{row}/{name}" for row in rows for name in ("train.json", "log.jsonl", "config.json")}
    expected |= {f"bpd/{row}.json" for row in rows} | {f"pictures/{row}.{end}" for row in rows for end in ("png", "npz")}
    expected |= {"fid/m2s-offset-multi/bayes-cosine-100.json", "fid/sedd-md4/analytic-cosine-100.json"}
    assert files(Path("arrived/results")) == expected
    # Samples of the same number have the same noise: the picture shows the first samples of the set of the same steps.
    with np.load("out/samples/sedd-md4/analytic-cosine-100.npz") as drawn, np.load("out/pictures/sedd-md4.npz") as picture:
        tokens = drawn["tokens"]
        assert np.array_equal(tokens, picture["tokens"])
    real = m2s.data.load("cifar10").test[:LIMIT].numpy()
    distance = frechet(feature_statistics(tokens), feature_statistics(real))
    assert job.main(["arrived/results", "--entry", "cifar10-1m", "--rows", ",".join(rows), "--table"]) == 0
    table = {row["row"]: row for row in read("arrived/results/cifar10-1m.json")["rows"]}
    assert table["sedd-md4"]["fid"]["analytic-cosine-100"] == pytest.approx(distance, rel=1e-3)
    assert table["sedd-md4"]["samples"]["analytic-cosine-100"] == LIMIT
    for row in rows:
        assert table[row]["images"] == STEPS * 4 and table[row]["images_per_second"] > 0
        assert table[row]["nelbo"]["nelbo"] == read(f"out/bpd/{row}.json")["nelbo"]["bits"]
        assert table[row]["options"]["method"] == row.rpartition("-")[0]
    printed = capsys.readouterr().out
    assert f"| `sedd-md4` | {STEPS * 4} |" in printed and f"| {distance:.2f} |" in printed
    monkeypatch.setattr(sys.modules["job_stages"], "run_m2s", None)  # nothing is computed again
    assert job.main([*given, *TRIAL]) == 0


def test_a_long_row_resumes_and_its_states_and_the_final_fid_are_measured(job, monkeypatch, capsys):
    """The time ends at step 2. The states until then are measured, and the next call trains and measures the rest."""
    finish, interrupted = loop.finish_step, []

    def stop_at_two(trainer, *arguments):
        if trainer.progress.step == 1 and not interrupted:
            interrupted.append(True)
            signal.raise_signal(signal.SIGALRM)
        return finish(trainer, *arguments)

    monkeypatch.setattr(loop, "finish_step", stop_at_two)
    given = ["out", "--entry", "cifar10-long", "--rows", "sedd-md4", "--final", "--seconds", "500", *TRIAL, "save_every=3"]
    assert job.main(given) == 0
    assert "not finished" in capsys.readouterr().out
    measured = {f"{step}.{kind}.json" for step in (2,) for kind in ("bpd", "fid")}
    assert {path.name for path in Path("out/points/sedd-md4").glob("*.json")} == measured
    assert not Path("out/bpd/sedd-md4.json").exists()
    assert job.main(given) == 0
    points = {path.name for path in Path("out/points/sedd-md4").glob("*.bpd.json")}
    assert points == {f"{step}.bpd.json" for step in (2, 3, 6)}
    assert m2s.load("out/states/sedd-md4-3").config["extra"]["step"] == 3
    # The sets together are the samples of one call, since a sample depends on its number only.
    words = ["--steps", str(LIMIT), "--sampler", "euler", "--grid", "cosine", "--micro-batch", str(LIMIT), "--batch-size", "4"]
    m2s_main(["sample", "out/runs/sedd-md4", "--n", str(2 * LIMIT), *words, "--out", "together.npz"])
    with np.load("together.npz") as together, np.load("out/samples/sedd-md4/final.npz") as final:
        assert np.array_equal(together["tokens"], final["tokens"])
    assert job.main(["out", "--entry", "cifar10-long", "--rows", "sedd-md4", "--table"]) == 0
    (row,) = read("out/cifar10-long.json")["rows"]
    assert [point["images"] for point in row["points"]] == [8, 12, 24] and "final" in row["fid"]
    seconds = [point["seconds"] for point in row["points"]]
    assert seconds == sorted(seconds) and seconds[-1] == pytest.approx(row["seconds"], rel=0.2)


def test_rows_of_another_script_are_measured_only(job, monkeypatch, capsys):
    """The entry of samplers needs the networks of mnist.py, and projects the scores of SEDD."""
    given = ["out", "--entry", "mnist-samplers", "--rows", "sedd"]
    monkeypatch.setattr(job, "check_inputs", lambda entry: None)
    assert job.main(given) == 2
    assert "out/runs/sedd-seed1 has no network: train it first, by experiments/mnist.py" in capsys.readouterr().err
    entry = job.ENTRIES["mnist-samplers"]
    names = [stage.name for stage in job.Job(Path("out"), entry, {}, None, False).stages("sedd")]
    assert names[1].endswith(
        "--n 64 --steps 200 --sampler auto --grid cosine --micro-batch 500 --batch-size 500 --out out/pictures/sedd.png"
    )
    assert sum("--project" in name for name in names) == 6
    steps = {name.split("--steps ")[1].split()[0] for name in names if name.startswith("m2s sample") and "--n 5000" in name}
    assert steps == {"10", "25", "50", "100", "200", "500"}
    assert sum("--protocol mnist-5k" in name for name in names) == len(entry.rows["sedd"].sets)


def test_errors_come_before_the_first_row(job, capsys):
    weights = Path("data/inception/inception-2015-12-05.pt")
    weights.unlink()
    assert job.main(["out", "--entry", "cifar10-1m", *TRIAL]) == 2
    assert "nception" in capsys.readouterr().err and not Path("out").exists()
    for words, message in (
        (["--rows", "seed-md4"], "cifar10-1m has no row 'seed-md4': did you mean sedd-md4"),
        (["--final"], "--final is for cifar10-long"),
        (["--limit", "1"], "a covariance needs at least 2 images"),
        (["--table"], "out has no results of"),
    ):
        assert job.main(["out", "--entry", "cifar10-1m", *words]) == 2
        assert message in capsys.readouterr().err
