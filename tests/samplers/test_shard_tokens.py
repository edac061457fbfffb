"""Shards of samples whose tokens are outside the vocabulary are not joined."""

import pytest

from m2s.cli import main
from m2s.samplers.shards import SampleShards
from m2s.training import train
from small_runs import random_rows, small


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    train(small(out, steps=8), random_rows())
    return out


def last_line(capsys, *arguments):
    """The last line of stderr of a command that fails with exit code 2 after a progress bar."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_samples_with_tokens_outside_the_vocabulary(tmp_path, finished, capsys, monkeypatch):
    out = tmp_path / "o.npz"
    command = ["sample", str(finished), "--out", str(out), "--n", "2", "--steps", "1", "--device", "cpu"]
    write = SampleShards.write
    monkeypatch.setattr(SampleShards, "write", lambda parts, first, tokens: write(parts, first, tokens.fill_(99)))
    error = last_line(capsys, *command)
    assert "000000000.npz holds tokens outside 0..4" in error and not out.exists()
