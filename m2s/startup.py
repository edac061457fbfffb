"""Ctrl-C while a command imports its modules, which takes seconds: one line and exit code 130, as later on.

`m2s/__init__.py` imports this module first. It must not be in `m2s.cli`, because Python imports `m2s` before that. In a program
that uses m2s as a library nothing is changed.
"""

import os
import signal
import sys
from types import FrameType

COMMAND = "m2s"


def is_command() -> bool:
    """Return whether this process is `m2s` or `python -m m2s.cli`, and not another program that imports m2s."""
    started = sys.argv[0] if sys.argv else ""
    if started == "-m":  # Python replaces this by the file when all modules are imported
        return f"{COMMAND}.cli" in sys.orig_argv
    return os.path.basename(started) in (COMMAND, f"{COMMAND}.exe")


def finish() -> None:
    """Raise KeyboardInterrupt for Ctrl-C from now on, because the command can handle it."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: FrameType | None) -> None:
    """End the process. An exception would not do: packages that are half imported may turn it into another error."""
    os.write(2, f"{COMMAND}: interrupted\n".encode())
    os._exit(128 + signal.SIGINT)


# A process in the background ignores the signal, and another handler belongs to whoever set it.
if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _exit)
