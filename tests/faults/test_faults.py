"""The short version of the fault campaign. The long one is `make faults`: see docs/testing.md."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

from . import campaign, events, fork

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the campaign in a process of its own: cases are forks, and a process of pytest has threads."""
    command = [sys.executable, "-m", "tests.faults", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_short_campaign():
    done = run("--short")
    assert done.returncode == 0, done.stdout + done.stderr


def test_table_of_the_page_has_the_counts_of_the_long_version():
    results = campaign.Results(ROOT / "tests" / "faults" / "results" / "faults.json")
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    start, end = (page.index(mark) for mark in campaign.MARKS)
    assert page[start + len(campaign.MARKS[0]) : end].strip() == campaign.table(results)


def test_a_kill_a_failure_and_a_difference_are_seen(tmp_path):
    """The harness itself: it would see a traceback, a hang and other files."""

    def fails() -> None:
        raise KeyError("x")

    assert fork.forked(fails, tmp_path).traceback
    assert fork.forked(lambda: time.sleep(60), tmp_path, limit=0.2).code is None
    assert fork.forked(lambda: time.sleep(60), tmp_path, kill_after=0.1).code == -signal.SIGKILL
    assert fork.forked(lambda: 3, tmp_path).value == 3

    def writes() -> list[events.Event]:
        counted = events.Events(str(tmp_path), fault=events.Fault(2, "EIO")).install()
        with contextlib.suppress(OSError), (tmp_path / "file").open("wb", buffering=0) as file:
            file.write(b"one")
            file.write(b"two")
        return counted.seen

    seen = fork.forked(writes, tmp_path).value
    assert [event.kind for event in seen] == ["open", "write", "write"] and (tmp_path / "file").read_bytes() == b"one"
