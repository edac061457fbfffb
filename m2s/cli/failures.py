"""Failures that the input does not cause: a full disk, too little memory, a damaged file, Ctrl-C, a closed pipe.

Every command handles them in the same way. It prints one line that says what failed, what to do, and whether the same command
resumes. Set M2S_TRACEBACK=1 to see the traceback too.

The first Ctrl-C stops a command: `m2s train` after the current step, which it saves, the others where they are. A second one
ends the process at once, also inside a long operation of torch (`Interrupts`).

The exit codes are:

    0    the command has finished
    1    the command failed: disk, memory, a damaged file, a closed pipe, or a bug (which has a traceback)
    2    the input is invalid, and nothing was computed
    130  interrupted by Ctrl-C (128 + SIGINT); `m2s train` also exits with 143 after SIGTERM
"""

import _thread
import contextlib
import errno
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError

FAILED, INVALID, INTERRUPTED = 1, 2, 130
TRACEBACK = "M2S_TRACEBACK"

# Commands that resume, by their words, and from where.
RESUMES = {
    ("train",): "the same command resumes the run from its last saved state",
    ("sample",): "the same command resumes after the last complete batch",
    ("certify",): "the same command resumes after the last saved batch",
    ("audit",): "the same command resumes after the last complete batch",
    ("repair",): "the same command resumes after the last complete batch",
    ("compare",): "the same command resumes after the last complete file of samples",
    ("evaluate", "text"): "the same command resumes after the last file that was measured",
    ("evaluate", "zero-shot"): "the same command resumes after the last saved windows",
    ("data", "download"): "the same command resumes the download",
    ("data", "prepare"): "the same command resumes the preparation",
    ("demo",): "the same command resumes it",
}
STARTS_AGAIN = "the same command starts again"
# Options that reduce the memory that a command needs.
SMALLER = ("--micro-batch", "--batch-size", "--recompute", "--sites")

REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.ENOLCK: "the file system has no locks (some network file systems): use a folder on a local disk",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.EIO: "the disk failed to read or write",
}


class CommandFailure(Exception):
    """A failure that a command describes itself.

    Args:
        message: What failed and what to do, on one line.
        resumes: Whether to add how the command resumes, where it does.
    """

    def __init__(self, message: str, resumes: bool = True) -> None:
        super().__init__(message)
        self.resumes = resumes


# Failures for which other packages have no type of their own: the only sign is a part of the message.
# torch's CPU allocator raises a plain RuntimeError. Its name is in the message, or on other systems these words.
CPU_OUT_OF_MEMORY = ("DefaultCPUAllocator", "not enough memory")
# A thread needs memory for its stack. Python and C++ raise a plain RuntimeError where the system does not give it.
NO_THREAD = ("can't start new thread", os.strerror(errno.EAGAIN))
# safetensors raises its SafetensorError for everything, with the text of the system's ENOSPC inside.
SAFETENSORS_NO_SPACE = "No space left"
# gloo raises a plain RuntimeError, whose message starts with the place in its source.
GLOO_SOURCE = "/gloo/"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory is too small: the machine's or a GPU's.

    Args:
        error: Any exception. torch's CPU allocator raises a plain RuntimeError.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in (*CPU_OUT_OF_MEMORY, *NO_THREAD))


def describe(error: BaseException, options: Collection[str] = ()) -> str | None:
    """Return one line about a failure, without the name of the program.

    Args:
        error: The exception that ended a command.
        options: The options of the command, such as "--batch-size".

    Returns:
        What failed and what to do; None for an exception that is a bug.
    """
    if isinstance(error, CommandFailure):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, BrokenPipeError):
        return "the reader of the output closed the pipe"
    if is_out_of_memory(error):
        where = "GPU's memory" if isinstance(error, torch.OutOfMemoryError) else "memory"
        smaller = [option for option in SMALLER if option in options]
        return f"the {where} is too small" + (f": try smaller numbers for {' or '.join(smaller)}" if smaller else "")
    if isinstance(error, SafetensorError):
        if SAFETENSORS_NO_SPACE in str(error):
            return f"cannot write a safetensors file: {REASONS[errno.ENOSPC]}"
        return f"a safetensors file cannot be read ({_one_line(error)}): it is damaged or incomplete"
    if isinstance(error, OSError):
        return _describe_os_error(error)
    is_lost = isinstance(error, RuntimeError) and GLOO_SOURCE in str(error)
    if is_lost or isinstance(error, torch.distributed.DistError if torch.distributed.is_available() else ()):
        return f"the connection between the processes failed ({_one_line(error)})"
    return None


def _describe_os_error(error: OSError) -> str:
    """The reason of an OSError, and the file."""
    known = error.errno is not None and error.strerror == os.strerror(error.errno)  # otherwise the message is a special one
    reason = (REASONS.get(error.errno or 0) if known else None) or error.strerror or _one_line(error)
    files = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{' -> '.join(files)}: {reason}" if files else reason


