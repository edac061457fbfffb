"""Logs of text runs, their speed in tokens per second, and the speed of rows that earlier tables have measured."""

import itertools
import json
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m2s.errors import UserError
from m2s.presets import PRESETS
from m2s.training.log import NAME as LOG
from m2s.training.log import read_log

Key = tuple[str, str]  # method and optimizer


def read_records(run: Path) -> list[dict[str, Any]]:
    """Return the records of the log of a run; none where there is no log.

    Args:
        run: The folder of the run.
    """
    return [line.record for line in read_log(run / LOG) if line.record is not None] if (run / LOG).exists() else []


def loss_records(run: Path) -> list[dict[str, Any]]:
    """Return the records of the log that have a training loss.

    Args:
        run: The folder of the run.
    """
    return [record for record in read_records(run) if "loss" in record]


def logged_seconds(run: Path) -> float:
    """Return the seconds of all starts of a run, from its log. The clock restarts when a run resumes.

    Args:
        run: The folder of the run.
    """
    clock = [record["seconds"] for record in read_records(run)]
    return float(sum(now for now, following in itertools.pairwise([*clock, -1.0]) if following < now))


def rates(records: list[dict[str, Any]]) -> list[float]:
    """Return the tokens per second of each interval of the log.

    Args:
        records: Lines of the log with `tokens` and `seconds`.
    """
    pairs = [(b["tokens"] - a["tokens"], b["seconds"] - a["seconds"]) for a, b in itertools.pairwise(records)]
    return [tokens / seconds for tokens, seconds in pairs if seconds > 0]  # the clock restarts when a run resumes


def speed(records: list[dict[str, Any]]) -> float | None:
    """Return the median of tokens per second over the intervals of the log; None without intervals.

    Args:
        records: Lines of the log with `tokens` and `seconds`.
    """
    found = rates(records)
    return statistics.median(found) if found else None


def speed_of_halves(records: list[dict[str, Any]]) -> float:
    """Return the tokens per second of a run whose two halves may differ in speed: the harmonic mean of their medians.

    Medians leave out the intervals with compilation and validations, where these are few.

    Args:
        records: Lines of the log with `tokens` and `seconds`.
    """
    found = rates(records) or [records[-1]["tokens"] / records[-1]["seconds"]]
    middle = len(found) // 2
    return statistics.harmonic_mean([statistics.median(half) for half in (found[:middle], found[middle:]) if half])


def measured_speeds(paths: Sequence[Path], device: str) -> dict[Key, float]:
    """Return the median tokens per second of finished rows, by method and optimizer.

    Args:
        paths: Files that experiments/text.py wrote with `--table`.
        device: Only rows of this device, as results name it.

    Raises:
        UserError: A file cannot be read.
    """
    found: dict[Key, list[float]] = {}
    for path in paths:
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is no result file of text.py --table ({type(error).__name__}: {error})") from error
        for row in rows:
            if row.get("device") == device and row.get("tokens_per_second") and " --method " in row.get("train", ""):
                found.setdefault(key(row["train"]), []).append(row["tokens_per_second"])
    return {one: statistics.median(values) for one, values in found.items()}


def key(train: str) -> Key:
    """Return the method and the optimizer of a row.

    Args:
        train: Its command, `m2s train PRESET --method ...`.
    """
    words = shlex.split(train)
    options = {word: following for word, following in itertools.pairwise(words) if word.startswith("--")}
    return options["--method"], options.get("--optimizer.kind", PRESETS[words[2]].optimizer.kind)
