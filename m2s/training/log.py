"""The log of a run: log.jsonl, with one line for each record, and a progress bar or lines on the terminal."""

import hashlib
import importlib
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2s.errors import UserError, print_escaped
from m2s.io import atomic_write, open_file, parse_json
from m2s.progress import bar_class
from m2s.training.config import RECORD

NAME = "log.jsonl"
SILENCE = 10.0  # until the first record of a start, the terminal shows a line at least every so many seconds
TIMINGS = ("seconds", "tokens_per_second")  # the only values that differ between a run and the same run interrupted


@dataclass(frozen=True)
class LogLine:
    """A line of log.jsonl.

    Args:
        number: Its number, from 1.
        data: Its bytes, without the end of the line.
        record: The record; None where the line cannot be read.
    """

    number: int
    data: bytes
    record: dict[str, Any] | None


def read_log(path: Path) -> list[LogLine]:
    """Read log.jsonl. A line that is damaged does not hide the others.

    Args:
        path: The file log.jsonl.

    Returns:
        Its lines. Empty ones are left out.

    Raises:
        OSError: The file cannot be read.
    """
    lines = enumerate(path.read_bytes().split(b"\n"), 1)
    return [LogLine(number, data, _parse_record(data)) for number, data in lines if data.strip()]


def _parse_record(data: bytes) -> dict[str, Any] | None:
    """The record of a line; None where there is none."""
    try:
        record = parse_json(data, allow_nan=True)
    except ValueError:
        return None
    step = record.get("step")
    return record if type(step) is int and 0 <= step < 2**63 else None


def truncate(path: Path, step: int) -> None:
    """Remove the records after a step, and an incomplete last line. Other lines that are damaged go to log.jsonl.damaged.

    Args:
        path: The file log.jsonl.
        step: The last step to keep.

    Raises:
        UserError: The file is not an ordinary file.
    """
    if not path.exists():
        return
    if not path.is_file():  # reading a pipe could wait forever
        raise UserError(f"{path} is not an ordinary file: remove it")
    ended = path.read_bytes().endswith(b"\n")
    lines = read_log(path)
    bad = [line for line in lines if line.record is None]
    if bad and bad[-1] is lines[-1] and not ended:
        bad.pop()  # a process that was killed wrote a part of it
    if bad:
        aside = path.with_name(path.name + ".damaged")
        before = aside.read_bytes() if aside.is_file() else b""
        with atomic_write(aside) as temporary:
            temporary.write_bytes(before + b"".join(line.data + b"\n" for line in bad))
        shown = ", ".join(str(line.number) for line in bad[:8]) + (", ..." if len(bad) > 8 else "")
        print_escaped(f"{path}: no record in line {shown}; moved to {aside.name}. All other records are kept", file=sys.stderr)
    kept = [line.data + b"\n" for line in lines if line.record is not None and line.record["step"] <= step]
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"".join(kept))


class Log:
    """The log of a run from a step on.

    Args:
        folder: The folder of the run.
        step: The step from which the run starts or resumes. Later records are removed.
        steps: The number of steps of the run.
        tensorboard: Also write the log for TensorBoard.
        wandb: Also send the log to Weights & Biases.
        quiet: Show neither a bar nor lines on the terminal.

    Raises:
        UserError: Weights & Biases cannot be reached.
    """

    def __init__(
        self, folder: Path, step: int, steps: int, tensorboard: bool = False, wandb: bool = False, quiet: bool = False
    ) -> None:
        self.writers: list[Any] = []
        if tensorboard:
            self.writers.append(_TensorBoard(folder, step))
        if wandb:
            self.writers.append(_Wandb(folder))
        truncate(folder / NAME, step)
        self.file = os.fdopen(open_file(folder / NAME, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")
        self.quiet = quiet
        tqdm = bar_class()
        in_notebook = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)  # tqdm.auto chose a widget
        self.bar = tqdm(
            total=steps,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            disable=quiet or not (sys.stderr.isatty() or in_notebook),
        )
        self.shown = -math.inf  # the time of the last line on the terminal; infinite after the first record

    def record(self, **values: Any) -> None:
        """Write a record everywhere.

        Args:
            **values: The values by name. `step` is required.
        """
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        for writer in self.writers:
            writer.record(values)
        self.show(**values)
        self.shown = math.inf

    def show(self, **values: Any) -> None:
        """Print a line on the terminal where there is no progress bar.

        Args:
            **values: The values by name.
        """
        if self.bar.disable and not self.quiet:
            print(line(values), file=sys.stderr, flush=True)
        self.shown = time.monotonic()

    @property
    def silent(self) -> bool:
        """Whether the terminal needs a line before the first record: at once, and then after each `SILENCE`."""
        return time.monotonic() - self.shown > SILENCE

    def advance(self, loss: float, bits: float, rate: float) -> None:
        """Move the progress bar by one step.

        Args:
            loss: The loss of the step, nats per position.
            bits: The same in bits per position.
            rate: Tokens per second.
        """
        self.bar.set_postfix_str(f"loss {loss:.4f}, {bits:.4f} bits, {rate:,.0f} tokens/s", refresh=False)
        self.bar.update()

    def say(self, text: str) -> None:
        """Print a message.

        Args:
            text: The message.
        """
        self.bar.clear()
        print_escaped(text, file=sys.stderr)

    def sync(self) -> None:
        """Flush log.jsonl to the disk."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close all files and connections."""
        self.bar.close()
        self.file.close()
        for writer in self.writers:
            writer.close()


def line(values: dict[str, Any]) -> str:
    """Return a record as a line of text.

    Args:
        values: The record.
    """
    return ", ".join(f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items())


class _TensorBoard:
    """Event files in the folder `tensorboard`, one for each start. Events after `step` are purged."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def record(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name != "step":
                self.writer.add_scalar(name, value, values["step"])
        self.writer.flush()  # so that a killed run has the same records here as in log.jsonl

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    """A run of Weights & Biases, the same one at every start: its id is a hash of the first start in train.json."""

    def __init__(self, folder: Path) -> None:
        wandb = importlib.import_module("wandb")
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        first = json.dumps([record["config"]["run"]["out"], record["starts"][0]])
        identity = hashlib.blake2b(first.encode(), digest_size=8).hexdigest()
        options = {"project": "m2s", "name": folder.name, "id": identity, "dir": str(folder), "config": record["config"]}
        try:
            self.run: Any = wandb.init(**options, resume="allow")
        except wandb.Error as error:
            raise UserError(f"--wandb: {error}") from error

    def record(self, values: dict[str, Any]) -> None:
        self.run.log({name: value for name, value in values.items() if name != "step"}, step=values["step"])

    def close(self) -> None:
        self.run.finish()
