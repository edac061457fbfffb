"""Ctrl-C with real processes and signals: no traceback, how to resume, and a second one that stops at once.

Signals are sent at places of the program, not after some time, so that a busy machine changes nothing.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.fork import Ended, forked
from test_failures import LINES, RESUMED

from m2s.cli import COMMANDS, main
from m2s.cli.options import find_command
from m2s.data import pack
from m2s.training import loop, state
from small_runs import QUICK

TRAIN = ["train", "digits", "--steps", "4", "--save-every", "1", "--out", "run", *QUICK]


def run(arguments: list[str], folder: Path, patch: Callable[[], None]) -> Ended:
    """Run a command in a forked process in which Ctrl-C has Python's own handler, as in a new process."""

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        patch()
        main(arguments)

    return forked(work, folder)


def press() -> None:
    """Press Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def hang(presses: bool = True) -> None:
    """Wait forever in a call of C that no signal interrupts, like a long operation of torch. Another thread presses Ctrl-C.

    It does so until the process ends: two signals that come before the first is delivered count as one.
    """
    library = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(256)

    def press_again() -> None:
        while True:
            press()
            time.sleep(0.02)

    if presses:
        threading.Thread(target=press_again, daemon=True).start()
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def stopped(ended: Ended, *texts: str) -> None:
    """The process ended by Ctrl-C with messages of m2s and without a traceback."""
    assert ended.code == 130 and not ended.traceback, ended.err
    assert ended.messages and all(text in ended.err for text in texts), ended.err


@pytest.mark.parametrize("name", LINES)
def test_first_ctrl_c_in_every_command(name: str, tmp_path: Path) -> None:
    """The command waits in Python, as commands do between two operations."""
    _, command = find_command(list(LINES[name]), COMMANDS)

    def patch() -> None:
        def wait(*_: object) -> None:
            press()
            threading.Event().wait()

        if name == "train":
            loop.train = wait
        else:
            command.run = wait

    ended = run(list(LINES[name]), tmp_path, patch)
    stopped(ended, "interrupted; the same command " + ("resumes" if name in RESUMED else "starts again"))
    assert len(ended.messages) == 1


@pytest.mark.parametrize("name", LINES)
def test_second_ctrl_c_in_every_command(name: str, tmp_path: Path) -> None:
    """The command is inside a long call, where Python handles no signal."""
    _, command = find_command(list(LINES[name]), COMMANDS)

    def patch() -> None:
        def wait(*_: object) -> None:
            try:
                press()
                threading.Event().wait()
            finally:
                hang()

        if name == "train":
            loop.train = wait
        else:
            command.run = wait

    stopped(
        run(list(LINES[name]), tmp_path, patch),
        "stopped at once; the same command " + ("resumes" if name in RESUMED else "starts again"),
    )


def test_training_finishes_the_step_and_saves(tmp_path: Path) -> None:
    def patch() -> None:
        gradient = loop.Trainer.gradient

        def interrupted(trainer: loop.Trainer, batch: loop.LocalBatch) -> object:
            if trainer.progress.step == 2:
                press()
            return gradient(trainer, batch)

        loop.Trainer.gradient = interrupted  # type: ignore[method-assign]

    ended = run([*TRAIN, "--save-every", "100"], tmp_path, patch)
    assert ended.code == 130 and not ended.traceback
    assert "stopped at step 3, which is saved: the same command resumes the run" in ended.err
    assert state.steps(tmp_path / "run" / "state") == [3]
    ended = forked(lambda: main([*TRAIN, "--save-every", "100"]), tmp_path)
    assert ended.code == 0 and "4 steps" in ended.out


@pytest.mark.parametrize("place", ["gradient", "validation", "data", "objects"])
def test_second_ctrl_c_during_a_long_operation_of_training(place: str, tmp_path: Path) -> None:
    """A long step, a long validation, data that takes long to open, and a network that takes long to build."""

    def patch() -> None:
        def wait(*_: object) -> None:
            hang()

        if place == "gradient":
            loop.Trainer.gradient = wait  # type: ignore[assignment, method-assign]
        else:
            name = {"validation": "validate", "data": "open_data", "objects": "make_objects"}[place]
            setattr(loop, name, wait)

    ended = run(TRAIN, tmp_path, patch)
    stopped(ended, "the same command resumes the run from its last saved state")
    # Between two steps Python handles the second Ctrl-C, in a call of C the watching thread does: both stop at once.
    assert "stopped at once" in ended.err or "interrupted" in ended.err
    if place == "validation":
        assert state.steps(tmp_path / "run" / "state") == [1, 2, 3][-2:]


def test_a_long_operation_says_that_it_is_still_stopping(tmp_path: Path) -> None:
    def patch() -> None:
        def wait(*_: object) -> None:
            read, write = os.pipe()
            error = os.dup(2)
            os.dup2(write, 2)

            def answer() -> None:
                press()
                os.write(error, os.read(read, 1000))  # waits for the message
                os.dup2(error, 2)
                press()

            threading.Thread(target=answer, daemon=True).start()
            hang(presses=False)

        loop.Trainer.gradient = wait  # type: ignore[assignment, method-assign]

    ended = run(TRAIN, tmp_path, patch)
    stopped(ended, "press Ctrl-C again to stop at once", "stopped at once; the same command resumes")


def test_interrupted_preparation_resumes(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(4):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"text {i} " * 50)
    command = ["data", "prepare", "texts", "--out", "packed", "--tokenizer", "bytes"]

    def patch() -> None:
        pack.write_json = lambda *_: press()  # type: ignore[assignment]  # the progress, after the first tokens

    stopped(run(command, tmp_path, patch), "interrupted; the same command resumes the preparation")
    assert forked(lambda: main(command), tmp_path).code == 0
    assert forked(lambda: main([*command[:3], "--out", "other", *command[5:]]), tmp_path).code == 0
    for path in (tmp_path / "other").rglob("*"):
        assert path.is_dir() or path.read_bytes() == (tmp_path / "packed" / path.relative_to(tmp_path / "other")).read_bytes()


def test_ctrl_c_after_the_end_of_a_command_prints_nothing(tmp_path: Path) -> None:
    """While the context that watches for Ctrl-C ends."""

    def patch() -> None:
        set_fd, calls = signal.set_wakeup_fd, []

        def pressing(*given: int, **options: bool) -> int:
            before = set_fd(*given, **options)
            calls.append(given)
            if len(calls) == 2:  # the first call is at the start
                press()
            return before

        signal.set_wakeup_fd = pressing  # type: ignore[assignment]

    ended = run(["cite", "m2s"], tmp_path, patch)
    assert ended.code == 0 and ended.err == "" and "li-m2s" in ended.out


def test_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)
    main(["cite"])
    assert (signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)) == before
    thread = threading.Thread(target=main, args=(["cite"],))  # signals belong to the main thread: nothing is changed
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) == before[0]
