"""Ctrl-C while a command imports its modules. A stub of an imported package sends the signal: nothing depends on timing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STUB = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(1000):\n    pass\n"
SCRIPT = "import sys\nfrom m2s.cli import main\nsys.exit(main())\n"


def start(folder: Path, package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start Python where the import of a package interrupts the process."""
    stubs = folder / "stubs"
    stubs.mkdir()
    (stubs / f"{package}.py").write_text(STUB)
    environment = {**os.environ, "PYTHONPATH": f"{stubs}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("package", ["torch", "tyro"])
@pytest.mark.parametrize("how", ["module", "script"])
def test_ctrl_c_while_modules_are_imported(tmp_path: Path, package: str, how: str) -> None:
    (tmp_path / "m2s").write_text(SCRIPT)  # what pip installs
    command = ["-m", "m2s.cli"] if how == "module" else [str(tmp_path / "m2s")]
    ended = start(tmp_path, package, *command, "data", "list")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "m2s: interrupted\n")


def test_other_programs_keep_their_handler(tmp_path: Path) -> None:
    ended = start(tmp_path, "torch", "-c", "import m2s")
    assert ended.returncode == -signal.SIGINT and "KeyboardInterrupt" in ended.stderr


def test_a_running_command_is_interrupted_by_an_exception(tmp_path: Path) -> None:
    """After the imports Ctrl-C is KeyboardInterrupt again, which a command may handle."""
    handler = "signal.getsignal(signal.SIGINT) is not m2s.startup._exit"
    (tmp_path / "plugin.py").write_text(f"import signal, m2s\nprint('handler', {handler})\nraise KeyboardInterrupt\n")
    (tmp_path / "m2s").write_text(SCRIPT)
    ended = start(tmp_path, "unused", str(tmp_path / "m2s"), "data", "list", "--plugin", "plugin.py")
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        130,
        "handler True\n",
        "m2s: interrupted; the same command starts again\n",
    )
