"""The small commands of the campaign, the files that they start from, and the comparison of what they leave."""

import atexit
import contextlib
import functools
import gc
import io
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from tqdm import tqdm

import m2s.cli
import m2s.cli.parsing
import m2s.data.pack
import m2s.evaluation.inception
import m2s.provenance
import m2s.training.run_folder
from m2s.cli import main

from .events import Event, Events
from .fork import Ended, exit_code, forked


def words(text: str) -> tuple[str, ...]:
    """Return the words of a command line."""
    return tuple(text.split())


NETWORK = words("--network.kind dit --network.width 16 --network.depth 1 --network.heads 2")
RUN = words("--batch 4 --steps 4 --save-every 2 --validate-every 2 --log-every 1 --keep 1 --validation-samples 4")
TRAIN = (*NETWORK, *RUN, *words("--optimizer.warmup 1 --device cpu"))
DRAW = words("--n 4 --batch-size 2 --micro-batch 16 --steps 2 --device cpu")
TIMINGS = ("seconds", "tokens_per_second", "starts")
"""Values in files that differ between two runs of a command: times, and the list of the starts of a run."""


@dataclass(frozen=True)
class Command:
    """A command of the campaign.

    Args:
        arguments: Its words, with paths relative to the folder of the case.
        inputs: The files and folders that it reads, from the folder of `base`.
    """

    arguments: tuple[str, ...]
    inputs: tuple[str, ...] = ()


COMMANDS = {
    "train": Command(("train", "digits", "--out", "run", *TRAIN)),
    "sample": Command(("sample", "m2s", "--out", "samples.png", *DRAW), ("m2s",)),
    "audit": Command(("audit", "sedd", "--out", "audit", *DRAW), ("sedd",)),
    "repair": Command(("repair", "sedd", "--out", "repair", "--measure", "none", *DRAW), ("sedd",)),
    "prepare": Command(
        words("data prepare texts --out packed --tokenizer bytes --shard-tokens 150 --validation-fraction 0.333"), ("texts",)
    ),
    "bpd": Command(words("evaluate bpd m2s --limit 4 --passes 2 --device cpu --out bpd.json"), ("m2s",)),
    "ngrams": Command(words("evaluate ngrams drawn.npz --reference digits:test --out ngrams.json"), ("drawn.npz",)),
    "fid": Command(
        words("evaluate fid drawn.npz --against digits:test --limit 8 --few --no-kid --device cpu --out fid.json"),
        ("drawn.npz",),
    ),
    "report": Command(("report", "m2s", "--out", "report.html"), ("m2s",)),
}
"""One command of each kind that writes files."""


class SmallFeatures(nn.Module):
    """Stands for Inception in `evaluate fid`: the mean of each color and one row of pixels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images [N, 3, 299, 299] to features [N, 7]."""
        return torch.cat([x.mean((2, 3)), x[:, 0, 150, 40::70]], 1)


def prepare_process() -> None:
    """Make this process ready to be forked: one thread, everything imported, and nothing that a case would compute again."""
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # its thread would not survive a fork
    # By default tqdm has a lock that forks share. A fork that is killed while it holds the lock would block all others.
    tqdm.set_lock(threading.RLock())
    m2s.cli.commands = m2s.cli.parsing.commands = functools.cache(m2s.cli.commands)  # it reads the source of all options
    revision = m2s.provenance.revision()
    for module in (m2s.provenance, m2s.training.run_folder):
        module.revision = lambda: revision  # type: ignore[attr-defined]
    savefig = Figure.savefig

    def save_empty(figure: Figure, *arguments: Any, **options: Any) -> None:  # drawing takes most of the time of a case
        figure.clear()
        savefig(figure, *arguments, **(options | ({"dpi": 15} if "dpi" in options else {})))

    Figure.savefig = save_empty  # type: ignore[assignment]
    m2s.data.pack.COMMIT_SECONDS = 0.0  # progress is written after every document

    def load(path: Path | None = None, device: Any = "cpu") -> m2s.evaluation.inception.Network:
        return m2s.evaluation.inception.Network(SmallFeatures(), Path("small"), 64 * "0", 7, torch.device("cpu"))

    m2s.evaluation.inception.load = load  # type: ignore[assignment]
    base()
    with contextlib.chdir(new_folder()):
        for name, command in COMMANDS.items():  # imports on first use, caches of tyro and matplotlib
            copy_inputs(command, Path())
            with _silence() as printed:
                code, _ = exit_code(lambda words=command.arguments: run_command(words))  # type: ignore[misc]
            assert code == 0, f"{name} fails without any fault: {printed.getvalue()}"
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    gc.collect()
    gc.freeze()  # otherwise a fork copies the memory of all objects when it collects garbage


