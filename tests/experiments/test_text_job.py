"""experiments/text_job.py on a small text: stages of a row, calls that run out of time, and the results that are packed."""

import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import m2s
import m2s.report.audit
from m2s.cli import main as m2s_main
from m2s.data import Bytes, prepare_text
from m2s.ops import use_backend, uses_triton
from m2s.training import loop

FOLDER = Path(__file__).parents[2] / "experiments"
NETWORK = {"network.size": "tiny", "network.width": 16, "network.depth": 1, "network.heads": 2, "data.length": 16, "batch": 4}
SETTINGS = {**NETWORK, "optimizer.warmup": 2, "log_every": 2, "validate_every": 40}
COMMON = ["--data", "packed", "--n", "8", "--audited", "4", "--steps", "2", "4", "--micro-batch", "4", "--bundle", "back"]
COMMON += ["--temperatures", "0.8"]
TEXT = ["--", "--budget", "0.05", "--limit", "3", "--set", *(f"{key}={value}" for key, value in SETTINGS.items())]


def load(monkeypatch: pytest.MonkeyPatch, folder: Path):
    """The script as a module, in a folder with a small prepared text."""
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("job_script", FOLDER / "text_job.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "MARGIN", 0.0)
    monkeypatch.setitem(sys.modules["text_row"].PROBE, "steps", 8)
    if not Path("packed").exists():
        documents = [f"document {number} has größe {number * number}" for number in range(40)]
        Path("source.txt").write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
        prepare_text("source.txt", "packed", Bytes(), validation_fraction=0.2)
    return module


@pytest.fixture
def job(tmp_path, monkeypatch):
    return load(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def finished_job(tmp_path_factory):
    """The folder of a job with two rows that has ended, and what was packed after each row and stage."""
    folder, seen = tmp_path_factory.mktemp("whole"), []
    with pytest.MonkeyPatch.context() as monkeypatch:
        job = load(monkeypatch, folder)
        packer = job.Packer.__call__

        def recorded_pack(self):
            message = packer(self)
            seen.append(packed_files())
            return message

        monkeypatch.setattr(job.Packer, "__call__", recorded_pack)
        monkeypatch.setattr(m2s.report.audit, "write_figure", lambda found, path: path.touch())
        assert job.main(["out", "--rows", "sedd,m2s-offset", "--weights", *COMMON, *TEXT]) == 0
    return folder, seen


@pytest.fixture
def trained(finished_job, tmp_path, monkeypatch):
    """The script in a folder where both rows are trained, and no samples are drawn."""
    for name in ("packed", "out"):
        leave_out = shutil.ignore_patterns("samples", "audits", "repair", "states", "bundle", "weights")
        shutil.copytree(finished_job[0] / name, tmp_path / name, ignore=leave_out)
    return load(monkeypatch, tmp_path)


class FakeDraws:
    """Writes empty results in place of samples, audits and repairs, and records the commands.

    Args:
        monkeypatch: Replaces the function that runs commands of m2s.
        size: Bytes of each result.
        before: Called before the results of a command are written, with its words.
    """

    RESULTS: ClassVar = {"audit": ("audit.json",), "repair": ("unprojected.npz", "repair.json")}

    def __init__(self, monkeypatch, size=0, before=lambda words: None):
        self.done, self.size, self.before = [], size, before
        monkeypatch.setattr(sys.modules["job_stages"], "run_m2s", self)

    def __call__(self, words):
        out = Path(words[words.index("--out") + 1])
        self.done.append((words[0], Path(words[1]).name))
        for path in [out / name for name in self.RESULTS.get(words[0], ())] or [out]:
            self.before(words)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(np.random.default_rng(len(self.done)).bytes(self.size))


def read(path: str | Path) -> dict:
    return json.loads(Path(path).read_text())


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def packed_files(link: str = "back") -> set[str]:
    """The files that one would get who copies the folder now."""
    shutil.rmtree("unpacked", ignore_errors=True)
    assert sys.modules["transfer"].main(["join", str(Path(link).resolve()), "unpacked"]) == 0
    return files(Path("unpacked/results"))


def repaired(steps: int) -> list[str]:
    """What a repair adds to the packed files: its results, and then its samples without projection."""
    names = ("projected.npz", "repair.json", "repair.txt")
    return [*(f"repair/sedd-{steps}/{name}" for name in names), f"samples/sedd/analytic-linear-{steps}.npz"]


def test_rows_from_training_to_packed_results(finished_job, monkeypatch, capsys):
    folder, seen = finished_job
    job = load(monkeypatch, folder)
    for row in ("sedd", "m2s-offset"):
        found, budget = read(f"out/{row}.json"), read(f"out/budgets/{row}.json")
        assert found["tokens"] == budget["steps"] * 64 and budget["steps"] % 4 == 0
        # floor(seconds * rate / tokens of a step) to a multiple of the states, and at least one step between them
        assert budget["steps"] == max(4, int(0.05 * budget["tokens_per_second"] / 64) // 4 * 4)
        assert found["budget"]["epochs"] == found["tokens"] / read("out/entry.json")["data"]["train_tokens"]
        assert found["budget"]["training_seconds"] + found["budget"]["other_seconds"] == pytest.approx(
            found["seconds"]["train"]
        )
        assert len(list(Path(f"out/runs/{row}/state").iterdir())) == 4
        small = m2s.load(f"out/weights/{row}").model.state_dict()
        for name, value in m2s.load(f"out/runs/{row}").model.state_dict().items():
            assert small[name].dtype == torch.bfloat16 and torch.equal(small[name], value.bfloat16())
    assert sys.modules["transfer"].main(["join", "back", "arrived"]) == 0
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

    # A row and each stage are packed when they have ended. The ends of the curve of the repair are first.
    news = [sorted(after - before) for before, after in zip([set(), *seen], [*seen, there], strict=False)]
    assert all(before <= after for before, after in itertools.pairwise(seen)) and seen[-1] == there
    assert "sedd.json" in news[0] and "m2s-offset.json" in news[1]
    order = [name for new in news for name in new if name.startswith(("audits/sedd-audit/", "repair", "samples/sedd/"))]
    ends = [name for steps in (4, 2) for name in repaired(steps)]
    assert order == [*(f"audits/sedd-audit/audit.{end}" for end in ("json", "png", "txt")), *ends]

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
    assert capsys.readouterr().out == f"31 files, {packed_bytes() / 2**20:.1f} MiB in back\n"
    monkeypatch.setattr(sys.modules["job_stages"], "run_m2s", None)  # nothing is computed again
    assert job.main(["out", "--rows", "sedd", *COMMON, *TEXT]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_interrupted_training_and_sampling_resume(job, monkeypatch, capsys):
    """A signal stops training between two steps, and then sampling between two batches. The third call finishes.

    The row is an entry of the leaderboard, with the time of both calls that trained it.
    """
    train, finish, draw = sys.modules["text_row"].train, loop.finish_step, sys.modules["job_stages"].run_m2s
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

    monkeypatch.setattr(sys.modules["text_row"], "train", recorded_train)
    monkeypatch.setattr(loop, "finish_step", interrupted_step)
    given = ["out", "--rows", "mdlm", "--leaderboard", *COMMON, "--seconds", "600", *TEXT]
    assert job.main(given) == 0
    assert "not finished" in capsys.readouterr().out
    steps = read("out/budgets/mdlm.json")["steps"]
    saved = [int(path.name.removeprefix("step-")) for path in Path("out/runs/mdlm/state").iterdir()]
    assert max(saved) == 3 < steps and not Path("out/mdlm.json").exists()
    assert sys.modules["transfer"].main(["join", "back", "first"]) == 0
    assert files(Path("first/results")) == {
        "entry.json",
        "budgets/mdlm.json",
        *(f"runs/mdlm/{n}" for n in sys.modules["job_results"].RUN_FILES),
    }
    half = read("out/clock/mdlm.json")["seconds"]
    assert half > 0 and not verified

    def interrupted_draw(words):
        signal.raise_signal(signal.SIGALRM)
        time.sleep(5)  # not reached

    monkeypatch.setattr(sys.modules["job_stages"], "run_m2s", interrupted_draw)
    assert job.main(given) == 0
    assert "not finished" in capsys.readouterr().out and started == ["mdlm-probe", "mdlm", "mdlm"]
    row = read("out/mdlm.json")
    (entry,) = verified
    seconds = entry["runs"][0]["seconds"]
    assert seconds == round(read("out/clock/mdlm.json")["seconds"], 1) > half
    assert (
        seconds > sys.modules["text_speed"].logged_seconds(Path("out/runs/mdlm"))
        and entry["runs"][0]["command"] == row["train"]
    )
    assert row["tokens"] == steps * 64 and not Path("out/samples/mdlm/ancestral-linear-2.npz").exists()

    monkeypatch.setattr(sys.modules["job_stages"], "run_m2s", draw)
    assert job.main(given) == 0
    assert "finished: mdlm" in capsys.readouterr().out and len(started) == 3
    assert sys.modules["transfer"].main(["join", "back", "last"]) == 0
    assert {f"samples/mdlm/ancestral-linear-{n}.npz" for n in (2, 4)} <= files(Path("last/results"))
    assert {f"leaderboard/mdlm/{name}.json" for name in ("entry", "verified")} <= files(Path("last/results"))
    assert read("out/clock/mdlm.json")["seconds"] == pytest.approx(seconds, abs=0.051)  # the third call trained nothing


def test_important_stages_of_all_rows_are_first(trained, monkeypatch):
    """A call with --level 1 leaves out the later stages."""
    fake = FakeDraws(monkeypatch)
    given = ["out", "--rows", "m2s-offset,sedd", *COMMON, *TEXT]
    assert trained.main(["out", "--level", "1", *given[1:]]) == 0
    assert fake.done == [*[("sample", "m2s-offset")] * 2, ("audit", "sedd"), *[("repair", "sedd")] * 2]
    fake.done.clear()
    assert trained.main(given) == 0
    states = [path.name for path in sorted(Path("out/states").iterdir(), key=lambda one: int(one.name[5:]))]
    audits = [("audit", "sedd"), *(("audit", name) for name in states), ("audit", "sedd")]
    others = [*[("sample", "m2s-offset")] * (3 * 2 + 1), *[("sample", "sedd")] * 2]
    assert fake.done == [*audits, *others]


def test_a_process_that_is_killed_leaves_packed_results(trained, monkeypatch, capsys):
    """A signal during the second arm of a repair: the first arm and all earlier stages are packed, and judges can read them."""
    signals = [False, False, True]  # of the audit and of both files of the first repair

    def before(words):
        if signals.pop(0):
            while "repair/sedd-4/unprojected.npz" not in packed_files():  # it is packed at once
                time.sleep(0.01)
            assert "audits/sedd-audit/audit.json" in packed_files()
            signal.raise_signal(signal.SIGTERM)
            time.sleep(5)  # not reached

    monkeypatch.setattr(sys.modules["job_stages"], "WATCH_SECONDS", 0.01)
    FakeDraws(monkeypatch, before=before)
    assert trained.main(["out", "--rows", "sedd", "--level", "1", "--seconds", "600", *COMMON, *TEXT]) == 0
    printed = capsys.readouterr().out
    assert "not finished: the same command continues" in printed and " s left of this call; " in printed
    assert {"audits/sedd-audit/audit.json", "repair/sedd-4/unprojected.npz"} <= packed_files()
    monkeypatch.syspath_prepend(FOLDER)
    import text_judges

    assert text_judges.collect(Path("unpacked/results")) == {
        "sedd/analytic-linear-4": Path("unpacked/results/repair/sedd-4/unprojected.npz")
    }


def test_a_reader_sees_one_version_of_the_results(trained, monkeypatch):
    """A folder that was entered stays complete while others are packed, and old ones are removed."""
    FakeDraws(monkeypatch, size=1000)
    results, opened = sys.modules["job_results"], []

    def run_in_version(self):
        """Pack, and enter the version before."""
        before = Path("back").resolve() if Path("back").exists() else None
        found = results.pack(self.out, self.files(), self.target)
        if before is not None:
            sys.modules["transfer"].join(before, Path("arrived"))
            opened.append(before)
        return found

    monkeypatch.setattr(trained.Packer, "__call__", run_in_version)
    assert trained.main(["out", "--rows", "m2s-offset", "--level", "1", *COMMON, *TEXT]) == 0
    assert len(opened) == 2 and all(path.exists() for path in opened)
    monkeypatch.setattr(results, "VERSION_SECONDS", -1.0)
    trained.main(["out", "--rows", "m2s-offset", "--seconds", "0", *COMMON])
    assert [path.name for path in Path("back.versions").iterdir()] == [Path("back").resolve().name]
    Path("folder").mkdir()
    assert trained.main(["out", "--rows", "m2s-offset", *COMMON[:-3], "folder"]) == 2


def test_results_larger_than_a_transfer_are_packed_in_several(trained, monkeypatch, capsys):
    """The oldest ones are first. A file that does not fit alone is named, and the others are packed."""
    results = sys.modules["job_results"]
    monkeypatch.setattr(results, "TOTAL_MIB", 0.8)
    monkeypatch.setattr(results, "PART_MIB", 0.2)
    FakeDraws(monkeypatch, size=60_000)
    assert trained.main(["out", "--rows", "m2s-offset", *COMMON, *TEXT]) == 0
    first, second, third = (packed_files(link) for link in ("back", "back-2", "back-3"))
    assert not Path("back-4").exists() and not first & second
    for number in (1, 2, 3):
        version = list(results.numbered(Path("back"), number).iterdir())
        assert len(version) <= results.FILES and sum(path.stat().st_size for path in version) <= 0.8 * 2**20
    expected = {path.relative_to("out").as_posix() for path in trained.small_files(Path("out"), ["m2s-offset"])}
    assert first | second | third == expected
    assert {"m2s-offset.json", "samples/m2s-offset/bayes-cosine-2.npz"} <= first
    Path("out/samples/m2s-offset/large.npz").write_bytes(bytes(900_000))
    assert trained.main(["out", "--rows", "m2s-offset", "--seconds", "0", *COMMON]) == 2
    assert "out/samples/m2s-offset/large.npz is larger than a transfer" in capsys.readouterr().err
    assert packed_files() == first
    shutil.rmtree("out/samples")
    assert trained.main(["out", "--rows", "m2s-offset", "--seconds", "0", *COMMON]) == 0
    assert not Path("back-2").exists()


def packed_bytes() -> int:
    return sum(path.stat().st_size for path in Path("back").glob("*.tar.*"))


PYTHON = """#!/usr/bin/env bash
# In place of Python: records the command. The first call of text_job.py works until it is killed.
echo "$*" >> calls.txt
if [[ $1 == */text_job.py && ! -e killed ]]; then
    exec sleep 60
fi
"""


def test_the_script_of_a_whole_job_continues_after_a_kill_and_ends_in_time(job, tmp_path):
    """Level 1, judges, all levels, judges. A job without time left starts nothing."""
    python = Path("python.sh")
    python.write_text(PYTHON.replace("calls.txt", str(tmp_path / "calls.txt")).replace("killed", str(tmp_path / "killed")))
    python.chmod(0o755)
    Path("m2s/judges").mkdir(parents=True)
    words = ["bash", str(FOLDER / "text_job.sh"), str(tmp_path), "methods", "mdlm"]
    environment = {**os.environ, "JUDGES": "one two", "PYTHON": str(tmp_path / python)}
    with Path("job.log").open("w") as log:
        running = subprocess.Popen([*words, "600", *COMMON[2:-4], *TEXT], env=environment, stdout=log, stderr=log)
        while not all(Path(name).exists() and Path(name).read_text() for name in ("calls.txt", "process")):
            time.sleep(0.02)
        Path("killed").touch()
        os.kill(int(Path("process").read_text()), signal.SIGTERM)
        assert running.wait(timeout=60) == 0
    assert "level 1 ended" in Path("job.log").read_text() and "the job ended" in Path("job.log").read_text()
    assert 500 < int(Path("end").read_text()) - time.time() < 600
    calls = [line.split() for line in Path("calls.txt").read_text().splitlines()]
    judges = ["experiments/text_judges.py"] * 2
    assert [one[0] for one in calls] == ["experiments/text_job.py", *judges, "experiments/text_job.py", *judges]
    levels = [job.parse(one[1:]) for one in calls if one[0].endswith("job.py")]
    assert [one.level for one in levels] == [1, 3] and [600 - round(one.seconds, -1) for one in levels] == [200, 100]
    assert levels[0].text[:2] == ["--speeds", "experiments/results/text-rates.json"] and levels[0].text[2:] == TEXT[1:]
    assert levels[0].bundle == tmp_path / "back"
    import text_judges

    read = [text_judges.parse(one[1:]) for one in calls if one[0] == judges[0]]
    assert [one.action for one in read] == ["pack", "judge"] * 2 and read[1].judges == ["one", "two"]
    done = subprocess.run([*words, "5", *TEXT], env=environment, capture_output=True, text=True, timeout=60)
    assert "level" not in done.stdout and len(Path("calls.txt").read_text().splitlines()) == len(calls)


def test_packed_results_are_copied_by_the_script(trained, tmp_path):
    """What the links point to is copied, and names of further transfers are printed."""
    assert trained.main(["out", "--rows", "sedd,m2s-offset", "--seconds", "0", *COMMON]) == 0
    Path("judged").mkdir()
    Path("judged/one.json").write_text("{}")
    for name in ("back-judged", "back-2"):
        sys.modules["job_results"].publish(Path("judged"), Path(name), xz=True)
    Path("job.log").write_text("the job ended, 3 s left\n")
    copy = ["bash", str(FOLDER / "copy_results.sh"), "."]
    done = subprocess.run([*copy, "there/now", "60"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.splitlines() == [
        "the job ended, 3 s left",
        "more results: copy_results.sh . TARGET 0 back-2",
    ]
    assert files(Path("there/now")) == {f"{one}/{name}" for one in ("back", "back-judged") for name in os.listdir(one)}
    assert "sedd.json" in packed_files("there/now/back")
    subprocess.run([*copy, "more", "0", "back-2"], check=True, capture_output=True, timeout=30)
    assert os.listdir("more") == ["back-2"]


def test_a_stage_that_fails_does_not_stop_the_others(trained, monkeypatch, capsys):
    def fail(words):
        if "bayes" in words and "cosine" in words:
            raise RuntimeError("no memory for it")

    FakeDraws(monkeypatch, before=fail)
    assert trained.main(["out", "--rows", "m2s-offset", *COMMON, *TEXT]) == 1
    assert "no memory for it" in capsys.readouterr().err
    found = {path.name for path in Path("out/samples/m2s-offset").iterdir()}
    assert found == {f"{name}-{n}.npz" for name in ("bayes-linear", "euler-cosine", "euler-linear") for n in (2, 4)}


def test_a_stage_that_fails_is_tried_without_kernels(job, capsys):
    pytest.importorskip("triton")
    stages, backends = sys.modules["job_stages"], []

    def run():
        backends.append(uses_triton(torch.empty(1)))
        if backends[-1]:
            raise RuntimeError("a kernel")

    stage = stages.Stage("a draw", Path("absent"), run)
    with use_backend("fused"):  # by Triton's interpreter
        assert stages.run_stages([stage], stages.Clock(0.0, 60.0), str) == []
    assert backends == [True, False] and "failed: a draw: RuntimeError: a kernel" in capsys.readouterr().err


def test_every_method_of_the_entries_has_samplers_that_support_it(job):
    for entry in job.BUDGETED.values():
        for row in entry.rows.values():
            assert row["method"] in sys.modules["text_stages"].SAMPLINGS


def test_the_network_is_compiled_for_many_steps(job):
    stages = sys.modules["text_stages"]
    for row, word, expected in (("m2s-offset", "sample", 8 + 3), ("sedd", "repair", 2), ("ar", "sample", 0)):
        found = stages.Job(Path("out"), job.ENTRIES["methods"], 4, 2, stages.STEPS, 2, compile_from=64).stages(row)
        commands = [stage.name.split() for stage in found if f"m2s {word} " in stage.name]
        compiled = [words for words in commands if "--compile" in words]
        assert len(compiled) == expected
        assert compiled == [words for words in commands if row != "ar" and int(words[words.index("--steps") + 1]) >= 64]


def test_invalid_rows_are_errors(job, capsys):
    assert job.main(["out", "--rows", "sed", *COMMON]) == 2
    assert "did you mean sedd" in capsys.readouterr().err and not Path("out").exists()
