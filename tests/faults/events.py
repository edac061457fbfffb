"""Count the file-system calls of a process, and kill it or fail one of them at a chosen number.

The calls are replaced at the level of Python: `open` and the reads and writes below its buffers, the functions of `os`,
`fcntl.flock`, and the write of safetensors, which is one event. Only paths below a given folder count, so that imports and
caches of other packages do not.
"""

import builtins
import errno
import fcntl
import io
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError

CHANGING = {"open", "write", "truncate", "rename", "unlink", "mkdir", "rmdir", "link", "fsync", "chmod", "save"}
"""The kinds of events that change files or their order on the disk. A kill at another event has the effect of one at these."""
KILLS = ("before", "after", "torn")
ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EINTR", "ENOLCK")}


class Event(NamedTuple):
    """One call, with the file that it is about; of a rename the new name, and the old one as `source`."""

    kind: str
    path: str
    source: str = ""


@dataclass(frozen=True)
class Fault:
    """What happens at an event.

    Args:
        number: The number of the event, from 0.
        how: "before" or "after": the process is killed there. "torn": it is killed after a part of a write. Otherwise the
            name of an error in `ERRORS`, with which the call fails.
        part: The part of the bytes that a torn write leaves.
        mark: A file descriptor to which a byte is written when it happens; None: none.
    """

    number: int
    how: str
    part: float = 0.5
    mark: int | None = None


