"""Folders of runs: what makes a new run, locks, and the data that a run was trained on."""

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest
import torch

from m2s.cli import main
from m2s.data import Bytes, ImageDataset, ImageSource, prepare_text
from m2s.errors import UserError
from m2s.training import run_folder, train
from small_runs import QUICK, InMemorySource, random_rows, small, user_error

FIRST_MOMENTS = [[".lock"], [".m2s-17.tmp"], [".lock", ".train-17.json"], [".lock", ".m2s-17.tmp", ".train-17.json"]]


@pytest.mark.parametrize("files", FIRST_MOMENTS)
def test_a_run_killed_in_its_first_moments_starts_again(tmp_path, files):
    out = tmp_path / "run"
    out.mkdir()
    for name in files:
        (out / name).write_text("{")
    assert train(small(out, steps=1), random_rows()).step == 1
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == [".lock"]


def test_the_command_starts_in_a_folder_with_a_lock(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".lock").touch()
    main(["train", "digits", "--steps", "1", "--out", str(tmp_path / "r"), *QUICK])
    assert (tmp_path / "r" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", [".git", ".train.json", "log.jsonl", ".m2s-x.tmp"])
def test_files_of_others_are_no_new_run(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("content")
    with pytest.raises(UserError, match=rf"holds {name} but no train.json"):
        train(small(tmp_path / "run", steps=1), random_rows())


def test_empty_files_of_a_run_are_a_new_run(tmp_path):
    out = tmp_path / "run"
    (out / "state").mkdir(parents=True)
    for name in (".lock", "train.json", "log.jsonl"):
        (out / name).touch()
    assert train(small(out, steps=1), random_rows()).step == 1


def test_a_run_starts_again_after_a_full_disk(tmp_path, monkeypatch):
    out = tmp_path / "run"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_json", full)
        with pytest.raises(OSError, match="No space left"):
            train(small(out, steps=1), random_rows())
    assert [path.name for path in out.iterdir()] == [".lock"]
    assert train(small(out, steps=1), random_rows()).step == 1


@pytest.mark.parametrize("target", ["victim", "elsewhere"])
def test_a_lock_that_is_a_link_is_not_written_through(tmp_path, target):
    out, victim = tmp_path / "run", tmp_path / "victim"
    out.mkdir()
    victim.write_text("important")
    (out / ".lock").symlink_to(tmp_path / target)
    with pytest.raises(UserError, match=r"\.lock is a link or not an ordinary file.*: remove it"):
        train(small(out, steps=1), random_rows())
    assert victim.read_text() == "important" and not (tmp_path / "elsewhere").exists()


def test_a_lock_with_other_bytes_gives_one_line(tmp_path):
    out = tmp_path / "run"
    train(small(out, steps=1), random_rows())
    (out / ".lock").write_bytes(b"\xff\xfe\x1b[31m\nprocess" + b"x" * 1000)
    with (out / ".lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is in use by") as error:
            train(small(out, steps=1), random_rows())
    assert str(error.value).isprintable() and len(str(error.value)) < 400


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(UserError, match=r"cannot be locked \(No locks available\)"):
        train(small(tmp_path / "run", steps=1), random_rows())


def images(seed: int, count: int = 64, levels: int = 5) -> ImageSource:
    """Random images of 2 x 2 pixels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(levels, (count, 4), generator=generator, dtype=torch.uint8)
    labels = torch.arange(count) % 3
    return ImageSource(ImageDataset("random", pixels, labels, pixels[:8], labels[:8], (2, 2), levels))


def test_a_run_does_not_resume_on_other_images_of_equal_size(tmp_path, capsys):
    out = tmp_path / "run"
    train(small(out, steps=2), images(0))
    with pytest.raises(UserError, match=r"was trained on other data \(sha256 .* then and .* now\): .*--other-data"):
        train(small(out, steps=2), images(1))
    train(small(out, steps=2), images(0))
    capsys.readouterr()
    train(small(out, steps=2, other_data=True), images(1))
    assert "on other data than before" in capsys.readouterr().err
    record = json.loads((out / "train.json").read_text())
    assert record["data"]["sha256"] == images(1).fingerprint
    assert [start.get("data_before", {}).get("sha256") for start in record["starts"]] == [None, None, images(0).fingerprint]
    train(small(out, steps=2), images(1))


def test_a_label_counts_as_data(tmp_path):
    one, two = images(0), images(0)
    two.images.train_labels[5] += 1
    assert one.fingerprint != two.fingerprint


def test_length_and_vocabulary_stay_with_other_data_too(tmp_path):
    train(small(tmp_path / "run", steps=1), images(0))
    with pytest.raises(UserError, match=r"was trained on other data \(vocab 5 then and 6 now"):
        train(small(tmp_path / "run", steps=1, other_data=True), images(0, levels=6))


def test_a_run_does_not_resume_on_another_text_of_equal_size(tmp_path, capsys):
    for name, word in (("one", "abcdefgh"), ("two", "abcdefgx")):
        (tmp_path / f"{name}.txt").write_text(f"{word} " * 400)
        prepare_text(tmp_path / f"{name}.txt", tmp_path / name, Bytes(), validation_fraction=0.1)
    command = ["train", "owt", "--out", str(tmp_path / "run"), "--steps", "1", "--batch", "2", "--data.length", "16"]
    command += ["--network.width", "16", "--network.depth", "1", "--network.heads", "2", "--device", "cpu"]
    command += ["--validation-samples", "2", "--data.folder"]
    main([*command, str(tmp_path / "one")])
    capsys.readouterr()
    assert "was trained on other data (sha256" in user_error(capsys, *command, str(tmp_path / "two"))
    (tmp_path / "one").rename(tmp_path / "moved")
    main([*command, str(tmp_path / "moved")])
    main([*command, str(tmp_path / "two"), "--other-data"])


def test_a_run_of_version_0_1_gets_a_fingerprint_when_it_resumes(tmp_path):
    out = tmp_path / "run"
    train(small(out, steps=1), images(0))
    record = json.loads((out / "train.json").read_text())
    del record["data"]["sha256"], record["config"]["run"]["other_data"]
    (out / "train.json").write_text(json.dumps(record))
    train(small(out, steps=1), images(0))
    assert json.loads((out / "train.json").read_text())["data"]["sha256"] == images(0).fingerprint


def test_data_without_a_fingerprint_is_compared_by_its_sizes(tmp_path):
    train(small(tmp_path / "run", steps=1), random_rows())
    train(small(tmp_path / "run", steps=1), InMemorySource(random_rows().rows.flip(0), 5))
    with pytest.raises(UserError, match=r"other data \(rows 64 then and 32 now\)"):
        train(small(tmp_path / "run", steps=1), random_rows(count=32))


def test_the_record_is_not_written_through_a_link(tmp_path):
    out, victim = tmp_path / "run", tmp_path / "victim"
    train(small(out, steps=1), random_rows())
    victim.write_text("important")
    (out / f".train-{os.getpid()}.json").symlink_to(victim)
    train(small(out, steps=1), random_rows())
    assert victim.read_text() == "important" and not Path(out / "train.json").is_symlink()
