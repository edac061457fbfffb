"""The table of an entry of experiments/image_job.py, from the results of its stages."""

import json
from pathlib import Path
from typing import Any

from image_entries import Entry
from text_speed import logged_seconds, loss_records, speed

from m2s.errors import UserError
from m2s.io import output_folder, write_json
from m2s.provenance import command

TERMS = ("nelbo", "integral", "prior", "reconstruction")


def read(path: Path) -> dict[str, Any]:
    """Return the contents of a result; empty where there is none.

    Args:
        path: The file.
    """
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def bits(path: Path) -> dict[str, Any]:
    """Return the terms of a NELBO in bits per dimension; empty where there is none.

    Args:
        path: The result of `m2s evaluate bpd`.
    """
    found = read(path)
    return {term: found[term]["bits"] for term in TERMS} if found else {}


def seconds_until(run: Path, step: int) -> float:
    """Return the seconds from the start of a run to a step, without those between its starts.

    Args:
        run: The folder of the run.
        step: The step.
    """
    total = before = 0.0
    for record in loss_records(run):
        if record["step"] > step:
            break
        if record["seconds"] < before:  # the clock restarts when a run resumes
            total += before
        before = record["seconds"]
    return total + before


def read_row(out: Path, entry: Entry, name: str) -> dict[str, Any]:
    """Return what is known of a row.

    Args:
        out: The folder of all results.
        entry: The entry.
        name: The row.

    Returns:
        The row; empty where it has neither bits nor points.
    """
    run = out / "runs" / entry.run.format(row=name)
    nelbo = bits(out / "bpd" / f"{name}.json")
    points = []
    for file in (out / "points" / name).glob("*.bpd.json"):
        step = int(file.name.split(".")[0])
        distance = read(file.with_name(f"{step}.fid.json")).get("fid")
        points.append({"step": step, "seconds": seconds_until(run, step), "nelbo": bits(file), "fid": distance})
    if not nelbo and not points:
        return {}
    record, losses = read(run / "train.json").get("config", {}), loss_records(run)
    batch, steps = record["run"]["batch"], losses[-1]["step"]
    pixels = losses[-1]["tokens"] / (steps * batch)
    rate = speed(losses)
    fids = {file.stem: read(file) for file in sorted((out / "fid" / name).glob("*.json"))}
    return {
        "row": name,
        "method": entry.rows[name].method,
        "options": dict(entry.rows[name].options),
        "images": steps * batch,
        "images_per_second": None if rate is None else rate / pixels,
        "seconds": logged_seconds(run),
        "nelbo": nelbo,
        "points": [{**point, "images": point["step"] * batch} for point in sorted(points, key=lambda point: point["step"])],
        "fid": {label: found["fid"] for label, found in fids.items()},
        "samples": {label: found["samples"]["count"] for label, found in fids.items()},
        "versions": next(iter(fids.values()), {}).get("versions"),
    }


def format_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the Markdown tables: one of the rows, and one of points where there are any.

    Args:
        rows: The rows.
    """
    labels = list(dict.fromkeys(label for row in rows for label in row["fid"]))
    lines = [f"| row | images | images/s | bits/dim | {' | '.join(labels)} |", "|---" * (4 + len(labels)) + "|"]
    for row in rows:
        nelbo, rate = row["nelbo"].get("nelbo"), row["images_per_second"]
        cells = [f"`{row['row']}`", f"{row['images']:,}", "-" if rate is None else f"{rate:,.0f}"]
        cells.append(f"{nelbo['value']:.4f} ± {nelbo['rows_error']:.4f}" if nelbo else "-")
        cells += [f"{row['fid'][label]:.2f}" if label in row["fid"] else "-" for label in labels]
        lines.append(f"| {' | '.join(cells)} |")
    if any(row["points"] for row in rows):
        lines += ["", "| row | images | minutes | bits/dim | FID |", "|---|---|---|---|---|"]
    for row in rows:
        for point in row["points"]:
            distance = "-" if point["fid"] is None else f"{point['fid']:.2f}"
            value, minutes = point["nelbo"]["nelbo"]["value"], point["seconds"] / 60
            lines.append(f"| `{row['row']}` | {point['images']:,} | {minutes:.1f} | {value:.4f} | {distance} |")
    return lines


def write_table(out: Path, entry: Entry, names: list[str], results: Path) -> None:
    """Print the table of the rows that have results, and write it.

    Args:
        out: The folder of all results.
        entry: The entry.
        names: The rows.
        results: The file.

    Raises:
        UserError: No row has a result.
    """
    rows = [row for name in names if (row := read_row(out, entry, name))]
    if not rows:
        raise UserError(f"{out} has no results of {', '.join(names)}: run the rows first")
    print("\n".join(format_table(rows)))
    settings = {**entry.settings, "preset": entry.preset, "n": entry.n, "fid": list(entry.fid), "passes": entry.passes}
    output_folder(results.parent)
    write_json(results, {"command": command(), "settings": settings, "rows": rows})
