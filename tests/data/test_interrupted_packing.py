"""A preparation that is killed at any moment resumes to the same bytes."""

import dataclasses
import itertools
import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest

from m2s.data import BadData, Bytes, Tokens, pack, shards, text
from m2s.errors import UserError
from packed_text import contents, make_documents, prepare

fork = multiprocessing.get_context("fork")


@dataclasses.dataclass(frozen=True)
class Slow(Bytes):
    def encode(self, text):
        time.sleep(0.001)
        return super().encode(text)


@pytest.fixture
def eager(monkeypatch):
    """Write the progress after every document."""
    monkeypatch.setattr(pack, "COMMIT_SECONDS", 0.0)


def kill_until_done(*arguments):
    """Prepare in processes that are killed later and later, until one has finished; return how many were killed."""
    out, rng, killed = arguments[1], random.Random(0), 0
    for attempt in range(200):
        child = fork.Process(target=prepare, args=arguments)
        child.start()
        child.join(rng.uniform(0, 0.02 * attempt))
        if child.exitcode is None:
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        if (out / "meta.json").exists():  # written last
            break
        assert child.exitcode != 0
        with pytest.raises(BadData, match=r"not finished|no prepared text"):
            Tokens(out, "train", 8)
    prepare(*arguments)  # the last one may have been killed after meta.json and before it deleted plan.json
    return killed


def test_killed_at_random_moments_the_result_is_the_same(corpus, tmp_path, eager):
    folder, _ = corpus
    prepare(folder, tmp_path / "complete", Slow())
    assert kill_until_done(folder, tmp_path / "out", Slow()) >= 3
    assert contents(tmp_path / "out") == contents(tmp_path / "complete")


def test_one_document_killed_at_random_moments_gives_the_same_result(tmp_path, eager, monkeypatch):
    """Writing takes a while, so that a process is killed between the files of the document too."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("".join(make_documents(60)))
    (tmp_path / "one" / "b-test.txt").write_text("held out")
    prepare(tmp_path / "one", tmp_path / "complete")
    append = shards.Shards.append

    def slow(self, ids):
        for part in np.array_split(ids, max(1, len(ids) // 40)):
            append(self, part)
            self.flush()
            time.sleep(0.001)

    monkeypatch.setattr(shards.Shards, "append", slow)
    assert kill_until_done(tmp_path / "one", tmp_path / "out") >= 3
    assert contents(tmp_path / "out") == contents(tmp_path / "complete")


@pytest.mark.parametrize("name", ["fsync", "replace", "truncate", "unlink"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("separator", ["\n<|endoftext|>\n", "\n"], ids=["documents", "one"])
def test_killed_at_every_call_the_result_is_the_same(tmp_path, eager, name, after, separator):
    source, options = tmp_path / "a.txt", {"validation_fraction": 0.333, "shard_tokens": 50}
    source.write_text(separator.join(make_documents(5)))
    prepare(source, tmp_path / "complete", **options)
    real = getattr(os, name)

    def dying(out, fatal):
        count = itertools.count()

        def call(*given, **more):
            now = next(count)
            result = real(*given, **more) if now != fatal or after else None
            if now == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(os, name, call)
        prepare(source, out, **options)

    for fatal in itertools.count():
        out = tmp_path / f"out{fatal}"
        child = fork.Process(target=dying, args=(out, fatal))
        child.start()
        child.join()
        finished = child.exitcode == 0
        prepare(source, out, **options)
        assert contents(out) == contents(tmp_path / "complete"), fatal
        if finished:
            break
    assert fatal > 0 or name in ("truncate", "unlink")


def test_two_processes_cannot_prepare_one_folder(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    with text._exclusive(tmp_path / "out"), pytest.raises(UserError, match="another process"):
        prepare(corpus[0], tmp_path / "out")