@contextlib.contextmanager
def _silence() -> Iterator[io.StringIO]:
    """Collect what is printed."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        yield text


@functools.cache
def workplace() -> Path:
    """The temporary folder of this campaign, in memory where the system has such a place. It is removed at the end."""
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="m2s-faults-", dir=memory if os.access(memory, os.W_OK) else None))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(place, ignore_errors=True))
    return place


def new_folder() -> Path:
    """Make an empty folder for a case."""
    return Path(tempfile.mkdtemp(dir=workplace()))


@functools.cache
def base() -> Path:
    """The folder of the inputs: runs `m2s` and `sedd`, samples `drawn.npz`, and documents in `texts`."""
    folder = workplace() / "base"
    (folder / "texts").mkdir(parents=True)
    for name, count in (("a", 5), ("b", 3)):
        documents = [json.dumps({"text": f"{name}{i} " + "some words " * (i + 2)}) for i in range(count)]
        (folder / "texts" / f"{name}.jsonl").write_text("\n".join(documents) + "\n")
    (folder / "texts" / "c-test.txt").write_text("held out\n")
    with contextlib.chdir(folder), _silence():
        run_command(("train", "digits", "--out", "m2s", *TRAIN))
        run_command(("train", "digits", "--out", "sedd", "--method", "sedd", *TRAIN))
        run_command(("sample", "m2s", "--out", "drawn.npz", *DRAW, "--n", "16"))
    return folder


def copy_inputs(command: Command, folder: Path) -> None:
    """Copy what a command reads.

    Args:
        command: The command.
        folder: The folder of the case.
    """
    for name in command.inputs:
        source, target = base() / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)


def run_command(words: tuple[str, ...]) -> None:
    """Run a command in this process, as the program `m2s`.

    Args:
        words: Its arguments.
    """
    os.environ["M2S_DATA"] = os.path.join(os.getcwd(), "data")
    sys.argv = ["m2s", *words]
    main(words)


@functools.cache
def parse(arguments: tuple[str, ...]) -> Any:
    """Parse a command line. This takes half of the time of a case, and is the same in all cases of a command.

    Args:
        arguments: The words.
    """
    return m2s.cli.parse(list(arguments))


def run_forked(
    command: Command,
    folder: Path,
    prepare: Callable[[], Any] | None = None,
    finish: Callable[[], Any] | None = None,
    **options: Any,
) -> Ended:
    """Run a command in a fork.

    Args:
        command: The command.
        folder: The folder of the case.
        prepare: Called in the fork before the command.
        finish: Called in the fork after it; its result is the `value` of the end.
        **options: Options of `fork.forked`.

    Returns:
        How it ended.
    """

    parsed = parse(command.arguments)

    def work() -> Any:
        m2s.cli.parse = lambda _: parsed
        if prepare is not None:
            prepare()
        run_command(command.arguments)
        return None if finish is None else finish()

    return forked(work, folder, **options)


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run of a command.

    Args:
        files: What it leaves, as `snapshot` returns it.
        events: Its file-system calls.
        seconds: The time it took.
    """

    files: dict[str, bytes]
    events: list[Event]
    seconds: float


