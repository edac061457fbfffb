"""Rows of a text experiment in files: finished rows of a folder and of the result file, and the table that is printed."""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from text_entries import ENTRIES, Entry

from m2s.errors import UserError
from m2s.evaluation.earlier_names import with_current_names
from m2s.io import output_folder, write_json
from m2s.provenance import command

RESULTS = Path(__file__).parent / "results"


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file.

    Args:
        path: The file.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        return dict(with_current_names(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): remove it to compute its rows again") from error


def read_rows(out: Path, entry: Entry) -> dict[str, dict[str, Any]]:
    """Return the rows that have a file in the folder, in the order of the entry.

    Args:
        out: Folder of the rows.
        entry: The table.
    """
    return {name: read(out / f"{name}.json") for name in entry.rows if (out / f"{name}.json").exists()}


def known_rows(options: argparse.Namespace, shared: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows of the results file, if it has the same settings and data.

    Args:
        options: Command line options.
        shared: Settings and description of the data.
    """
    path = options.results / f"text-{options.entry}.json"
    found = read(path) if path.exists() else {}
    equal = all(found.get(key) == value for key, value in shared.items())
    return {row["row"]: row for row in found["rows"]} if found and equal else {}


def check_settings(out: Path, shared: dict[str, Any]) -> None:
    """Raise an error unless the entry.json of the folder has the same settings and data.

    Args:
        out: Folder of the rows.
        shared: Settings and description of the data.

    Raises:
        UserError: The settings or the data differ.
    """
    path = out / "entry.json"
    if path.exists() and (existing := read(path)) != shared:
        key = next(key for key in shared if existing.get(key) != shared[key])
        raise UserError(
            f"{path} has {key} {existing.get(key)}, but now it is {shared[key]}: use another folder, or the same settings"
        )


def format_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the Markdown table: final NELBO, validations during training, gradient norms and speed.

    Args:
        rows: The rows, finished or failed.
    """
    finished = [row for row in rows if "error" not in row]
    points = sorted({point["tokens"] for row in finished for point in row["validation"][:-1]})
    columns = ["row", "NELBO, nats per token", "bits per byte", *(f"{tokens / 1e6:.1f} M" for tokens in points)]
    columns += ["gradient norm: median", "maximum", "tokens/s", "seconds"]
    budgeted = any("budget" in row for row in finished)
    columns += ["of them training", "M tokens", "epochs"] if budgeted else []
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        if "error" in row:
            lines.append(f"| `{row['row']}` | failed: {row['error'].splitlines()[0]} |" + " |" * (len(columns) - 2))
            continue
        nats, trace = row["nelbo"]["nelbo"]["nats"], row["trace"]
        cells = [f"`{row['row']}`", f"{nats['value']:.3f} ± {nats['rows_error']:.3f}"]
        cells += [f"{row['nelbo']['nelbo']['bits_per_byte']['value']:.3f}"]
        found = {point["tokens"]: f"{point['nats']:.3f}" for point in row["validation"][:-1]}
        cells += [found.get(tokens, "-") for tokens in points]
        cells += [f"{statistics.median(trace['grad_norm']):,.0f}", f"{max(trace['grad_norm_max']):,.0f}"]
        cells += [f"{row['tokens_per_second'] or math.nan:,.0f}", f"{row['seconds']['train']:.0f}"]
        if budgeted:
            budget = row["budget"]
            cells += [f"{budget['training_seconds']:.0f}", f"{row['tokens'] / 1e6:.1f}", f"{budget['epochs']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_table(options: argparse.Namespace) -> None:
    """Print the table of the rows in the folder and in the results file, and write the results file.

    Args:
        options: Command line options.

    Raises:
        UserError: The folder has no rows.
    """
    entry, path = ENTRIES[options.entry], options.out / "entry.json"
    if not path.exists():
        raise UserError(f"{options.out} has no rows: compute them with python experiments/text.py {options.out} --data FOLDER")
    shared = read(path)
    found = {**known_rows(options, shared), **read_rows(options.out, entry)}
    rows = [found[name] for name in entry.rows if name in found]
    print("\n".join(format_table(rows)))
    target = output_folder(options.results) / f"text-{options.entry}.json"
    write_json(target, {"command": command(), **shared, "rows": rows})
