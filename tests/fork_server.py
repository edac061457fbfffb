"""A server of processes that have everything imported except m2s and the tests: a process starts in a moment.

Such a process has no checker of shapes, which does not compile, and imports the m2s that its script asks for.
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "beartype",
        "hypothesis",
        "jaxtyping",
        "numpy",
        "pytest",
        "safetensors.torch",
        "scipy.integrate",
        "scipy.stats",
        "torch",
        "torch._dynamo",
        "torch._functorch.aot_autograd",
        "torch._inductor.compile_fx",
    ]
)
PACKAGE_ROOT = str(Path(__file__).parents[1])


class Ran(NamedTuple):
    """How a script ended."""

    returncode: int
    stdout: str
    stderr: str


COMMAND = "import sys\nfrom m2s.cli import main\nsys.exit(main(sys.argv[1:]))"
"""The script of `m2s`, with the words of the command as its arguments."""


class Program:
    """A script that runs as `python -c` does, with the most used methods of `subprocess.Popen`.

    Args:
        script: The text of the script.
        *arguments: The entries of `sys.argv` after the first.
        environment: Changes of the environment; None removes a variable.
        folder: The current folder of the process; by default that of the server.
    """

    def __init__(
        self,
        script: str,
        *arguments: str,
        environment: Mapping[str, str | None] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        self.files = tempfile.TemporaryDirectory()
        given = (script, arguments, dict(environment or {}), self.files.name, None if folder is None else str(folder))
        self.process = SERVER.Process(target=_run, args=given)
        self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.process.pid, number)

    def wait(self, timeout: float = 300) -> Ran:
        """Wait for the end. A process that has not ended after `timeout` seconds is killed."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        with self.files as folder:
            out, err = ((Path(folder) / name).read_text() if (Path(folder) / name).exists() else "" for name in ("out", "err"))
        assert self.process.exitcode is not None
        return Ran(self.process.exitcode, out, err)


def run_script(script: str, *arguments: str, environment: Mapping[str, str | None] | None = None, timeout: float = 300) -> Ran:
    """Run a script as `python -c` does.

    Args:
        script: The text of the script.
        *arguments: The entries of `sys.argv` after the first.
        environment: Changes of the environment; None removes a variable.
        timeout: Seconds after which the process is killed.

    Returns:
        The exit code and the texts that it wrote.
    """
    return Program(script, *arguments, environment=environment).wait(timeout)


def _run(script: str, arguments: tuple[str, ...], environment: dict[str, str | None], folder: str, current: str | None) -> None:
    """The life of the process."""
    for number, name in enumerate(("out", "err"), 1):
        with open(f"{folder}/{name}", "w") as file:
            os.dup2(file.fileno(), number)
    for name, value in environment.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    if current is not None:
        os.chdir(current)
    sys.argv = ["-c", *arguments]
    sys.path.insert(0, PACKAGE_ROOT)
    code, main = 0, types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        exec(compile(script, "<script>", "exec"), vars(main))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