def _one_line(error: BaseException) -> str:
    """The message of an exception on one line, shortened."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def exit_after(error: BaseException, path: Sequence[str], options: Collection[str] = (), plugins: Sequence[str] = ()) -> int:
    """Report a failure on stderr and return the exit code; mark anything else as a bug and raise it again.

    Args:
        error: The exception that ended a command.
        path: The words of the command, such as ["data", "prepare"].
        options: The options of the command.
        plugins: The files given as `--plugin`.

    Returns:
        The exit code.

    Raises:
        BaseException: `error` itself, where it is a bug.
    """
    line = describe(error, options)
    if line is None:
        error.add_note(f"m2s: {_bug(error, plugins)}")
        raise error
    _discard_output()
    resume = how_to_resume(path)
    if not resume and isinstance(error, KeyboardInterrupt):
        resume = STARTS_AGAIN
    if isinstance(error, CommandFailure) and not error.resumes:
        resume = ""
    if os.environ.get(TRACEBACK, "0") not in ("", "0"):
        traceback.print_exception(error)
    if resume or not isinstance(error, BrokenPipeError):  # `m2s cite | head` is no failure
        text = f"{line}; {resume}" if resume else line
        print("m2s: " + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text), file=sys.stderr)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


def how_to_resume(path: Sequence[str]) -> str:
    """Return how a command resumes; the empty string for one that keeps no state.

    Args:
        path: The words of the command, such as ["data", "prepare"].
    """
    return next((text for words, text in RESUMES.items() if tuple(path[: len(words)]) == words), "")


class Interrupts:
    """A context in which a second Ctrl-C (or SIGTERM) ends the process at once.

    Python runs signal handlers between two instructions of the interpreter. During one long call of torch it runs none, so
    that neither the first nor the second Ctrl-C has an effect. Therefore a thread reads the numbers of signals from the file
    descriptor of `signal.set_wakeup_fd`, to which Python writes them at once.

    Args:
        resume: How the command resumes, for the message; empty: it starts again.
        patience: Seconds after the first signal before a message says that the command is still stopping.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, resume: str, patience: float = 1.0) -> None:
        self.resume, self.patience = resume or STARTS_AGAIN, patience
        self._count = 0
        self._active = False

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is not threading.main_thread():  # no other thread can handle signals
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._previous: Any = signal.getsignal(signal.SIGINT)
        if self._previous is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
        self._ended = threading.Event()
        # Not threading.Thread: its start waits forever for a thread that ends at once because memory is too small.
        with contextlib.suppress(RuntimeError):  # no memory for a thread: the command itself says so
            _thread.start_new_thread(self._watch, ())
        self._active = True
        return self

    def __exit__(self, *_: object) -> None:
        if not self._active:
            return
        ours = signal.getsignal(signal.SIGINT) == self._interrupt
        if ours:  # the command has ended: Ctrl-C has nothing to stop, and an exception here would print a traceback
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._write)  # ends the thread
        self._ended.wait(1.0)
        os.close(self._read)
        if ours:
            signal.signal(signal.SIGINT, self._previous)

    def _interrupt(self, number: int, _: FrameType | None) -> NoReturn:
        """The handler of Ctrl-C: stop by an exception, which nothing can interrupt again."""
        self._count += 1
        if self._count > 1:
            self._leave(number)
        raise KeyboardInterrupt

    def _watch(self) -> None:
        """Count the signals, also while the main thread is inside a long call."""
        seen: list[int] = []
        said = False
        while True:
            waits = self.patience if seen and not said else None
            if not select.select([self._read], [], [], waits)[0]:
                said = True
                _print_error("stopping as soon as the current operation ends; press Ctrl-C again to stop at once")
                continue
            numbers = os.read(self._read, 64)
            if not numbers:
                self._ended.set()
                return
            for number in numbers:
                if number in seen:
                    self._leave(number)
                if number in self.SIGNALS:  # torchrun may send SIGTERM after the Ctrl-C of its terminal
                    seen.append(number)

    def _leave(self, number: int) -> NoReturn:
        """End the process without waiting for anything. Files are written atomically, so none is left incomplete."""
        _print_error(f"stopped at once; {self.resume}")
        os._exit(128 + number)


def _print_error(text: str) -> None:
    """Print a line on stderr from any thread, without the locks that an interrupted thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"m2s: {text}\n".encode())


def _bug(error: BaseException, plugins: Sequence[str]) -> str:
    """The line after the traceback of a bug: whose it is, and where to report it."""
    files = {str(Path(plugin).resolve()): plugin for plugin in plugins}
    for frame in traceback.extract_tb(error.__traceback__):
        if (plugin := files.get(str(Path(frame.filename).resolve()))) is not None:
            return f"this error comes from the plugin {plugin}"
    return (
        "this is a bug in m2s, not an error in your input: please report it with the command and this traceback "
        "(CONTRIBUTING.md says where)"
    )


def _discard_output() -> None:
    """Discard what is still in the buffer of stdout if it cannot be written, so that the interpreter exits quietly."""
    if sys.stdout is None:  # it was closed before the start
        return
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):  # stdout is no file in a notebook
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
