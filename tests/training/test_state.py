"""Every file of a state is protected by a checksum; a damaged state is set aside and the one before it is used."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from m2s.errors import UserError
from m2s.training import loop, state, train
from m2s.training.save import FIELDS
from small_runs import outcome, random_rows, small, tensors


class Stop(Exception):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that ended before step 10, with the states of steps 4 and 8."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    gradient = loop.Trainer.gradient

    def ending(trainer, batch):
        if trainer.progress.step == 10:
            raise Stop
        return gradient(trainer, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "gradient", ending)
        with pytest.raises(Stop):
            train(small(out), random_rows())
    return out


@pytest.fixture
def out(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "PAUSE", 0.0, raising=False)


def newest(out: Path) -> tuple[int, str]:
    """The step of the newest intact state, and what was printed."""
    said: list[str] = []
    found = state.newest(out / "state", said.append, FIELDS)
    assert found is not None
    return found.step, " ".join(said)


def change(path: Path, **values: object) -> None:
    """Change values of a JSON file; None removes one."""
    found = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


def as_version_0_1(step: Path) -> None:
    """Remove what version 0.1 did not write."""
    (step / "manifest.json").unlink()
    change(step / "state.json", manifest=None)


def test_a_changed_step_does_not_resume_with_other_weights(out, tmp_path, capsys):
    """Without the check, training continued from step 9 with the weights of step 8."""
    change(out / "state" / "step-00000008" / "state.json", step=9)
    train(small(tmp_path / "uninterrupted"), random_rows())
    capsys.readouterr()
    train(small(out), random_rows())
    said = capsys.readouterr().err
    assert "the state of step 8 is damaged" in said and "resuming from step 4" in said
    assert outcome(out) == outcome(tmp_path / "uninterrupted")
    assert (out / "state" / "step-00000008.damaged" / "state.json").is_file()


@pytest.mark.parametrize("name", ["tokens", "skipped", "losses", "norms", "validation", "files", "format", "step", "manifest"])
@pytest.mark.parametrize("value", [None, 5, "7", [1.0], {"a": 1}])
def test_any_change_of_state_json_is_found(out, name, value):
    change(out / "state" / "step-00000008" / "state.json", **{name: value})
    step, said = newest(out)
    assert step == 4 and "the state of step 8 is damaged" in said


@pytest.mark.parametrize("damage", ["missing", "truncated", "no files", "another step", "no state.json", "link elsewhere"])
def test_a_damaged_manifest_is_found(out, damage):
    manifest = out / "state" / "step-00000008" / "manifest.json"
    files = json.loads(manifest.read_text())["files"]
    if damage == "missing":
        manifest.unlink()
    elif damage == "truncated":
        manifest.write_text(manifest.read_text()[:30])
    elif damage == "no files":
        change(manifest, files=None)
    elif damage == "another step":
        change(manifest, step=9)
    elif damage == "no state.json":
        change(manifest, files={name: value for name, value in files.items() if name != "state.json"})
    else:
        change(manifest, files=files | {"../../train.json": state.digest(out / "train.json")})
    assert newest(out)[0] == 4


def test_a_state_of_version_0_1_is_used_where_it_is_consistent(out):
    step = out / "state" / "step-00000008"
    as_version_0_1(step)
    assert newest(out) == (8, "")
    change(step / "state.json", step=9)
    found, said = newest(out)
    assert found == 4 and "state.json has the step 9, but the folder is of step 8" in said


@pytest.mark.parametrize("name", ["tokens", "skipped", "losses", "norms", "validation", "files"])
@pytest.mark.parametrize("value", [None, -1, "7", True, [None], {"a": []}])
def test_a_missing_or_wrong_value_of_version_0_1_is_no_traceback(out, name, value):
    step = out / "state" / "step-00000008"
    as_version_0_1(step)
    change(step / "state.json", **{name: value})
    found, said = newest(out)
    assert found == 4 and "the state of step 8 is damaged" in said and name in said


def test_damaged_states_are_renamed_and_never_deleted(out):
    shard = "shard-00001-of-00001.safetensors"
    folder = out / "state"
    for suffix in (".damaged", ".damaged-2"):
        good = folder / "step-00000008"
        shutil.copytree(good, folder / "copy")
        (good / shard).write_bytes(b"damaged")
        step, said = newest(out)
        assert step == 4 and f"step-00000008{suffix}" in said
        assert (folder / f"step-00000008{suffix}" / shard).read_bytes() == b"damaged"
        (folder / "copy").rename(good)
    assert newest(out) == (8, "") and state.steps(folder) == [4, 8]


@pytest.fixture
def failing_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first reads of step 8 fail with EIO: as many as the list's number."""
    left, read_bytes, digest = [0], Path.read_bytes, state.digest

    def failing(call, path):
        if path.parent.name == "step-00000008" and left[0] > 0:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return call(path)

    monkeypatch.setattr(Path, "read_bytes", lambda path: failing(read_bytes, path))
    monkeypatch.setattr(Path, "read_text", lambda path, **_: failing(read_bytes, path).decode())
    monkeypatch.setattr(state, "digest", lambda path: failing(digest, path))
    return left


def test_one_transient_read_error_costs_nothing(out, failing_reads):
    failing_reads[0] = 1
    assert newest(out) == (8, "")


def test_read_errors_that_stay_do_not_delete_a_good_state(out, failing_reads):
    expected = tensors(out / "state" / "step-00000008")
    failing_reads[0] = 99
    step, said = newest(out)
    assert step == 4 and "Input/output error" in said
    failing_reads[0] = 0
    aside = out / "state" / "step-00000008.damaged"
    assert tensors(aside).keys() == expected.keys()
    shutil.rmtree(out / "state" / "step-00000004")
    aside.rename(out / "state" / "step-00000008")
    assert newest(out) == (8, "")


def test_a_state_of_another_network_is_an_error_and_stays(out, tmp_path):
    config = small(out)
    (out / "state").rename(tmp_path / "state")
    train(small(tmp_path / "other", network__width=32), random_rows())
    shutil.copytree(tmp_path / "other" / "state", out / "state")
    with pytest.raises(UserError, match=r"step-00000012 does not fit the network of this run: .* has shape"):
        train(config, random_rows())
    assert state.steps(out / "state") == [8, 12]


def test_names_that_are_no_steps_are_ignored(out):
    folder = out / "state"
    for name in ("step-²", "step-12", "step-", "step-99999999999999999999", "step-00000008.damaged"):
        (folder / name).mkdir()
    assert state.steps(folder) == [4, 8]


def test_the_folder_of_states_is_synced_in_the_run_folder(tmp_path, monkeypatch):
    seen: list[str] = []
    fsync = state.fsync
    monkeypatch.setattr(state, "fsync", lambda path: (seen.append(path.name), fsync(path)))
    state.write(tmp_path / "run" / "state", 3, random_tensors(), {}, 2)
    temporary = ".writing-step-00000003"
    shard = "shard-00001-of-00001.safetensors"
    assert seen == ["run", shard, "state.json", "manifest.json", temporary, "state"]


def random_tensors():
    return {"a": random_rows().rows.float()}
