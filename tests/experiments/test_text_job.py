"""experiments/text_job.py on a small text: stages of a row, calls that run out of time, and the results that are packed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import m2s
from m2s.cli import main as m2s_main
from m2s.data import Bytes, prepare_text
from m2s.training import loop

FOLDER = Path(__file__).parents[2] / "experiments"
NETWORK = {"network.size": "tiny", "network.width": 16, "network.depth": 1, "network.heads": 2, "data.length": 16, "batch": 4}
SETTINGS = {**NETWORK, "optimizer.warmup": 2, "log_every": 2, "validate_every": 40}
COMMON = ["--data", "packed", "--n", "8", "--audited", "4", "--steps", "2", "4", "--micro-batch", "4", "--bundle", "back"]
COMMON += ["--temperatures", "0.8"]
TEXT = ["--", "--budget", "0.3", "--limit", "3", "--set", *(f"{key}={value}" for key, value in SETTINGS.items())]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The script as a module, in a folder with a small prepared text."""
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("job_script", FOLDER / "text_job.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "MARGIN", 0.0)
    for name in ("steps", "save_every"):  # of the short run that measures the speed
        monkeypatch.setitem(module.text.PROBE, name, 24)
    documents = [f"document {number} has größe {number * number}" for number in range(40)]
    Path("source.txt").write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    prepare_text("source.txt", "packed", Bytes(), validation_fraction=0.2)
    return module


def read(path: str | Path) -> dict:
    return json.loads(Path(path).read_text())


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_rows_from_training_to_packed_results(job, monkeypatch, capsys):
    assert job.main(["out", "--rows", "sedd,m2s-offset", "--weights", *COMMON, *TEXT]) == 0
    for row in ("sedd", "m2s-offset"):
        found, budget = read(f"out/{row}.json"), read(f"out/budgets/{row}.json")
        assert found["tokens"] == budget["steps"] * 64 and budget["steps"] % 4 == 0
        # floor(seconds * rate / tokens of a step) to a multiple of the states, and at least one step between them
        assert budget["steps"] == max(4, int(0.3 * budget["tokens_per_second"] / 64) // 4 * 4)
        assert found["budget"]["epochs"] == found["tokens"] / read("out/entry.json")["data"]["train_tokens"]
        assert found["budget"]["training_seconds"] + found["budget"]["other_seconds"] == pytest.approx(
            found["seconds"]["train"]
        )
        assert len(list(Path(f"out/runs/{row}/state").iterdir())) == 4
        small = m2s.load(f"out/weights/{row}").model.state_dict()
        for name, value in m2s.load(f"out/runs/{row}").model.state_dict().items():
            assert small[name].dtype == torch.bfloat16 and torch.equal(small[name], value.bfloat16())
    assert job.transfer.main(["join", "back", "arrived"]) == 0
    there = files(Path("arrived/results"))
    run = {"train.json", "log.jsonl", "config.json"}
    expected = {"entry.json", *(f"{row}.json" for row in ("sedd", "m2s-offset"))}
    expected |= {f"{kind}/{row}{end}" for row in ("sedd", "m2s-offset") for kind, end in (("budgets", ".json"),)}
    expected |= {f"runs/{row}/{name}" for row in ("sedd", "m2s-offset") for name in run}
    expected |= {f"samples/sedd/analytic-linear-{steps}.npz" for steps in (2, 4)}
    expected |= {
        f"samples/m2s-offset/{s}-{g}-{n}.npz" for s in ("bayes", "euler") for g in ("cosine", "linear") for n in (2, 4)
    }
    expected |= {"samples/m2s-offset/bayes-cosine-2-T0.8.npz"}
    expected |= {f"samples/sedd-projected/analytic-linear-2-T{temperature}.npz" for temperature in ("0.8", "1")}
    expected |= {f"repair/sedd-{n}/{name}" for n in (2, 4) for name in ("projected.npz", "repair.json", "repair.txt")}
    steps = read("out/budgets/sedd.json")["steps"]
    audits = ["audit", "audit-4", "audit-steps-2", f"audit-state-{steps // 4}", f"audit-state-{steps // 2}"]
    expected |= {f"audits/sedd-{name}/audit.{end}" for name in audits for end in ("json", "txt", "png")}
    assert there == expected

    # An audit is that of the named checkpoint, and the samples of sedd are those of m2s sample.
    for name, step in (("audit", steps), (f"audit-state-{steps // 4}", steps // 4)):
        found = read(f"arrived/results/audits/sedd-{name}/audit.json")
        checkpoint = "out/runs/sedd" if step == steps else f"out/states/sedd-{step}"
        assert found["checkpoint"] == checkpoint and m2s.load(checkpoint).config["extra"]["step"] == step
        assert found["overall"]["position_steps"] == (4 if step == steps else 1) * 4 * 16
    score = ["--sampler", "analytic", "--grid", "linear"]
    for name, words in (  # a temperature sharpens a posterior: of a score that of the projected one
        ("sedd/analytic-linear-4", ["--steps", "4", *score]),
        ("sedd-projected/analytic-linear-2-T0.8", ["--steps", "2", *score, "--project", "--temperature", "0.8"]),
        ("m2s-offset/bayes-cosine-2-T0.8", ["--steps", "2", "--sampler", "bayes", "--temperature", "0.8"]),
    ):
        run, out = f"out/runs/{name.partition('/')[0].removesuffix('-projected')}", f"again/{name}.npz"
        m2s_main(["sample", run, "--out", out, "--n", "8", "--micro-batch", "4", *words])
        with np.load(out) as again, np.load(f"arrived/results/samples/{name}.npz") as packed:
            assert np.array_equal(again["tokens"], packed["tokens"]), name

    # Figures are made from what arrived, each by one command.
    monkeypatch.chdir("arrived/results")
    m2s_main(["figure", "audit", "--source", "audits/sedd-audit/audit.json", "runs/sedd", "--out", "audit.pdf"])
    m2s_main(["figure", "losses", "--source", "runs/sedd", "--out", "losses.pdf"])
    monkeypatch.chdir("../..")

    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*.npz") if "bundle" not in path.parts}
    capsys.readouterr()
    assert job.main(["out", "--rows", "sedd", "--seconds", "0", *COMMON, *TEXT]) == 0
    assert capsys.readouterr().out == "1 parts of results in back\n"
    monkeypatch.setattr(job, "run_m2s", None)  # nothing is computed again
    assert job.main(["out", "--rows", "sedd", *COMMON, *TEXT]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_interrupted_training_and_sampling_resume(job, monkeypatch, capsys):
    """A signal stops training between two steps, and then sampling between two batches. The third call finishes.

    The row is an entry of the leaderboard, with the time of both calls that trained it.
    """
    train, finish, draw = job.text.train, loop.finish_step, job.run_m2s
    started, verified = [], []

    def verify(words):
        folder = Path(words[1])
        verified.append(job.text_leaderboard.leaderboard.read_entry(folder))
        assert files(folder / "seed-1") == {"config.json", "model.safetensors", "train.json", "log.jsonl"}
        (folder / "verified.json").write_text("{}")
        return 0

    monkeypatch.setattr(job.text_leaderboard.leaderboard, "main", verify)

    def recorded_train(config):
        started.append(config.run.out.name)
        return train(config)

    def interrupted_step(trainer, *given):
        if started == ["mdlm-probe", "mdlm"] and trainer.progress.step == 2:
            signal.raise_signal(signal.SIGALRM)
        return finish(trainer, *given)

    monkeypatch.setattr(job.text, "train", recorded_train)
    monkeypatch.setattr(loop, "finish_step", interrupted_step)
    given = ["out", "--rows", "mdlm", "--leaderboard", *COMMON, "--seconds", "600", *TEXT]
    assert job.main(given) == 0
    assert "not finished" in capsys.readouterr().out
    steps = read("out/budgets/mdlm.json")["steps"]
    saved = [int(path.name.removeprefix("step-")) for path in Path("out/runs/mdlm/state").iterdir()]
    assert max(saved) == 3 < steps and not Path("out/mdlm.json").exists()
    assert job.transfer.main(["join", "back", "first"]) == 0
    assert files(Path("first/results")) == {"entry.json", "budgets/mdlm.json", *(f"runs/mdlm/{n}" for n in job.RUN_FILES)}
    half = read("out/clock/mdlm.json")["seconds"]
    assert half > 0 and not verified

    def interrupted_draw(words):
        signal.raise_signal(signal.SIGALRM)
        time.sleep(5)  # not reached

    monkeypatch.setattr(job, "run_m2s", interrupted_draw)
    assert job.main(given) == 0
    assert "not finished" in capsys.readouterr().out and started == ["mdlm-probe", "mdlm", "mdlm"]
    row = read("out/mdlm.json")
    (entry,) = verified
    seconds = entry["runs"][0]["seconds"]
    assert seconds == round(read("out/clock/mdlm.json")["seconds"], 1) > half
    assert seconds > job.text.logged_seconds(Path("out/runs/mdlm")) and entry["runs"][0]["command"] == row["train"]
    assert row["tokens"] == steps * 64 and not Path("out/samples/mdlm/ancestral-linear-2.npz").exists()

    monkeypatch.setattr(job, "run_m2s", draw)
    assert job.main(given) == 0
    assert "finished: mdlm" in capsys.readouterr().out and len(started) == 3
    assert job.transfer.main(["join", "back", "last"]) == 0
    assert {f"samples/mdlm/ancestral-linear-{n}.npz" for n in (2, 4)} <= files(Path("last/results"))
    assert {f"leaderboard/mdlm/{name}.json" for name in ("entry", "verified")} <= files(Path("last/results"))
    assert read("out/clock/mdlm.json")["seconds"] == pytest.approx(seconds, abs=0.051)  # the third call trained nothing


def test_important_stages_of_all_rows_are_first(job, monkeypatch):
    """All rows are trained before any samples are drawn, and a call with --level 1 leaves out the later stages."""
    done = []
    train, results = job.text.main, {"audit": ("audit.json",), "repair": ("repair.json", "unprojected.npz")}

    def recorded_train(words):
        done.append(("train", words[words.index("--rows") + 1]))
        return train(words)

    def recorded_draw(words):
        """Write empty results in place of samples, audits and repairs."""
        done.append((words[0], Path(words[1]).name))
        out = Path(words[words.index("--out") + 1])
        for path in [out / name for name in results.get(words[0], ())] or [out]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    monkeypatch.setattr(job.text, "main", recorded_train)
    monkeypatch.setattr(job, "run_m2s", recorded_draw)
    given = ["out", "--rows", "m2s-offset,sedd", *COMMON, *TEXT]
    assert job.main(["out", "--level", "1", *given[1:]]) == 0
    trained, first = [("train", "m2s-offset"), ("train", "sedd")], [("sample", "m2s-offset")] * 2
    assert done == [*trained, *first, ("audit", "sedd"), *[("repair", "sedd")] * 2]
    done.clear()
    assert job.main(given) == 0
    states = [path.name for path in sorted(Path("out/states").iterdir(), key=lambda one: int(one.name[5:]))]
    audits = [("audit", "sedd"), *(("audit", name) for name in states), ("audit", "sedd")]
    others = [*[("sample", "m2s-offset")] * (3 * 2 + 1), *[("sample", "sedd")] * 2]
    assert done == [*trained, *audits, *others]


def test_results_are_packed_while_the_call_runs(job, monkeypatch, capsys):
    """The first row is packed before the second one is trained. Results that do not fit do not end the call."""
    train, seen = job.text.main, []

    def recorded_train(words):
        if Path("back").exists():
            assert job.transfer.main(["join", "back", "so-far"]) == 0
            seen.append(files(Path("so-far/results")))
        return train(words)

    monkeypatch.setattr(job.text, "main", recorded_train)
    assert job.main(["out", "--rows", "mdlm,gidd-0", "--level", "1", *COMMON, *TEXT]) == 0
    assert len(seen) == 1 and "mdlm.json" in seen[0] and not any(name.startswith("samples") for name in seen[0])
    monkeypatch.setattr(job, "TOTAL_MIB", 0.001)
    job.bundle_so_far(job.parse(["out", "--rows", "mdlm", *COMMON]))
    assert "not packed" in capsys.readouterr().err


def test_the_script_of_a_whole_job_ends_in_time(job):
    """Rows, then the stages of all levels, with results to copy; without judges. A job without time left starts nothing."""
    Path("packed").rename("text")
    words = ["bash", str(FOLDER / "text_job.sh"), str(Path.cwd()), "methods", "mdlm"]
    environment = {**os.environ, "JUDGES": "", "PYTHON": sys.executable}
    later = [*COMMON[2:-4], "--temperatures", "0.8", *TEXT]
    done = subprocess.run([*words, "600", *later], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "the job ended" in done.stdout, done.stderr[-2000:]
    assert job.transfer.main(["join", "back", "arrived"]) == 0
    found = files(Path("arrived/results"))
    assert {"mdlm.json", "samples/mdlm/ancestral-linear-4.npz", "samples/mdlm/ancestral-linear-2-T0.8.npz"} <= found
    before = Path("out/mdlm.json").read_bytes()
    assert 500 < int(Path("end").read_text()) - time.time() < 600
    done = subprocess.run([*words, "5", *later], env=environment, capture_output=True, text=True, timeout=300)
    assert "level" not in done.stdout and Path("out/mdlm.json").read_bytes() == before


def test_a_stage_that_fails_does_not_stop_the_others(job, monkeypatch, capsys):
    draw = job.run_m2s

    def fails_once(words):
        if "bayes" in words and "cosine" in words:
            raise RuntimeError("no memory for it")
        draw(words)

    monkeypatch.setattr(job, "run_m2s", fails_once)
    assert job.main(["out", "--rows", "m2s", *COMMON, *TEXT]) == 1
    assert "no memory for it" in capsys.readouterr().err
    found = {path.name for path in Path("out/samples/m2s").iterdir()}
    assert found == {f"{name}-{n}.npz" for name in ("bayes-linear", "euler-cosine", "euler-linear") for n in (2, 4)}


def test_every_method_of_the_entries_has_samplers_that_support_it(job):
    for entry in job.text.BUDGETED.values():
        for row in entry.rows.values():
            assert row["method"] in job.SAMPLINGS


def test_invalid_rows_and_large_results_are_errors(job, monkeypatch, capsys):
    assert job.main(["out", "--rows", "sed", *COMMON]) == 2
    assert "did you mean sedd" in capsys.readouterr().err and not Path("out").exists()
    Path("out").mkdir()
    Path("out/sedd.json").write_bytes(np.random.default_rng(0).bytes(100_000))
    monkeypatch.setattr(job, "TOTAL_MIB", 0.05)
    monkeypatch.setattr(job, "PART_MIB", 0.02)
    with pytest.raises(job.UserError, match="bundle fewer rows at once"):
        job.bundle(Path("out"), ["sedd"], Path("back"))
