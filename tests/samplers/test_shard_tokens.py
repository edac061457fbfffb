"""Shards of samples whose tokens are outside the vocabulary are not joined."""

import pytest

from m2s.samplers.shards import SampleShards
from m2s.training import train
from small_runs import last_line, random_rows, small


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    train(small(out, steps=8), random_rows())
    return out


def test_samples_with_tokens_outside_the_vocabulary(tmp_path, finished, capsys, monkeypatch):
    out = tmp_path / "o.npz"
    command = ["sample", str(finished), "--out", str(out), "--n", "2", "--steps", "1", "--device", "cpu"]
    write = SampleShards.write
    monkeypatch.setattr(SampleShards, "write", lambda parts, first, tokens: write(parts, first, tokens.fill_(99)))
    error = last_line(capsys, *command)
    assert "000000000.npz holds tokens outside 0..4" in error and not out.exists()
