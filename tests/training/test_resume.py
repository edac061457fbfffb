"""A run that is stopped, killed or damaged and then resumed ends as an uninterrupted one."""

import contextlib
import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal

import pytest
import torch

import m2s
from m2s.errors import UserError
from m2s.losses.objective import TrainingObjective
from m2s.training import Diverged, loop, state, train
from small_runs import InMemorySource, die_before, outcome, random_rows, small, tensors

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(small(out), random_rows())
    return outcome(out)


@pytest.mark.parametrize("step", range(12))
def test_a_run_stopped_at_any_step_and_resumed_has_the_same_bits(tmp_path, uninterrupted, step):
    die_before(step, small(tmp_path / "run"), random_rows())
    train(small(tmp_path / "run"), random_rows())
    assert outcome(tmp_path / "run") == uninterrupted


def test_a_finished_run_given_again_is_left_as_it_is(tmp_path, uninterrupted):
    config = small(tmp_path / "run")
    first = train(config, random_rows())
    (tmp_path / "run" / "model.safetensors").unlink()  # as if killed between the last state and the checkpoint
    assert train(config, random_rows()) == first
    assert outcome(tmp_path / "run") == uninterrupted


def test_the_data_order_does_not_depend_on_a_restart(tmp_path):
    seen: list[list[int]] = []

    class RecordedRows(InMemorySource):
        def train(self, indices):
            seen.append(indices.tolist())
            return super().train(indices)

    source = RecordedRows(random_rows().rows, 5)
    train(small(tmp_path / "one"), source)
    uninterrupted, seen[:] = list(seen), []
    die_before(8, small(tmp_path / "two"), source)
    stopped, seen[:] = list(seen), []
    train(small(tmp_path / "two"), source)
    assert stopped[:8] + seen == uninterrupted


def killed_before_call(number, fraction, config, rows) -> None:
    """Run until just before call `number` of a training step, a write, a sync, a renaming or a removal; SIGKILL there.

    A file that was about to be synced keeps only a fraction of its bytes, as after a loss of power.
    """
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    numbers = itertools.count(1)

    def mortal(call):
        def counted(*given, **more):
            if next(numbers) == number:
                if call is fsync and given[0].is_file():
                    os.truncate(given[0], int(fraction * given[0].stat().st_size))
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given, **more)

        return counted

    fsync, trainer = state.fsync, loop.Trainer
    for owner, name in ((trainer, "gradient"), (state, "save_file"), (state, "fsync"), (os, "replace"), (shutil, "rmtree")):
        setattr(owner, name, mortal(getattr(owner, name)))
    with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
        train(config, rows)


def test_killed_again_and_again_while_training_and_writing_it_ends_with_the_same_bits(tmp_path):
    changes = {"steps": 60, "save_every": 5, "validate_every": 20}
    config, rows, dice = small(tmp_path / "killed", **changes), random_rows(), random.Random(0)
    train(small(tmp_path / "uninterrupted", **changes), rows)
    inside = 0
    for _ in range(12):
        run = FORK.Process(target=killed_before_call, args=(dice.randint(1, 18), dice.random(), config, rows))
        run.start()
        run.join()
        assert run.exitcode == -signal.SIGKILL
        inside += bool(list((tmp_path / "killed" / "state").glob(".writing*")))
    assert inside >= 3
    train(config, rows)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "uninterrupted")
    assert not list((tmp_path / "killed" / "state").glob(".writing*"))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no tensors", "another file", "no info", "half info"])
def test_a_damaged_newest_state_is_skipped_with_a_message(tmp_path, uninterrupted, capsys, damage):
    out = tmp_path / "run"
    die_before(10, small(out), random_rows())
    newest = out / "state" / "step-00000008"
    shard, info = newest / "shard-00001-of-00001.safetensors", newest / "state.json"
    data = shard.read_bytes()
    if damage == "truncated":
        shard.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "no tensors":
        shard.unlink()
    elif damage == "another file":
        (newest / "shard-00002-of-00002.safetensors").write_bytes(data)
    elif damage == "no info":
        info.unlink()
    else:
        info.write_text(info.read_text()[:20])
    capsys.readouterr()
    train(small(out), random_rows())
    said = capsys.readouterr().err
    assert "the state of step 8 is damaged" in said and "step 4" in said
    assert outcome(out) == uninterrupted


