"""The log of a run: log.jsonl, with one line for each record, and a progress bar or lines on the terminal."""

import hashlib
import importlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from m2s.errors import UserError
from m2s.io import atomic_write
from m2s.training.config import RECORD

NAME = "log.jsonl"
SILENCE = 10.0  # until the first record of a start, the terminal shows a line at least every so many seconds
TIMINGS = ("seconds", "tokens_per_second")  # the only values that differ between a run and the same run interrupted


def truncate(path: Path, step: int) -> None:
    """Remove the records after a step, and an incomplete last line.

    Args:
        path: The file log.jsonl.
        step: The last step to keep.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if record["step"] > step:
            break
        kept.append(line + "\n")
    with atomic_write(path) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")


class Log:
    """The log of a run from a step on.

    Args:
        folder: The folder of the run.
        step: The step from which the run starts or resumes. Later records are removed.
        steps: The number of steps of the run.
        tensorboard: Also write the log for TensorBoard.
        wandb: Also send the log to Weights & Biases.

    Raises:
        UserError: Weights & Biases cannot be reached.
    """

    def __init__(self, folder: Path, step: int, steps: int, tensorboard: bool = False, wandb: bool = False) -> None:
        from tqdm import tqdm

        self.writers: list[Any] = []
        if tensorboard:
            self.writers.append(_TensorBoard(folder, step))
        if wandb:
            self.writers.append(_Wandb(folder))
        truncate(folder / NAME, step)
        self.file = (folder / NAME).open("a", encoding="utf-8")
        self.bar = tqdm(total=steps, initial=step, unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True)
        self.shown = -math.inf  # the time of the last line on the terminal; infinite after the first record

    def record(self, **values: Any) -> None:
        """Write a record everywhere."""
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        for writer in self.writers:
            writer.record(values)
        self.show(**values)
        self.shown = math.inf

    def show(self, **values: Any) -> None:
        """Print a line on the terminal where there is no progress bar."""
        if self.bar.disable:
            print(line(values), file=sys.stderr, flush=True)
        self.shown = time.monotonic()

    @property
    def silent(self) -> bool:
        """Whether the terminal needs a line before the first record: at once, and then after each `SILENCE`."""
        return time.monotonic() - self.shown > SILENCE

    def advance(self, loss: float, bits: float, rate: float) -> None:
        """Move the progress bar by one step."""
        self.bar.set_postfix_str(f"loss {loss:.4f}, {bits:.4f} bits, {rate:,.0f} tokens/s", refresh=False)
        self.bar.update()

    def say(self, text: str) -> None:
        """Print a message."""
        self.bar.clear()
        print(text, file=sys.stderr, flush=True)

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
