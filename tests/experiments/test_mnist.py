"""experiments/mnist.py on small images: rows, the table, failed rows, finished rows and errors."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import m2s
from m2s.data import DATASETS
from m2s.data.files import sha256
from m2s.evaluation import inception
from m2s.evaluation.fid import Statistics, frechet
from m2s.models import unet
from m2s.report.methods import plot_sample_sheet

FOLDER = Path(__file__).parents[2] / "experiments"
LIMIT, STEPS, SIDE = 8, 4, 8
COMMON = ["--limit", str(LIMIT), "--steps", str(STEPS), "--inception", "net.pt"]


class Averages(torch.nn.Module):
    """Simple features: means over a 4 x 4 grid of the first channel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(x[:, :1], 4).flatten(1)


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """The experiment as a module, in an empty folder, with simple features, small images and few sampling steps."""
    monkeypatch.syspath_prepend(FOLDER)  # where a script finds its siblings
    for name in ("mnist_measure", "mnist_rows", "mnist_table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("mnist_experiment", FOLDER / "mnist.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.jit.save(torch.jit.script(Averages()), "net.pt")
    monkeypatch.setattr(inception, "KNOWN_SCRIPTS", {sha256(Path("net.pt"))})
    random = np.random.default_rng(0)
    arrays = (random.integers(256, size=(32, SIDE, SIDE), dtype=np.uint8), np.arange(32) % 10)
    small = replace(DATASETS["mnist"], shape=(SIDE, SIDE), read=lambda folder: arrays + arrays, sha256={})
    monkeypatch.setitem(DATASETS._entries, "mnist", small)
    monkeypatch.setitem(unet.SIZES, "mnist", {**unet.SIZES["mnist"], "width": 16, "layers": 1, "multipliers": (1,)})
    for name in ("mnist_measure", "mnist_table"):
        monkeypatch.setattr(f"{name}.SAMPLING_STEPS", (2, 3))
    return module


@pytest.fixture
def measure(mnist):
    """The measurements of the experiment as a module."""
    return sys.modules["mnist_measure"]


def row(name: str, seed: int = 1) -> dict:
    return json.loads(Path(f"out/{name}-seed{seed}.json").read_text())


def feature_statistics(images: torch.Tensor) -> Statistics:
    """Statistics of the features `Averages`, computed independently."""
    planes = images.reshape(-1, 1, SIDE, SIDE).float() / 255
    large = torch.nn.functional.interpolate(planes, (299, 299), mode="bilinear", align_corners=False)
    found = Statistics.empty(16)
    found.update(torch.nn.functional.adaptive_avg_pool2d(2 * large - 1, 4).flatten(1))
    return found


def test_rows_and_table_hold_nelbo_fid_and_speed(mnist, measure, monkeypatch, capsys):
    assert mnist.main(["out", "--methods", "m2s-offset,ar", *COMMON]) == 0
    ours, ar = row("m2s-offset"), row("ar")
    assert ours["settings"] == ar["settings"]
    assert (ours["network"], ar["network"]) == ("unet", "dit")
    assert [each["steps"] for each in ours["samples"]] == [2, 3]
    assert [each["steps"] for each in ar["samples"]] == [SIDE * SIDE]
    checkpoint = m2s.load("out/runs/ar-seed1")
    x_0 = m2s.data.load("mnist").test[torch.arange(LIMIT) * 32 // LIMIT].long()
    with torch.no_grad():
        logits = checkpoint.model(checkpoint.head.network_input(x_0), torch.full((LIMIT,), 0.5))[..., :256]
    bits = -logits.log_softmax(-1).gather(-1, x_0.unsqueeze(-1)).mean() / np.log(2)
    assert ar["nelbo"]["nelbo"]["value"] == pytest.approx(float(bits), rel=1e-4)
    terms = [ours["nelbo"][term]["value"] for term in ("integral", "prior", "reconstruction")]
    assert ours["nelbo"]["nelbo"]["value"] == pytest.approx(sum(terms), rel=1e-9)
    for name, found in (("m2s-offset", ours), ("ar", ar)):
        drawn = torch.from_numpy(np.load(f"out/{name}-seed1.npz")["tokens"])
        assert drawn.shape == (LIMIT, SIDE * SIDE)
        distance = frechet(feature_statistics(drawn), feature_statistics(m2s.data.load("mnist").test[:LIMIT]))
        assert found["samples"][-1]["fid"] == pytest.approx(distance, rel=1e-3, abs=1e-5)
        assert found["images_per_second"] > 0 and found["peak_gib"] is None

    # A second call changes nothing, and the table needs the files of the rows only.
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    monkeypatch.setattr(measure, "train", None)
    assert mnist.main(["out", "--methods", "m2s-offset,ar", *COMMON]) == 0
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before
    for path in ("net.pt", "out/runs/ar-seed1/model.safetensors"):
        Path(path).unlink()
    capsys.readouterr()
    assert mnist.main(["out", "--table"]) == 0
    lines = capsys.readouterr().out.splitlines()
    value = ours["nelbo"]["nelbo"]
    assert lines[2].startswith(
        f"| `m2s-offset` | {value['value']:.4f} ± {value['rows_error']:.4f} | {ours['samples'][0]['fid']:.2f} |"
    )
    assert f"{ar['samples'][0]['fid']:.2f} ({SIDE * SIDE} steps)" in lines[3]
    assert {line.count("|") for line in lines[:4]} == {len(measure.SAMPLING_STEPS) + 7}
    assert "causal transformer" in lines[-1] and "`ar`" in lines[-1]
    assert json.loads(Path("out/mnist.json").read_text())["rows"] == [ours, ar]
    assert all(Path(f"out/{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("mnist", "mnist-samples"))


def test_failed_row_is_recorded_and_repeated_and_others_continue(mnist, measure, monkeypatch, capsys):
    real = measure.train
    tried = []

    def train(config, source):
        tried.append(config.method)
        if config.method == "sedd" and len(tried) == 1:
            raise torch.OutOfMemoryError("no memory for it")
        return real(config, source)

    monkeypatch.setattr(measure, "train", train)
    assert mnist.main(["out", "--methods", "sedd,md4", *COMMON]) == 1
    assert row("sedd")["error"] == "OutOfMemoryError: no memory for it" and "nelbo" in row("md4")
    assert mnist.main(["out", "--table"]) == 0
    assert "| `sedd` | failed: OutOfMemoryError: no memory for it |" in capsys.readouterr().out
    assert mnist.main(["out", "--methods", "sedd,md4", *COMMON]) == 0
    assert tried == ["sedd", "md4", "sedd"] and "error" not in row("sedd")


def test_no_row_starts_after_the_time_limit(mnist):
    assert mnist.main(["out", "--methods", "m2s", "--seconds", "-1", *COMMON]) == 0
    assert not list(Path("out").iterdir())


def test_errors_are_raised_before_anything_is_written(mnist, monkeypatch, capsys):
    cases = {
        ("--methods", "m2s,sed"): "there is no method 'sed': did you mean sedd",
        ("--steps", "1"): "at least 2",
        ("--limit", "1"): "at least 2 images",
        ("--table",): "has no rows",
        ("--seeds", "1,x"): "--seeds is 1,x, but it must be whole numbers",
        ("--validate-every", "1"): "must be 0 or at least 2",
        ("--validate-every", "-2"): "must be 0 or at least 2",
        ("--table", "--results", "mnist.txt"): "must end in .json",
        (): "Inception's weights are neither in",
    }
    for arguments, message in cases.items():
        assert mnist.main(["out", *arguments]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(DATASETS._entries, "mnist", replace(DATASETS["mnist"], sha256={"train-images-idx3-ubyte": ""}))
    assert mnist.main(["out", *COMMON]) == 2
    assert "mnist: " in (message := capsys.readouterr().err) and "has no train-images-idx3-ubyte" in message
    assert not Path("out").exists()


def test_rows_of_one_table_need_the_same_settings(mnist, capsys):
    Path("out").mkdir()
    failed = {"method": "m2s", "settings": {"updates": 9, "seed": 1}, "error": "x"}
    Path("out/m2s-seed1.json").write_text(json.dumps(failed))
    assert mnist.main(["out", *COMMON]) == 2
    assert "was made with updates 9, not 4" in capsys.readouterr().err
    failed = {"method": "sedd", "settings": {"updates": 8, "seed": 2}, "error": "x"}
    Path("out/sedd-seed2.json").write_text(json.dumps(failed))
    assert mnist.main(["out", "--table"]) == 2
    assert "sedd-seed2.json was made with updates 8, not 9" in capsys.readouterr().err
    # A row with validations, and a table without them.
    Path("out/m2s-seed1.json").unlink()
    failed["settings"] = {"updates": STEPS, "batch": LIMIT, "test_images": LIMIT, "passes": 2, "samples": LIMIT, "seed": 2}
    failed["settings"] |= {"micro_batch": LIMIT, "grid": "cosine", "validate_every": 2}
    Path("out/sedd-seed2.json").write_text(json.dumps(failed))
    assert mnist.main(["out", *COMMON]) == 2
    assert "was made with validate_every 2, not None" in capsys.readouterr().err


def test_rows_are_imported_from_a_table(mnist, measure, monkeypatch, capsys):
    """Imported rows replace failed ones, finished rows of the folder stay, and a row without samples has no picture."""
    assert mnist.main(["first", "--methods", "sedd,md4", *COMMON]) == 0
    assert mnist.main(["first", "--table"]) == 0
    Path("out").mkdir()
    mine = {**json.loads(Path("first/md4-seed1.json").read_text()), "mine": True}
    Path("out/md4-seed1.json").write_text(json.dumps(mine))
    failed = {"method": "sedd", "settings": mine["settings"], "error": "x"}
    Path("out/sedd-seed1.json").write_text(json.dumps(failed))
    monkeypatch.setattr(measure, "train", None)
    assert mnist.main(["out", "--rows", "first/mnist.json", "--methods", "sedd,md4", *COMMON]) == 0
    assert "all rows are finished" in capsys.readouterr().out
    assert row("md4") == mine and row("sedd") == json.loads(Path("first/sedd-seed1.json").read_text())
    assert mnist.main(["out", "--table"]) == 0
    assert Path("out/mnist.png").exists() and not Path("out/mnist-samples.png").exists()
    Path("out/md4-seed1.npz").write_bytes(Path("first/md4-seed1.npz").read_bytes())
    drawn = []
    monkeypatch.setattr(
        "m2s.report.methods.plot_sample_sheet", lambda pictures: drawn.append(list(pictures)) or plot_sample_sheet(pictures)
    )
    assert mnist.main(["out", "--table"]) == 0
    assert drawn == [["md4"]] and Path("out/mnist-samples.png").exists()

    for name, text in {"none.json": "[]", "bad.json": "{"}.items():
        Path(name).write_text(text)
    for name in ("none.json", "bad.json", "missing.json"):
        assert mnist.main(["third", "--rows", name, "--table"]) == 2
        assert f"--rows is {name}, but no rows can be read there" in capsys.readouterr().err
    mine["settings"] = {**mine["settings"], "updates": 9}
    Path("out/md4-seed1.json").write_text(json.dumps(mine))
    assert mnist.main(["out", "--rows", "first/mnist.json", "--table"]) == 2
    assert "must have the same settings" in capsys.readouterr().err
    assert not Path("third").exists()


def test_seeds_are_rows_of_one_table(mnist, capsys):
    """A seed is another training run, and later seeds extend the table. Figures show the first seed of each method."""
    assert mnist.main(["out", "--methods", "md4,m2s-offset", "--seeds", "2", *COMMON]) == 0
    assert mnist.main(["out", "--table", "--results", "results/table.json"]) == 0
    assert "seed" not in capsys.readouterr().out.partition("| method")[2]  # one seed needs no label
    assert mnist.main(["out", "--methods", "m2s-offset", "--seeds", "10,2,10", *COMMON]) == 0
    configs = {seed: json.loads(Path(f"out/runs/m2s-offset-seed{seed}/train.json").read_text()) for seed in (2, 10)}
    assert [configs[seed]["config"]["run"]["seed"] for seed in (2, 10)] == [2, 10]
    assert [row("m2s-offset", seed)["settings"]["seed"] for seed in (2, 10)] == [2, 10]
    assert row("m2s-offset", 2)["nelbo"] != row("m2s-offset", 10)["nelbo"]
    assert mnist.main(["another", "--rows", "results/table.json", "--seconds", "-1", *COMMON]) == 0
    Path("another/m2s-offset-seed10.json").write_text(json.dumps(row("m2s-offset", 10)))
    capsys.readouterr()
    assert mnist.main(["another", "--table", "--results", "results/table.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    labels = ["`m2s-offset`, seed 2", "`m2s-offset`, seed 10", "`md4`, seed 2"]
    assert [line.split("|")[1].strip() for line in lines[2:5]] == labels
    table = json.loads(Path("results/table.json").read_text())
    assert table["rows"] == [row("m2s-offset", 2), row("m2s-offset", 10), row("md4", 2)] and "seed" not in table["settings"]
    assert sorted(path.name for path in Path("results").iterdir()) == ["table-samples.png", "table.json", "table.png"]


def test_figures_show_the_first_seed(mnist, monkeypatch):
    assert mnist.main(["out", "--methods", "md4", "--seeds", "3,2", *COMMON]) == 0
    shown = {}
    for name in ("plot_method_comparison", "plot_sample_sheet"):
        monkeypatch.setattr(f"m2s.report.methods.{name}", lambda *given, name=name: shown.setdefault(name, given) and None)
    assert mnist.main(["out", "--table"]) == 0
    assert shown["plot_method_comparison"][0] == [row("md4", 2)]
    samples = np.load("out/md4-seed2.npz")["tokens"].reshape(LIMIT, SIDE, SIDE)
    assert list(shown["plot_sample_sheet"][0]) == ["md4"] and np.array_equal(shown["plot_sample_sheet"][0]["md4"], samples)


def test_validations_on_the_way_are_those_of_the_trainer(mnist, capsys):
    """They do not change the training run, and the last one of an autoregressive model is its exact NELBO."""
    trace = ["--validate-every", "2"]
    assert mnist.main(["out", "--methods", "m2s-offset,ar", *trace, *COMMON]) == 0
    assert mnist.main(["without", "--methods", "m2s-offset", *COMMON]) == 0
    plain = json.loads(Path("without/m2s-offset-seed1.json").read_text())
    assert "validation" not in plain and plain["nelbo"] == row("m2s-offset")["nelbo"]
    for name in ("m2s-offset", "ar"):
        found = row(name)
        assert found["settings"]["validate_every"] == 2 and found["settings"]["validation_images"] == LIMIT
        assert [point["step"] for point in found["validation"]] == [2, STEPS]
        for point in found["validation"]:
            assert point["bits"] == pytest.approx(point["integral"] + point["prior"] + point["reconstruction"])
            assert point["error"] > 0
        assert found["images_per_second"] > 0
    assert row("ar")["validation"][-1]["bits"] == pytest.approx(row("ar")["nelbo"]["nelbo"]["value"], rel=1e-5)
    capsys.readouterr()
    assert mnist.main(["out", "--table"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("| step | `m2s-offset` | `ar` |")
    for line, step in zip(lines[start + 2 :], (2, STEPS), strict=True):
        bits = [next(p["bits"] for p in row(name)["validation"] if p["step"] == step) for name in ("m2s-offset", "ar")]
        assert line == f"| {step} | {bits[0]:.4f} | {bits[1]:.4f} |"


def test_speed_leaves_validations_out(measure, monkeypatch):
    """A clock that counts 1 s for each training batch and 100 s for each batch of a validation."""
    now = [0.0]
    monkeypatch.setattr(measure.time, "monotonic", lambda: now[0])
    source = measure.TimedSource(m2s.data.load("mnist"), torch.device("cpu"), 40, lambda: None)
    for step in range(1, 41):
        now[0] += 1
        source.train(torch.arange(4))
        if step % 8 == 0:
            for _ in range(3):
                source.validation(torch.arange(2))
                now[0] += 100
    # Batches 20 to 40 are 20 steps. The validations after batches 24 and 32 pause the clock for one step each.
    assert source.pauses == [301, 301]
    assert source.measurements(4)["images_per_second"] == 18 * 4 / 18


def test_missing_or_damaged_inception_weights_are_an_error_before_the_first_row(mnist, monkeypatch, capsys):
    """Otherwise a row would be trained and have no FID."""
    weights = Path("net.pt").read_bytes()
    Path("net.pt").unlink()
    assert mnist.main(["out", "--methods", "md4", *COMMON]) == 2
    assert "net.pt is no file: give Inception's weights" in capsys.readouterr().err
    Path("net.pt").write_bytes(weights[: len(weights) // 2])  # a copy that was not finished
    assert mnist.main(["out", "--methods", "md4", *COMMON]) == 2
    assert "net.pt" in capsys.readouterr().err and not Path("out").exists()


def test_a_row_that_fails_after_training_is_evaluated_later(mnist, measure, monkeypatch, capsys):
    """It keeps its training run, which is not repeated."""

    def fail(*_):
        raise RuntimeError("no features")

    trace = ["--validate-every", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(measure, "statistics", fail)
        assert mnist.main(["out", "--methods", "md4", *trace, *COMMON]) == 1
    assert "md4-seed1 failed" in capsys.readouterr().err
    assert mnist.main(["out", "--table"]) == 0
    assert "| step | `md4` |" in capsys.readouterr().out
    (failed,) = json.loads(Path("out/mnist.json").read_text())["rows"]
    assert failed["error"] == "RuntimeError: no features" and "nelbo" not in failed
    before = Path("out/runs/md4-seed1/model.safetensors").read_bytes()
    assert mnist.main(["out", "--methods", "md4", *trace, *COMMON]) == 0
    for key in ("images_per_second", "peak_gib", "validation"):
        assert failed[key] == row("md4")[key]
    assert [point["step"] for point in failed["validation"]] == [2, STEPS]
    assert Path("out/runs/md4-seed1/model.safetensors").read_bytes() == before and "fid" in row("md4")["samples"][0]


def test_warmup_is_a_tenth_of_the_steps_and_at_most_that_of_the_preset(measure):
    images = m2s.data.load("mnist")
    for steps, warmup in ((3000, 300), (5000, 500), (11_700, 500)):
        settings = {"updates": steps, "batch": 256, "test_images": 32}
        experiment = measure.Experiment(Path("out"), images, torch.device("cpu"), None, settings, None)
        config = experiment.config(measure.RowKey("m2s", 2), Path("out/runs/m2s-seed2"))
        assert (config.optimizer.warmup, config.run.seed, config.run.steps) == (warmup, 2, steps)
