"""The files of the rows of experiments/mnist.py: names, what a training run left, failed rows, and rows of a table."""

import concurrent.futures
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2s.cli.evaluate.bpd import finite
from m2s.errors import UserError
from m2s.evaluation.earlier_names import with_current_names
from m2s.io import output_folder, write_json
from m2s.methods import METHODS
from m2s.training.log import read_log

NELBO_TERMS = ("bits", "error", "integral", "prior", "reconstruction")  # of a validation, in bits per dimension


@dataclass(frozen=True)
class RowKey:
    """The method and the seed of a row. As a string it names the files of the row.

    Args:
        method: The method.
        seed: The seed of the training run.
    """

    method: str
    seed: int

    def __str__(self) -> str:
        return f"{self.method}-seed{self.seed}"

    @staticmethod
    def of(row: dict[str, Any]) -> "RowKey":
        """Return the key of a row.

        Args:
            row: The row.
        """
        return RowKey(row["method"], row["settings"]["seed"])


def read_training(run: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a training run measured: images per second, peak memory and, where the settings ask for it, validations.

    A validation has the step, the NELBO, its standard error over images and its terms.

    Args:
        run: Folder of the run.
        settings: Settings of the row.

    Returns:
        Keys of the row; none if the run has not ended.
    """
    if not (run / "speed.json").exists():
        return {}
    found: dict[str, Any] = json.loads((run / "speed.json").read_text(encoding="utf-8"))
    if settings.get("validate_every"):
        records = [line.record or {} for line in read_log(run / "log.jsonl")]
        found["validation"] = [
            {"step": record["step"], **{term: record[f"validation_{term}"] for term in NELBO_TERMS}}
            for record in records
            if "validation_bits" in record
        ]
    return found


def write_row(path: Path, row: dict[str, Any], distances: list[concurrent.futures.Future[float]]) -> None:
    """Wait for the Frechet distances of a row, and write its file.

    Args:
        path: File of the row.
        row: The row without distances.
        distances: One for each entry of `row["samples"]`.
    """
    try:
        for samples, distance in zip(row["samples"], distances, strict=True):
            samples["fid"] = distance.result()
        write_json(path, finite(row))
    except Exception as error:
        write_error(path, row["method"], row["settings"], error)


def write_error(path: Path, name: str, settings: dict[str, Any], error: Exception) -> None:
    """Write the file of a row that failed.

    Args:
        path: File of the row.
        name: The method.
        settings: Settings of the row.
        error: The exception that ended the row.
    """
    text = f"{type(error).__name__}: {error}"
    print(f"{path.stem} failed: {text}", file=sys.stderr, flush=True)
    write_json(path, {"method": name, "settings": settings, "error": text})


def read_rows(out: Path) -> dict[RowKey, dict[str, Any]]:
    """Return the rows that have a file, in the order of the methods and then of the seeds.

    Failed rows have the results of their training run, if it ended.

    Args:
        out: Folder of the rows.

    Raises:
        UserError: A file is not JSON.
    """
    found = {}
    for path in out.glob("*-seed*.json"):
        name, _, seed = path.stem.rpartition("-seed")
        if name in METHODS and seed.isdecimal():
            try:
                found[RowKey(name, int(seed))] = with_current_names(json.loads(path.read_text(encoding="utf-8")))
            except ValueError as error:
                raise UserError(f"{path} is not JSON ({error}): remove it to compute the row again") from error
    for key, row in found.items():
        if "error" in row:
            row |= read_training(out / "runs" / str(key), row["settings"])
    order = list(METHODS)
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0].method), item[0].seed)))


def import_rows(table: Path, out: Path) -> None:
    """Write a file for each row of a table that has none in the folder.

    Args:
        table: The file that `--table` wrote, such as mnist.json.
        out: Folder of the rows.

    Raises:
        UserError: The table cannot be read, or has other settings than the rows of the folder.
    """
    try:
        rows = with_current_names(json.loads(table.read_text(encoding="utf-8"))["rows"])
        found = {RowKey.of(row): row for row in rows if "error" not in row and row["method"] in METHODS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--rows is {table}, but no rows can be read there: {type(error).__name__}: {error}") from error
    existing = read_rows(out)
    if rows := {**found, **existing}:
        check_settings(out, rows, next(iter(rows.values()))["settings"])
    output_folder(out)
    for key, row in found.items():
        if "error" in existing.get(key, {"error": "missing"}):
            write_json(out / f"{key}.json", row)


def check_settings(out: Path, rows: dict[RowKey, dict[str, Any]], settings: dict[str, Any]) -> None:
    """Raise an error unless all rows have the given settings. Seeds may differ.

    Args:
        out: Folder of the rows.
        rows: The rows.
        settings: The expected settings.

    Raises:
        UserError: A row has other settings.
    """
    for name, row in rows.items():
        for key in {**settings, **row["settings"]}:
            if key != "seed" and row["settings"].get(key) != settings.get(key):
                raise UserError(
                    f"{out / str(name)}.json was made with {key} {row['settings'].get(key)}, not {settings.get(key)}, but all "
                    "rows of a table must have the same settings except for the seed: use another folder, or the same settings"
                )
