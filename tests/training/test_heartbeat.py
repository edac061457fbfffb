"""A process that is stopped or stuck does not make the others wait without a word: they end, and name it."""

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from m2s.errors import UserError
from m2s.training import loop, state, train
from small_runs import launch, outcome, random_rows, small, together


def run_and_wait(config, seconds: float) -> list[int | None]:
    """The exit codes of two processes after at most so many seconds; None for one that has not ended."""
    running = launch(2, train, config, random_rows()).processes
    end = time.monotonic() + seconds
    while time.monotonic() < end and all(process.exitcode is None for process in running):
        time.sleep(0.1)
    codes = [process.exitcode for process in running]
    for process in running:
        process.kill()
        process.join()
    return codes


@pytest.fixture
def at_step_6(monkeypatch):
    """Do something in one process before step 6."""
    gradient = loop.Trainer.gradient

    def set_action(rank, action):
        def acting(trainer, batch):
            if trainer.progress.step == 6 and trainer.world.rank in rank:
                action()
            return gradient(trainer, batch)

        monkeypatch.setattr(loop.Trainer, "gradient", acting)

    return set_action


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The outcome of a run on two processes, each kind once."""

    @functools.cache
    def of(parallel):
        out = tmp_path_factory.mktemp("uninterrupted") / parallel
        together(2, small(out, parallel=parallel), random_rows())
        return outcome(out)

    return of


@pytest.mark.parametrize(("rank", "parallel"), [(1, "ddp"), (0, "ddp"), (1, "fsdp")])
def test_a_stopped_rank_is_named_and_the_others_end(tmp_path, monkeypatch, capfd, at_step_6, uninterrupted, rank, parallel):
    """SIGSTOP of one of two processes. Rank 0 also holds the store through which they exchange heartbeats."""
    monkeypatch.setenv("M2S_RANK_TIMEOUT", "2")

    def stop() -> None:
        time.sleep(0.8)  # until a heartbeat with the current step is published: one every 2/8 s
        os.kill(os.getpid(), signal.SIGSTOP)

    at_step_6([rank], stop)
    codes = run_and_wait(small(tmp_path / "run", parallel=parallel), 60)
    assert codes[1 - rank] == 1 and codes[rank] is None
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("m2s: rank")]
    assert len(said) == 1 and said[0].startswith(f"m2s: rank {rank} (process ") and "last seen at step " in said[0]
    assert f"rank {1 - rank} has waited for 2 s at step 6" in said[0] and "M2S_RANK_TIMEOUT" in said[0]
    assert state.steps(tmp_path / "run" / "state") == [4]
    monkeypatch.undo()
    together(2, small(tmp_path / "run", parallel=parallel), random_rows())
    assert outcome(tmp_path / "run") == uninterrupted(parallel)


def test_a_rank_that_runs_but_makes_no_progress_is_named(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("M2S_RANK_TIMEOUT", "2")
    following = loop.Trainer.local_batch

    def stuck(trainer, step):
        if step == 6 and trainer.world.rank == 1:
            time.sleep(120)
        return following(trainer, step)

    monkeypatch.setattr(loop.Trainer, "local_batch", stuck)
    assert run_and_wait(small(tmp_path / "run"), 60) == [1, None]
    assert "makes no progress" in capfd.readouterr().err


def test_steps_longer_than_the_limit_are_no_fault(tmp_path, monkeypatch, at_step_6):
    monkeypatch.setenv("M2S_RANK_TIMEOUT", "2")
    at_step_6([0, 1], lambda: time.sleep(3))
    together(2, small(tmp_path / "run"), random_rows())
    assert state.steps(tmp_path / "run" / "state")[-1] == 12


def test_processes_that_were_all_stopped_for_a_while_continue(tmp_path, monkeypatch):
    monkeypatch.setenv("M2S_RANK_TIMEOUT", "2")
    gradient = loop.Trainer.gradient
    monkeypatch.setattr(loop.Trainer, "gradient", lambda trainer, batch: (time.sleep(0.3), gradient(trainer, batch))[1])
    running = launch(2, train, small(tmp_path / "run"), random_rows()).processes
    while not (tmp_path / "run" / "log.jsonl").exists():
        time.sleep(0.1)
    for number, pause in ((signal.SIGSTOP, 4), (signal.SIGCONT, 0)):
        for process in running:
            os.kill(process.pid, number)
        time.sleep(pause)
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0, 0]


def count_threads(config) -> None:
    train(config, random_rows())
    assert not [thread for thread in threading.enumerate() if "heartbeat" in thread.name] and not dist.is_initialized()


def test_no_thread_is_left_at_the_end(tmp_path):
    running = launch(2, count_threads, small(tmp_path / "run", steps=2))
    while not running.join():
        pass


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_limit_that_is_no_number_of_seconds_is_an_error(monkeypatch, value):
    from m2s.heartbeat import rank_timeout

    monkeypatch.setenv("M2S_RANK_TIMEOUT", value)
    with pytest.raises(UserError, match=f"M2S_RANK_TIMEOUT is '{value}', but it must be a number of seconds"):
        rank_timeout()


def test_the_limit_is_ten_minutes_unless_it_is_set(monkeypatch):
    from m2s.heartbeat import rank_timeout

    monkeypatch.delenv("M2S_RANK_TIMEOUT", raising=False)
    assert rank_timeout() == 600
    monkeypatch.setenv("M2S_RANK_TIMEOUT", "0")
    assert rank_timeout() == float("inf")


def test_a_process_that_never_starts_is_an_error_in_one_line(monkeypatch):
    script = """
        from m2s.distributed import World
        from m2s.errors import UserError
        try:
            World.start("cpu")
        except UserError as error:
            print(error)
    """
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | variables | {"M2S_RANK_TIMEOUT": "2", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.startswith("not all 2 processes have started") and done.stdout.count("\n") == 1, done.stderr
