"""The table and the two figures of experiments/mnist.py, from the files of the rows."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from mnist_measure import SAMPLING_STEPS
from mnist_rows import RowKey, check_settings, read_rows

from m2s.errors import UserError
from m2s.io import atomic_write, output_folder, write_json
from m2s.provenance import command

PER_LINE = 20  # samples in a line of mnist-samples.png


def write_table(out: Path, results: Path) -> None:
    """Print the table, and write it with two figures from the files of the rows. The figures show the first seed of a method.

    Args:
        out: Folder of the rows.
        results: File of the table, such as mnist.json. The figures are mnist.png and mnist-samples.png beside it.

    Raises:
        UserError: The folder has no rows, or rows with different settings.
    """
    from m2s.report.methods import (  # loads matplotlib, which a training machine may lack
        plot_method_comparison,
        plot_sample_sheet,
    )

    found = read_rows(out)
    if not found:
        raise UserError(f"{out} has no rows: compute them with python experiments/mnist.py {out}")
    rows = list(found.values())
    check_settings(out, found, rows[0]["settings"])
    print("\n".join(format_table(rows)))
    transformers = [label for row, label in zip(rows, row_labels(rows), strict=True) if row.get("network") == "dit"]
    if transformers:
        print(f"\nA causal transformer in place of the U-Net, with one network call per pixel: {', '.join(transformers)}.")
    if lines := format_validations(rows):
        print("\nNELBO on the way, in bits per dimension:\n")
        print("\n".join(lines))
    settings = {key: value for key, value in rows[0]["settings"].items() if key != "seed"}
    output_folder(results.parent)
    write_json(results, {"command": command(), "settings": settings, "rows": rows})
    plotted: dict[str, RowKey] = {}
    for key, row in found.items():
        if "error" not in row:
            plotted.setdefault(key.method, key)
    pictures = {}
    for name, key in plotted.items():
        if (out / f"{key}.npz").exists():  # an imported row has none
            with np.load(out / f"{key}.npz", allow_pickle=False) as file:
                pictures[name] = file["tokens"][:PER_LINE].reshape(-1, *(math.isqrt(file["tokens"].shape[1]),) * 2)
    compared = [found[key] for key in plotted.values()]
    for path, figure in (
        (results.with_suffix(".png"), compared and plot_method_comparison(compared, SAMPLING_STEPS)),
        (results.with_name(f"{results.stem}-samples.png"), pictures and plot_sample_sheet(pictures)),
    ):
        if figure:
            with atomic_write(path) as temporary:
                figure.savefig(temporary, dpi=200, bbox_inches="tight")


def format_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the Markdown table.

    Args:
        rows: The rows, finished or failed.
    """
    columns = ["method", "bits per dimension", *(f"FID, {steps}" for steps in SAMPLING_STEPS)]
    columns += ["training images/s", "peak GiB", f"samples/s, {SAMPLING_STEPS[-1]}", "sampler"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row, label in zip(rows, row_labels(rows), strict=True):
        cells = [label]
        if "error" in row:
            lines.append(f"| {cells[0]} | failed: {row['error'].splitlines()[0]} |" + " |" * (len(columns) - 2))
            continue
        bits, samples = row["nelbo"]["nelbo"], {entry["steps"]: entry for entry in row["samples"]}
        cells.append(f"{formatted(bits['value'], '.4f')} ± {formatted(bits['rows_error'], '.4f')}")
        cells += [formatted(samples.get(steps, {}).get("fid"), ".2f") for steps in SAMPLING_STEPS]
        last = row["samples"][-1]
        if last["steps"] not in SAMPLING_STEPS:
            cells[-1] = f"{formatted(last['fid'], '.2f')} ({last['steps']} steps)"
        cells += [formatted(row["images_per_second"], ",.0f"), formatted(row["peak_gib"], ".1f")]
        cells += [formatted(last["samples_per_second"], ",.1f"), row["sampler"]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def format_validations(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table of the NELBO on the way: a line for each step, a column for each row.

    Args:
        rows: The rows, finished or failed. Those without validations are left out.

    Returns:
        The lines; none without validations.
    """
    curves = {
        label: {point["step"]: point["bits"] for point in row["validation"]}
        for row, label in zip(rows, row_labels(rows), strict=True)
        if row.get("validation")
    }
    if not curves:
        return []
    lines = [f"| step | {' | '.join(curves)} |", "|---" * (len(curves) + 1) + "|"]
    for step in sorted(set().union(*curves.values())):
        lines.append(f"| {step:,} | {' | '.join(formatted(curve.get(step), '.4f') for curve in curves.values())} |")
    return lines


def row_labels(rows: list[dict[str, Any]]) -> list[str]:
    """Return the label of each row in a Markdown table: the method, and the seed where the table has several.

    Args:
        rows: The rows.
    """
    keys = [RowKey.of(row) for row in rows]
    several = len({key.seed for key in keys}) > 1
    return [f"`{key.method}`, seed {key.seed}" if several else f"`{key.method}`" for key in keys]


def formatted(value: float | None, spec: str) -> str:
    """Return a number in the given format, or "-" if there is none.

    Args:
        value: The number.
        spec: Format specification, such as ".2f".
    """
    return "-" if value is None else f"{value:{spec}}"