def test_a_run_with_only_damaged_states_is_not_restarted(tmp_path):
    out = tmp_path / "run"
    train(small(out, keep=1), random_rows())
    (out / "state" / "step-00000012" / "shard-00001-of-00001.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"no state in .* is intact"):
        train(small(out, keep=1), random_rows())


def test_the_last_states_stay_and_m2s_load_reads_the_folder(tmp_path):
    out = tmp_path / "run"
    train(small(out, keep=2), random_rows())
    assert sorted(path.name for path in (out / "state").iterdir()) == ["step-00000008", "step-00000012"]
    checkpoint = m2s.load(out)
    assert checkpoint.config["extra"]["step"] == 12
    saved = tensors(state.place(out / "state", 12))
    for name, value in checkpoint.model.state_dict().items():
        assert torch.equal(value, saved[f"ema/{name}"]) and value.dtype == torch.float32
    assert any(not torch.equal(saved[f"ema/{n}"], saved[f"model/{n}"]) for n in checkpoint.model.state_dict())
    record = json.loads((out / "train.json").read_text())
    assert record["config"]["head"]["offset"] == "none" and record["starts"][0]["torch"] == torch.__version__
    assert {path.suffix for path in (out / "state").rglob("*") if path.is_file()} == {".safetensors", ".json"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(tmp_path, uninterrupted, number):
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        gradient = loop.Trainer.gradient

        def signalled(trainer, batch):
            if trainer.progress.step == 5:
                os.kill(os.getpid(), number)
            return gradient(trainer, batch)

        patch.setattr(loop.Trainer, "gradient", signalled)
        with pytest.raises(SystemExit) as exit_:
            train(small(out), random_rows())
    assert exit_.value.code == 128 + number
    assert state.steps(out / "state")[-1] == 6
    train(small(out), random_rows())
    assert outcome(out) == uninterrupted


def test_a_folder_in_use_is_an_error_until_its_process_has_ended(tmp_path):
    out = tmp_path / "run"
    die_before(2, small(out), random_rows())
    with (out / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
            train(small(out), random_rows())
    train(small(out), random_rows())


def test_another_run_in_the_folder_is_an_error(tmp_path):
    out = tmp_path / "run"
    train(small(out, steps=2), random_rows())
    with pytest.raises(UserError, match=r"optimizer.lr was 0.003 and is now 0.1.*--init"):
        train(small(out, steps=2, optimizer__lr=0.1), random_rows())
    with pytest.raises(UserError, match="trained on other data"):
        train(small(out, steps=2), random_rows(count=32))
    train(small(out, steps=2, log_every=1, keep=3), random_rows())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"holds thesis.tex but no train.json"):
        train(small(tmp_path / "other"), random_rows())
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]


def test_a_run_older_than_an_option_has_its_default(tmp_path):
    out = tmp_path / "run"
    config = small(out, steps=2, method="gidd-clipped")
    train(config, random_rows())
    record = json.loads((out / "train.json").read_text())
    del record["config"]["head"]["max_weight"], record["config"]["network"]["label_dropout"]
    (out / "train.json").write_text(json.dumps(record))
    assert train(config, random_rows()).step == 2
    with pytest.raises(UserError, match=r"head\.max_weight was 1\.0 and is now 2\.0"):
        train(small(out, steps=2, method="gidd-clipped", head__max_weight=2.0), random_rows())


@pytest.mark.parametrize("when", ["tensors", "sync", "rename"])
def test_a_full_disk_leaves_the_last_good_state(tmp_path, uninterrupted, when):
    out = tmp_path / "run"

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        write = state.write

        def write_on_a_full_disk(folder, step, *rest):
            if step == 8:
                patch.setattr(
                    *{"tensors": (state, "save_file"), "sync": (state, "fsync"), "rename": (os, "replace")}[when], full
                )
            return write(folder, step, *rest)

        patch.setattr(state, "write", write_on_a_full_disk)
        with pytest.raises(OSError, match=r"No space left on device.*the state of step 4 is intact"):
            train(small(out), random_rows())
    assert state.steps(out / "state") == [4] and not list((out / "state").glob(".writing*"))
    train(small(out), random_rows())
    assert outcome(out) == uninterrupted


@pytest.fixture
def bad_source(monkeypatch):
    """Data in which the loss of example 3 is NaN."""
    source = random_rows()
    forward = TrainingObjective.forward

    def spoiling(self, x_0, x_t, t, weight, *rest):
        bad = (x_0 == source.rows[3]).all(-1, keepdim=True)
        value, terms = forward(self, x_0, x_t, t, weight, *rest)
        return value + torch.where(bad.any(), torch.nan, 0), torch.where(bad, torch.nan, terms)

    monkeypatch.setattr(TrainingObjective, "forward", spoiling)
    return source


def test_a_loss_that_is_not_finite_stops_with_step_examples_and_state(tmp_path, bad_source):
    out = tmp_path / "run"
    with pytest.raises(Diverged, match=r"at step \d+ the loss is nan.*not finite: .*3.*nan.json.*--on-nan") as error:
        train(small(out), bad_source)
    found = json.loads((out / "nan.json").read_text())
    assert found["bad"] == [3] and 3 in found["batch"] and f"at step {found['step']} " in str(error.value)
    assert state.steps(out / "state")[-1] == found["step"]
    assert all(value.isfinite().all() for value in tensors(state.place(out / "state", found["step"])).values())
    train(small(out, on_nan="skip"), bad_source)
    last = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert max(line.get("skipped", 0) for line in last) >= 1
    assert all(value.isfinite().all() for value in m2s.load(out).model.state_dict().values())