@functools.cache
def reference(name: str) -> Reference:
    """Run a command without a fault.

    Args:
        name: The name of the command.

    Returns:
        What it leaves and its events.
    """
    command, folder = COMMANDS[name], new_folder()
    copy_inputs(command, folder)
    events = Events(str(folder))
    started = time.monotonic()
    ended = run_forked(command, folder, events.install, lambda: events.seen)
    assert ended.code == 0, ended.err
    found = Reference(snapshot(folder), ended.value, time.monotonic() - started)
    shutil.rmtree(folder)
    return found


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder, without the values in `TIMINGS`. A folder has the content b"/".

    safetensors writes the metadata of a file in random order. So its header is sorted here, and the checksums of such files
    are left out. They are compared with the files when a state is read.

    Args:
        folder: The folder.

    Returns:
        The contents by relative path. Locks are left out: they hold the number of the process.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == ".lock":
            continue
        if path.is_dir():
            found[name] = b"/"
        elif path.suffix in (".json", ".jsonl"):
            found[name] = _without_timings(path)
        elif path.suffix == ".safetensors":
            found[name] = _with_sorted_header(path)
        else:
            found[name] = path.read_bytes()
    return found


def _with_sorted_header(path: Path) -> bytes:
    """A safetensors file with the keys of its header in order. A damaged one is returned as it is."""
    text = path.read_bytes()
    try:
        end = 8 + int.from_bytes(text[:8], "little")
        header = json.loads(text[8:end])
        header["__metadata__"] = {  # JSON inside JSON: the offsets of the shards
            name: json.loads(value) if value.startswith("{") else value for name, value in header["__metadata__"].items()
        }
        return json.dumps(header, sort_keys=True).encode() + text[end:]
    except (ValueError, KeyError, TypeError):
        return text


def _without_timings(path: Path) -> bytes:
    """The values of a JSON file. A damaged one is returned as it is."""
    dropped = (*TIMINGS, "files") if path.name in ("state.json", "manifest.json") else TIMINGS

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(entry) for key, entry in value.items() if key not in dropped}
        return [clean(entry) for entry in value] if isinstance(value, list) else value

    text = path.read_bytes()
    try:
        parts = text.splitlines() if path.suffix == ".jsonl" else [text]
        return "\n".join(json.dumps(clean(json.loads(part))) for part in parts).encode()
    except (ValueError, RecursionError):
        return text


def differences(found: dict[str, bytes], expected: dict[str, bytes]) -> str:
    """Describe how two snapshots differ.

    Args:
        found: The files of the case.
        expected: Those of the uninterrupted run.

    Returns:
        One line; empty where they are equal.
    """
    parts = [f"{name} is missing" for name in expected if name not in found]
    parts += [f"{name} is left over" for name in found if name not in expected]
    parts += [f"{name} differs" for name in expected if name in found and found[name] != expected[name]]
    return "; ".join(parts)


def check_completed(name: str, folder: Path) -> str:
    """Run a command again after a fault and compare what it leaves with an uninterrupted run.

    A command that had finished before the fault may answer that its output is there already, with exit code 2.

    Args:
        name: The name of the command.
        folder: The folder of the case.

    Returns:
        What is wrong; empty where nothing is.
    """
    ended = run_forked(COMMANDS[name], folder)
    if ended.code is None:
        return f"the second run hangs\n{ended.err}"
    if ended.traceback:
        return f"the second run ends with a traceback\n{ended.err}"
    found = differences(snapshot(folder), reference(name).files)
    complete = ended.code == 2 and "is there already" in ended.err
    if ended.code != 0 and not (complete and not found):
        return f"the second run ends with code {ended.code}{': ' + found if complete else ''}\n{ended.err}"
    return f"the second run leaves other files: {found}\n{ended.err}" if found else ""
