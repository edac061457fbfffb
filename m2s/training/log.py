"""What a run says: log.jsonl, one line for each record, and a bar or a line for people."""

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
from m2s.training.run_folder import RECORD

NAME = "log.jsonl"
SILENCE = 10.0  # seconds without a line for people, at most, until a start's first record, but for the length of an update
TIMINGS = ("seconds", "tokens_per_second")  # all that differs between a run and the same run interrupted


def truncate(path: Path, step: int) -> None:
    """Leave the records up to `step`; a last line that was cut short goes too."""
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
    """The records of a run from `step` on."""

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
        self.shown = -math.inf  # when people last had a line; infinite from the first record on, for others follow

    def record(self, **values: Any) -> None:
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        for writer in self.writers:
            writer.record(values)
        self.show(**values)
        self.shown = math.inf

    def show(self, **values: Any) -> None:
        """A line for people alone, where no bar moves."""
        if self.bar.disable:
            print(line(values), file=sys.stderr, flush=True)
        self.shown = time.monotonic()

    @property
    def silent(self) -> bool:
        """Whether people should have a line before the first record: at once, and then after each `SILENCE`."""
        return time.monotonic() - self.shown > SILENCE

    def advance(self, loss: float, bits: float, rate: float) -> None:
        self.bar.set_postfix_str(f"loss {loss:.4f}, {bits:.4f} bits, {rate:,.0f} tokens/s", refresh=False)
        self.bar.update()

    def say(self, text: str) -> None:
        self.bar.clear()
        print(text, file=sys.stderr, flush=True)

    def sync(self) -> None:
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.bar.close()
        self.file.close()
        for writer in self.writers:
            writer.close()


def line(values: dict[str, Any]) -> str:
    """A record for people."""
    return ", ".join(f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items())


class _TensorBoard:
    """Event files in the folder `tensorboard`, one of each start; what came after `step` is marked as undone."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def record(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name != "step":
                self.writer.add_scalar(name, value, values["step"])
        self.writer.flush()  # a killed run has the records here that log.jsonl has

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    """A run of Weights & Biases, the same one at every start: its id is made of what train.json says of the first."""

    def __init__(self, folder: Path) -> None:
        wandb = importlib.import_module("wandb")
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        first = json.dumps([record["config"]["run"]["out"], record["starts"][0]])
        number = hashlib.blake2b(first.encode(), digest_size=8).hexdigest()
        options = {"project": "m2s", "name": folder.name, "id": number, "dir": str(folder), "config": record["config"]}
        try:
            self.run: Any = wandb.init(**options, resume="allow")
        except wandb.Error as error:
            raise UserError(f"--wandb: {error}") from error

    def record(self, values: dict[str, Any]) -> None:
        self.run.log({name: value for name, value in values.items() if name != "step"}, step=values["step"])

    def close(self) -> None:
        self.run.finish()
