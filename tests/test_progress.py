"""Progress is a bar on a terminal, and elsewhere a line now and then."""

import importlib
import io
import sys
import types
import warnings

import pytest
import tqdm

from m2s import progress
from m2s.progress import Progress, bar_class


class Terminal(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, as a list of one number."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_without_a_terminal(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """The pauses are 10, 20, 40, ... seconds, and at most five minutes."""
    times = []
    with Progress(2000, "judging", "sequence") as shown:
        for _ in range(2000):
            clock[0] += 1.0
            shown.update(1)
            text = capsys.readouterr().err
            if text:
                seconds = clock[0] - 100
                assert text == f"judging: {seconds:,.0f} of 2,000 sequences after {seconds:,.0f} s\n"
                times.append(seconds)
    assert times == [10, 30, 70, 150, 310, 610, 910, 1210, 1510, 1810]


def test_a_short_computation_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3.0, "sampling", "sample") as shown:
        assert list(shown.over([1, 2, 3])) == [1, 2, 3] and shown.done == 3
    assert capsys.readouterr().err == ""


def test_a_quiet_process_prints_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, "NELBO", "example", quiet=True) as shown:
        clock[0] += 1000
        shown.update(5)
    assert capsys.readouterr().err == ""


def test_the_sum_does_not_exceed_the_total() -> None:
    with Progress(2.0, "sampling", "sample") as shown:
        for _ in range(10):
            shown.update(0.3)
        assert shown.done == 2.0


def test_a_bar_on_a_terminal(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(4.0, "sampling", "sample") as shown:
        clock[0] += 1000
        shown.update(4)
    assert "\rsampling: 100%" in terminal.getvalue() and "4.0/4" in terminal.getvalue() and " after " not in terminal.getvalue()


def test_a_notebook_without_widgets_gets_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing m2s and sampling without a bar would print tqdm's warning into the first cell."""
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    for name in ("tqdm.auto", "tqdm.autonotebook", "tqdm.notebook"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", types.ModuleType("ipykernel.zmqshell"))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.warns(match="IProgress not found"):  # of tqdm alone
        importlib.import_module("tqdm.auto")
    monkeypatch.delitem(sys.modules, "tqdm.auto")
    monkeypatch.delitem(sys.modules, "tqdm.autonotebook")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert issubclass(bar_class(), tqdm.tqdm)
