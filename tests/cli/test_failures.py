"""Failures that are no errors of the input, in every command: one line, the exit code, and how to resume."""

import errno
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from safetensors import SafetensorError

from m2s.cli import COMMANDS, main
from m2s.cli.options import find_command, subcommands

# A command line for every command; none of them gets to read its input, because `run` fails.
LINES: dict[str, Sequence[str]] = {
    "train": ("train", "digits", "--out", "out"),
    "sample": ("sample", "run", "--out", "out.npz"),
    "evaluate bpd": ("evaluate", "bpd", "run"),
    "evaluate fid": ("evaluate", "fid", "out.npz", "--against", "mnist:test"),
    "evaluate genppl": ("evaluate", "genppl", "out.txt"),
    "evaluate lm-eval": ("evaluate", "lm-eval", "run", "--tasks", "task"),
    "evaluate text": ("evaluate", "text", "out.npz", "--against", "packed"),
    "evaluate zero-shot": ("evaluate", "zero-shot", "run", "--task", "ptb"),
    "certify": ("certify", "run"),
    "audit": ("audit", "run", "--out", "out"),
    "repair": ("repair", "run", "--out", "out"),
    "compare": ("compare", "run", "--against", "digits:train", "--out", "out"),
    "report": ("report", "run", "--out", "out.html"),
    "data download": ("data", "download", "mnist"),
    "data prepare": ("data", "prepare", "texts", "--out", "out"),
    "data check": ("data", "check", "packed"),
    "data list": ("data", "list"),
    "data adversaries": ("data", "adversaries", "packed", "--out", "out"),
    "figure": ("figure", "toy", "--out", "toy.png"),
    "benchmark": ("benchmark", "--quick"),
    "lab": ("lab", "--out", "out"),
    "cite": ("cite",),
    "convert": ("convert", "a.ckpt", "out"),
    "reproduce": ("reproduce", "mdlm-owt", "--data", "texts"),
    "demo": ("demo", "--out", "out"),
}
RESUMED = {
    *("train", "sample", "evaluate text", "evaluate zero-shot", "certify", "audit", "repair", "compare"),
    *("data download", "data prepare", "demo"),
}
SIZED = {
    *("train", "sample", "evaluate bpd", "evaluate fid", "evaluate genppl", "evaluate lm-eval", "evaluate text"),
    *("evaluate zero-shot", "certify", "audit", "repair"),
}
FILE = "some/file"
ERRORS = {
    "full disk": (OSError(errno.ENOSPC, "No space left on device", FILE), f"{FILE}: the disk is full"),
    "no locks": (OSError(errno.ENOLCK, "No locks available", FILE), f"{FILE}: the file system has no locks"),
    "permission": (PermissionError(errno.EACCES, "Permission denied", FILE), f"{FILE}: permission denied"),
    "read-only": (OSError(errno.EROFS, "Read-only file system", FILE), f"{FILE}: the file system is read-only"),
    "disk error": (OSError(errno.EIO, "Input/output error"), "the disk failed to read or write"),
    "short write": (OSError("100 requested and 3 written"), "100 requested and 3 written"),
    "message of our own": (
        OSError("the state of step 6 cannot be written ([Errno 28] No space left on device)"),
        "the state of step 6 cannot be written ([Errno 28] No space left on device)",
    ),
    "rename": (OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b"), "a -> b: Invalid cross-device link"),
    "memory": (MemoryError(), "the memory is too small"),
    "memory of torch": (
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0.\nDefaultCPUAllocator: can't allocate memory: 8 bytes"),
        "the memory is too small",
    ),
    "memory of torch elsewhere": (RuntimeError("DefaultCPUAllocator: not enough memory"), "the memory is too small"),
    "memory of a map": (OSError(errno.ENOMEM, "Cannot allocate memory"), "the memory is too small"),
    "memory of a GPU": (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"), "memory is too small"),
    "safetensors": (SafetensorError("Error while deserializing header"), "Error while deserializing header"),
    "safetensors on a full disk": (SafetensorError('IoError(Os { message: "No space left on device" })'), "the disk is full"),
    "processes": (torch.distributed.DistNetworkError("connection\nreset"), "processes failed (connection reset)"),
    "Ctrl-C": (KeyboardInterrupt(), "interrupted"),
}


def fails(monkeypatch: pytest.MonkeyPatch, line: Sequence[str], error: BaseException) -> None:
    """Let the command of a command line raise an error as soon as it runs."""
    _, command = find_command(list(line), COMMANDS)
    if line[0] == "train":
        monkeypatch.setattr("m2s.training.loop.train", lambda config: throw(error))
    else:
        monkeypatch.setattr(command, "run", lambda self: throw(error))


def throw(error: BaseException) -> None:
    raise error


def names(known: dict, before: str = "") -> set[str]:
    """All commands, with their subcommands; the presets of training are one command."""
    found = set()
    for name, command in known.items():
        inner = {} if name == "train" else subcommands(command)
        found |= names(inner, f"{before}{name} ") if inner else {before + name}
    return found


def test_every_command_is_tested() -> None:
    assert names(COMMANDS) == set(LINES)


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("kind", ERRORS)
def test_failure_is_one_line(
    kind: str, name: str, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error, said = ERRORS[kind]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("M2S_TRACEBACK", raising=False)
    fails(monkeypatch, LINES[name], error)
    with pytest.raises(SystemExit) as ended:
        main(LINES[name])
    text = capsys.readouterr().err
    assert ended.value.code == (130 if kind == "Ctrl-C" else 1)
    assert text.startswith("m2s: ") and text.count("\n") == 1 and said in text
    assert ("the same command resumes" in text) == (name in RESUMED)
    if "memory" in kind and name in SIZED:
        assert "--micro-batch" in text or "--batch-size" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", LINES)
def test_closed_pipe(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Silent for a command that only prints; a run that stopped half-way says so."""
    fails(monkeypatch, LINES[name], BrokenPipeError(errno.EPIPE, "Broken pipe"))
    with pytest.raises(SystemExit) as ended:
        main(LINES[name])
    text = capsys.readouterr().err
    assert ended.value.code == 1
    assert ("closed the pipe; the same command resumes" in text and text.count("\n") == 1) if name in RESUMED else text == ""


@pytest.mark.parametrize("words", [["train", "digits", "--help"], ["demo", "--help"], ["help", "sample"]], ids=" ".join)
def test_help_into_a_closed_pipe_is_silent(words: list[str]) -> None:
    """Nothing was started that could resume."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "m2s.cli", *words], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 1 and done.stderr == ""


@pytest.mark.parametrize("name", LINES)
def test_traceback_on_request(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fails(monkeypatch, LINES[name], OSError(errno.ENOSPC, "No space left on device", FILE))
    monkeypatch.setenv("M2S_TRACEBACK", "1")
    with pytest.raises(SystemExit):
        main(LINES[name])
    text = capsys.readouterr().err
    assert text.startswith("Traceback") and text.splitlines()[-1].startswith("m2s: ")


@pytest.mark.parametrize("name", LINES)
def test_bug_keeps_its_traceback_and_says_where_to_report_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, LINES[name], ZeroDivisionError("division by zero"))
    with pytest.raises(ZeroDivisionError) as found:
        main(LINES[name])
    (note,) = found.value.__notes__
    assert "this is a bug in m2s" in note and "report it" in note and "\n" not in note


def test_error_of_a_plugin_is_not_called_a_bug_of_m2s(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text("def fail():\n    return 1 / 0\n")
    code: dict = {}
    exec(compile(plugin.read_text(), str(plugin), "exec"), code)
    monkeypatch.setattr(COMMANDS["cite"], "run", lambda self: code["fail"]())
    with pytest.raises(ZeroDivisionError) as found:
        main(["cite", "--plugin", str(plugin)])
    assert found.value.__notes__ == [f"m2s: this error comes from the plugin {plugin}"]


def test_control_characters_of_a_file_name_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(monkeypatch, LINES["cite"], FileNotFoundError(errno.ENOENT, "No such file or directory", "\x1b[2Jx\n"))
    with pytest.raises(SystemExit):
        main(LINES["cite"])
    assert capsys.readouterr().err == "m2s: \\x1b[2Jx\\n: No such file or directory\n"


def test_divergence_does_not_offer_to_resume(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from m2s.training.loop import Diverged

    fails(monkeypatch, LINES["train"], Diverged("the loss is NaN"))
    with pytest.raises(SystemExit) as ended:
        main(LINES["train"])
    assert ended.value.code == 1 and capsys.readouterr().err == "m2s: the loss is NaN\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_disk_behind_stdout() -> None:
    """The output is still in a buffer when the command ends."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "m2s.cli", "cite"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert done.returncode == 1 and done.stderr == "m2s: the disk is full\n"


def test_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "130 interrupted by Ctrl-C" in text and "M2S_TRACEBACK=1" in text


@pytest.mark.parametrize("arguments", [["cite"], ["data", "check", "missing"]])
def test_stdout_that_is_closed(arguments):
    """`m2s data list >&-`: Python starts with sys.stdout = None."""
    program = f"import sys\nsys.stdout = None\nfrom m2s.cli import main\nmain({arguments})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == (0 if arguments == ["cite"] else 2) and "Traceback" not in ended.stderr


def test_memory_that_is_too_small_for_a_checkpoint_is_no_invalid_input(tmp_path, monkeypatch, capsys) -> None:
    import m2s.hub

    def allocate(*_: object, **__: object) -> None:
        try:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 2**50 bytes")
        except RuntimeError as error:
            raise ValueError(f"{tmp_path}: {error}") from error

    monkeypatch.setattr(m2s.hub, "load", allocate)
    with pytest.raises(SystemExit) as ended:
        main(["sample", str(tmp_path), "--out", str(tmp_path / "a.npz")])
    assert ended.value.code == 1 and "the memory is too small" in capsys.readouterr().err
