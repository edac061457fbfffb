"""What a run prints and logs: log.jsonl, TensorBoard, Weights & Biases, and lines on the terminal."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import m2s
from m2s.cli import main
from m2s.errors import UserError
from m2s.training import log as log_module
from m2s.training import train
from m2s.training.trainer import Trainer
from small_runs import QUICK, outcome, random_rows, small


class Stop(Exception):
    """Stands for the end of a process."""


def interrupted(config, at: int) -> None:
    """Run, end before step `at`, and resume."""
    gradient = Trainer.gradient

    def ending(trainer, batch):
        if trainer.progress.step == at:
            raise Stop
        return gradient(trainer, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "gradient", ending)
        with pytest.raises(Stop):
            train(config, random_rows())
    train(config, random_rows())


def records(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_tensorboard_has_the_records_of_the_log_after_a_restart_too(tmp_path):
    """Saved at step 4, logged at 6, ended at 7: the records of step 6 are written twice and count once."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    interrupted(small(out, tensorboard=True), at=7)
    events = accumulator.EventAccumulator(str(out / "tensorboard")).Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    expected: dict[str, list[tuple[int, float]]] = {}
    for values in records(out):
        for name, value in values.items():
            if name != "step":
                expected.setdefault(name, []).append((values["step"], pytest.approx(value, rel=1e-6)))
    assert found == expected
    assert [step for step, _ in found["loss"]] == [3, 6, 9, 12]


def test_wandb_gets_the_records_of_the_log_under_one_id(tmp_path, monkeypatch):
    """With a substitute for the package that stores what it gets."""
    begun: list[dict[str, object]] = []
    logged: dict[int, dict[str, float]] = {}

    class FakeRun:
        def log(self, values, step):
            logged.setdefault(step, {}).update(values)

        def finish(self):
            begun[-1]["finished"] = True

    def init(**options):
        begun.append(options)
        return FakeRun()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=Stop))
    interrupted(small(tmp_path / "run", wandb=True), at=7)
    expected: dict[int, dict[str, float]] = {}
    for values in records(tmp_path / "run"):
        expected.setdefault(values.pop("step"), {}).update(values)
    assert logged == expected
    train(small(tmp_path / "other", wandb=True, steps=1), random_rows())
    assert begun[0]["id"] == begun[1]["id"] != begun[2]["id"] and all(options["finished"] for options in begun)
    assert begun[0]["config"]["run"]["steps"] == 12 and begun[0]["resume"] == "allow"