class Events:
    """The file-system calls of this process from now on.

    Args:
        root: Only paths below this folder count.
        kinds: The kinds that count; None: all.
        fault: What happens at which event; None: events are counted only.

    Attributes:
        seen: The events so far.
    """

    def __init__(self, root: str, kinds: set[str] | None = None, fault: Fault | None = None) -> None:
        self.root, self.kinds, self.fault = os.path.realpath(root), kinds, fault
        self.seen: list[Event] = []

    def __call__(
        self, kind: str, path: Any, call: Callable[[], Any], torn: Callable[[float], Any] | None = None, source: Any = None
    ) -> Any:
        """Make a call, as one event.

        Args:
            kind: The kind of event.
            path: Its file; None where it is not known.
            call: Makes the call.
            torn: Makes a part of it, for a write.
            source: The old name of a file that is renamed.

        Returns:
            What the call returns.
        """
        where = self._inside(path)
        if where is None or (self.kinds is not None and kind not in self.kinds):
            return call()
        number, fault = len(self.seen), self.fault
        self.seen.append(Event(kind, where, self._inside(source) or ""))
        if fault is None or number != fault.number:
            return call()
        if fault.mark is not None:
            os.pwrite(fault.mark, b"x", 0)  # it is not replaced, so it is no event
        if fault.how in ERRORS:
            raise failure(fault.how, kind, path)
        if fault.how == "torn" and torn is not None:
            torn(fault.part)
        try:
            if fault.how == "after":
                call()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    def _inside(self, path: Any) -> str | None:
        """The path below the root; None where it is elsewhere."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
            if not path.startswith("/"):  # a pipe or socket
                return None
        if path is None:
            return None
        found = os.path.abspath(os.fsdecode(path))
        if found == self.root:
            return "."
        return found[len(self.root) + 1 :] if found.startswith(self.root + os.sep) else None

    def install(self) -> "Events":
        """Replace the calls, for the rest of this process."""
        self._replace_open()
        for kind, names in {
            "rename": ("rename", "replace"),
            "unlink": ("unlink", "remove"),
            "mkdir": ("mkdir",),
            "rmdir": ("rmdir",),
            "link": ("symlink", "link"),
            "fsync": ("fsync", "fdatasync"),
            "truncate": ("truncate", "ftruncate"),
            "chmod": ("chmod", "fchmod", "utime"),
            "list": ("listdir", "scandir"),
        }.items():
            for name in names:
                self._replace_os(kind, name)
        self._replace_locks_and_tensors()
        return self

    def _replace_open(self) -> None:
        """Replace `open`, `os.open`, `os.write` and `os.read`."""
        events, real_open, real_os_open, real_write, real_read = self, builtins.open, os.open, os.write, os.read

        class Counted(io.FileIO):
            """A file whose reads and writes are events."""

            def write(self, data: Any) -> Any:
                """Write, as one event."""
                full = bytes(data)
                return events("write", self.name, lambda: super(Counted, self).write(full), lambda part: self._torn(full, part))

            def _torn(self, full: bytes, part: float) -> None:
                super().write(full[: int(part * len(full))])

            def readinto(self, buffer: Any) -> Any:
                """Read, as one event."""
                return events("read", self.name, lambda: super(Counted, self).readinto(buffer))

            def readall(self) -> Any:
                """Read the rest, as one event."""
                return events("read", self.name, super().readall)

            def read(self, size: int = -1) -> Any:
                """Read, as one event."""
                return events("read", self.name, lambda: super(Counted, self).read(size))

            def truncate(self, size: int | None = None) -> Any:
                """Cut the file, as one event."""
                return events("truncate", self.name, lambda: super(Counted, self).truncate(size))

        def open_(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            if events._inside(file) is None or isinstance(file, int):
                return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
            kind = "open" if set(mode) & set("wax+") else "open to read"
            below = "".join(letter for letter in mode if letter in "rwax+")
            raw = events(kind, file, lambda: Counted(file, below, closefd, opener))
            if buffering == 0:
                return raw
            if "+" in mode:
                buffer: Any = io.BufferedRandom(raw)
            else:
                buffer = io.BufferedReader(raw) if "r" in mode else io.BufferedWriter(raw)
            if "b" in mode:
                return buffer
            text = io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)
            text.mode = mode  # type: ignore[misc]
            return text

        def os_open(path: Any, flags: int, *rest: Any, **options: Any) -> Any:
            kind = "open" if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else "open to read"
            return events(kind, _at(path, options), lambda: real_os_open(path, flags, *rest, **options))

        def os_write(handle: int, data: Any) -> Any:
            full = bytes(data)
            return events(
                "write",
                handle,
                lambda: real_write(handle, full),
                lambda part: real_write(handle, full[: int(part * len(full))]),
            )

        builtins.open = io.open = open_  # type: ignore[assignment]
        os.open, os.write = os_open, os_write
        os.read = lambda handle, count: events("read", handle, lambda: real_read(handle, count))

    def _replace_os(self, kind: str, name: str) -> None:
        """Replace a function of `os` whose event is at its last path."""
        real = getattr(os, name)

        def counted(*paths: Any, **options: Any) -> Any:
            where = paths[0] if paths else "."
            source = None
            if kind in ("rename", "link"):
                source, where = paths[:2]
            return self(kind, _at(where, options), lambda: real(*paths, **options), source=source)

        for group in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if real in group:
                group.add(counted)
        setattr(os, name, counted)

    def _replace_locks_and_tensors(self) -> None:
        """Replace `fcntl.flock` and the write of safetensors."""
        real_lock, real_save = fcntl.flock, safetensors.torch.serialize_file

        def flock(file: Any, operation: int) -> Any:
            handle = file if isinstance(file, int) else file.fileno()
            return self("lock", handle, lambda: real_lock(file, operation))

        def save(tensors: Any, path: Any, *rest: Any, **options: Any) -> Any:
            def torn(part: float) -> None:
                real_save(tensors, path, *rest, **options)
                os.truncate(path, int(part * os.stat(path).st_size))

            return self("save", path, lambda: real_save(tensors, path, *rest, **options), torn)

        fcntl.flock = flock  # type: ignore[assignment]
        safetensors.torch.serialize_file = save  # type: ignore[assignment]


def failure(name: str, kind: str, path: Any) -> Exception:
    """Return the exception that a failed call raises.

    Args:
        name: The name of the error.
        kind: The kind of event.
        path: Its file.
    """
    text = os.strerror(ERRORS[name])
    if kind == "save":  # as safetensors, which is written in Rust, reports an error of the system
        return SafetensorError(f"Error while serializing: I/O error: {text} (os error {ERRORS[name]})")
    return OSError(ERRORS[name], text, None if isinstance(path, int) else os.fsdecode(path))


def _at(path: Any, options: dict[str, Any]) -> Any:
    """A path, relative to the folder of `dir_fd` where that is given."""
    folder = options.get("dir_fd", options.get("dst_dir_fd"))
    if folder is None or isinstance(path, int):
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
