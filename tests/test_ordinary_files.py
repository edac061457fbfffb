"""Pipes and devices in place of files of ours: an error at once."""

import os
import shutil

import pytest

from m2s.data import Bytes, prepare_text
from m2s.errors import UserError
from m2s.io import open_regular, read_json, read_regular
from m2s.npz import read_npy, read_npz
from m2s.training import state, train
from small_runs import last_line, random_rows, small, user_error


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    train(small(out, steps=8), random_rows())
    return out


def pipe(path):
    """Put a pipe in place of a file. Reading it would wait forever."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("read", [open_regular, read_regular, read_npy, lambda path: read_npz(path, ["tokens"])])
def test_readers_take_ordinary_files_alone(tmp_path, read):
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (pipe(tmp_path / "pipe"), tmp_path / "zero", tmp_path):
        with pytest.raises(OSError, match="not an ordinary file"):
            read(path)


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"text")
    (tmp_path / "b").symlink_to("a")
    assert read_regular(tmp_path / "b") == b"text"
    with pytest.raises(UserError, match="not an ordinary file"):
        read_json(pipe(tmp_path / "c"), "copy it again")


@pytest.mark.parametrize("name", ["state.json", "manifest.json", "shard-00001-of-00001.safetensors"])
def test_a_state_with_a_pipe_is_damaged(tmp_path, finished, name, monkeypatch):
    monkeypatch.setattr(state, "PAUSE", 0)
    run = shutil.copytree(finished, tmp_path / "run")
    pipe(run / "state" / "step-00000008" / name)
    messages: list[str] = []
    found = state.newest(run / "state", messages.append)
    assert found is not None and found.step == 4
    assert len(messages) == 1 and "step 8 is damaged" in messages[0] and "not an ordinary file" in messages[0]


@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
def test_a_record_that_is_no_file(tmp_path, finished, target):
    run = shutil.copytree(finished, tmp_path / "run")
    pipe(run / "train.json")
    if target != "pipe":
        (run / "train.json").unlink()
        (run / "train.json").symlink_to(target)
    with pytest.raises(UserError, match="not an ordinary file"):
        train(small(run, steps=8), random_rows())


@pytest.mark.parametrize("name", ["settings.json", "000000000.npz"])
def test_shards_with_a_pipe(tmp_path, finished, capsys, name):
    out = tmp_path / "o.npz"
    command = ["sample", str(finished), "--out", str(out), "--n", "2", "--steps", "1", "--device", "cpu"]
    parts = tmp_path / "o.npz.parts"
    parts.mkdir()
    pipe(parts / name)
    assert "not an ordinary file" in last_line(capsys, *command)


def test_a_clamp_that_is_a_pipe(tmp_path, finished, capsys):
    clamp = pipe(tmp_path / "p.npz")
    error = user_error(capsys, "sample", str(finished), "--out", str(tmp_path / "o.npz"), "--n", "2", "--clamp", str(clamp))
    assert "not an ordinary file" in error


def test_a_prepared_text_with_a_pipe(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(f"document {i}\n" for i in range(20)))
    prepare_text(tmp_path / "a.txt", tmp_path / "packed", Bytes())
    pipe(tmp_path / "packed" / "train-00000.bin")
    assert "train-00000.bin" in user_error(capsys, "data", "check", str(tmp_path / "packed"))