def test_wandb_itself_accepts_the_records(tmp_path, monkeypatch):
    """Offline: its last values are those of the log. It reads those of the last step only when the run ends."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    summary: dict[str, float] = {}
    finish = wandb.Run.finish

    def finishing(run, *arguments):
        summary.update(run.summary)
        finish(run, *arguments)

    monkeypatch.setattr(wandb.Run, "finish", finishing)
    train(small(tmp_path / "run", wandb=True), random_rows())
    last: dict[str, float] = {}
    for values in records(tmp_path / "run"):
        last |= values if values["step"] < 12 else {}
    assert summary["_step"] == last.pop("step") == 9
    assert {name: summary[name] for name in last} == last
    assert next((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")).stat().st_size


@pytest.mark.parametrize(("option", "package"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_log_package_is_an_error_that_names_it(tmp_path, monkeypatch, option, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"{option} is True, but the package is missing .*: pip install {option}"):
        train(small(tmp_path / "run", **{option: True}), random_rows())
    assert not any(tmp_path.iterdir())


def test_a_warmup_longer_than_the_run_is_noted(tmp_path, capsys):
    train(small(tmp_path / "short", optimizer__warmup=12), random_rows())
    assert "warmup (12 steps) is as long as the run (12 steps)" in (said := capsys.readouterr().err)
    assert "Try --optimizer.warmup 1" in said
    train(small(tmp_path / "long", optimizer__warmup=11), random_rows())
    assert "learning rate never reaches" not in capsys.readouterr().err


def test_a_run_opens_with_method_network_device_data_and_folder(tmp_path, capsys):
    out = tmp_path / "run"
    main(["train", "digits", "--method", "sedd", "--steps", "1", "--out", str(out), *QUICK])
    parameters = sum(p.numel() for p in m2s.load(out).model.parameters())
    said = capsys.readouterr().err.splitlines()
    at = f"unet tiny ({parameters:,} parameters), cpu, float32; digits (1,541 examples of 64); 1 step of 8 into {out}"
    assert said[0] == f"sedd: {at}"
    train(small(tmp_path / "own"), random_rows())
    assert "; InMemorySource (64 examples of 4); 12 steps of 8 into" in capsys.readouterr().err.splitlines()[0]


def shown(capsys) -> list[int]:
    """The steps of the lines on the terminal, in their order, without those of validation."""
    lines = capsys.readouterr().err.splitlines()
    return [int(line.split()[1].rstrip(",")) for line in lines if line.startswith("step") and "validation" not in line]


@pytest.mark.parametrize(("silence", "early"), [(10.0, [1]), (-1.0, [1, 2])])
def test_the_first_step_is_shown_and_then_one_per_silence_until_the_first_record(tmp_path, capsys, monkeypatch, silence, early):
    monkeypatch.setattr(log_module, "SILENCE", silence)
    train(small(tmp_path / "run"), random_rows())
    assert shown(capsys) == [*early, 3, 6, 9, 12]
    assert [line["step"] for line in outcome(tmp_path / "run")["log"] if "loss" in line] == [3, 6, 9, 12]


def test_a_resumed_run_shows_its_first_step_and_logs_what_an_uninterrupted_one_does(tmp_path, capsys):
    class Killed(Exception):
        pass

    train(small(tmp_path / "whole", log_every=5), random_rows())
    config, rows = small(tmp_path / "run", log_every=5), random_rows()
    gradient = Trainer.gradient

    def ending(trainer, batch):
        if trainer.progress.step == 8:
            raise Killed
        return gradient(trainer, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "gradient", ending)
        with pytest.raises(Killed):
            train(config, rows)
    capsys.readouterr()
    train(config, rows)
    assert shown(capsys) == [9, 10, 12]
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


BAD_LINES = [
    b"{",
    b'{"loss": 1.0}',
    b'{"step": "3"}',
    b'{"step": true}',
    b'{"step": 1e3}',
    b'{"step": 3, "step": 4}',
    b"[3]",
    b"\xff\xfe",
    b'{"step": 3, "note": "\xff"}',
    b"[" * 100_000,
    b'{"step": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("bad", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_damaged_line_of_the_log_hides_no_other_record(tmp_path, capsys, bad):
    path = tmp_path / "log.jsonl"
    good = [json.dumps({"step": step, "loss": 0.5}).encode() for step in range(1, 6)]
    path.write_bytes(b"\n".join([*good[:2], bad, *good[2:]]) + b"\n")
    log_module.truncate(path, 4)
    assert path.read_bytes().splitlines() == good[:4]
    assert (tmp_path / "log.jsonl.damaged").read_bytes() == bad + b"\n"
    assert "no record in line 3" in capsys.readouterr().err
    log_module.truncate(path, 4)
    assert path.read_bytes().splitlines() == good[:4] and capsys.readouterr().err == ""


def test_an_incomplete_last_line_of_the_log_is_removed_without_a_message(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    log_module.truncate(path, 4)
    assert path.read_bytes() == b'{"step": 1}\n' and capsys.readouterr().err == ""
    assert not (tmp_path / "log.jsonl.damaged").exists()


def test_a_complete_record_without_the_end_of_its_line_is_kept(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "loss": NaN}')
    log_module.truncate(path, 4)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2, "loss": NaN}\n'


def test_a_run_with_a_damaged_log_resumes(tmp_path, capsys):
    out = tmp_path / "run"
    train(small(tmp_path / "uninterrupted"), random_rows())
    with pytest.MonkeyPatch.context() as patch:
        gradient = Trainer.gradient

        def ending(trainer, batch):
            if trainer.progress.step == 10:
                raise Stop
            return gradient(trainer, batch)

        patch.setattr(Trainer, "gradient", ending)
        with pytest.raises(Stop):
            train(small(out), random_rows())
    path = out / "log.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"\xff\x00 damaged\n" + b"".join(rest))
    train(small(out), random_rows())
    assert "no record in line 2" in capsys.readouterr().err
    assert outcome(out) == outcome(tmp_path / "uninterrupted")


def test_a_log_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"log\.jsonl is a link"):
        log_module.Log(tmp_path / "run", 0, 4)
    assert not (tmp_path / "elsewhere").exists()
