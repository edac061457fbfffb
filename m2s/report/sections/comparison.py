"""Comparisons of `m2s compare`: the opening of the page, samples on the same noise, and what the projection changes."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from m2s.npz import read_npz
from m2s.report.blocks import Cell, Picture, Table, conjunction, figure_picture, format_number
from m2s.report.comparison import NAMES, arm_label, distance_text, plot_distances
from m2s.report.read_run import Result, TrainingRun
from m2s.report.samples import grid_uri
from m2s.report.sections.common import Problems
from m2s.report.sections.provenance import format_command

SHOWN = 16  # images in a grid
PREFERRED = 8  # the number of steps that is shown first


def opening(runs: Sequence[TrainingRun], problems: Problems) -> dict[str, Any] | None:
    """Return what the page opens with.

    Args:
        runs: The runs.
        problems: Receives what cannot be shown.

    Returns:
        `sentence`, `picture` and `command` of the first comparison; None where there is none.
    """
    found = problems.each_result(runs, "compare", _opening)
    return found[0] if found else None


def collect(runs: Sequence[TrainingRun], problems: Problems) -> dict[str, Any] | None:
    """Collect the comparisons.

    Args:
        runs: The runs.
        problems: Receives what cannot be shown.

    Returns:
        `comparisons`, one dictionary each; None where there is none.
    """
    comparisons = problems.each_result(runs, "compare", partial(_comparison, problems))
    return {"comparisons": comparisons} if comparisons else None


def first_steps(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry of `steps` that is shown first: that of 8 steps, or the next fewer, or the fewest.

    Args:
        value: The content of compare.json.
    """
    few = [row for row in value["steps"] if row["steps"] <= PREFERRED]
    return few[-1] if few else value["steps"][0]


def _opening(run: TrainingRun, result: Result) -> dict[str, Any]:
    """Return the sentence, the plot and the command of one comparison."""
    value = result.value
    row = first_steps(value)
    distances = [f"{row['distances'][arm['name']]['value']:.3f} for {arm_label(arm)}" for arm in value["arms"]]
    reference = value["reference"]
    sentence = f"With {row['steps']} sampling steps on the same noise, the distance to the data is {conjunction(distances)}."
    alt = f"Distance to the data over the number of sampling steps for {conjunction(map(arm_label, value['arms']))}"
    settings, real = value["settings"], reference.get("real")
    floor = f" Dotted: {real['images']:,} real images against the other {real['against']:,}." if real else ""
    caption = (
        f"Fréchet distance of pixels between {settings['n']:,} samples and {reference['count']:,} images of "
        f"{reference['name']}; lower is better; bars: 95% intervals. All models start from the same noise "
        f"(sampler {settings['sampler']}, grid {settings['grid']}, seed {settings['seed']}).{floor}"
    )
    return {
        "sentence": sentence,
        "picture": figure_picture(plot_distances(value), alt, caption),
        "command": format_command(value),
    }


def _comparison(problems: Problems, run: TrainingRun, result: Result) -> dict[str, Any]:
    """Return the grids of samples, the table and the effects of the projection of one comparison."""
    value, folder = result.value, (run.path / result.file).parent
    shape, levels = tuple(value["reference"]["shape"]), value["levels"]

    def grid(file: str, alt: str) -> Picture | None:
        def show() -> Picture:
            tokens = torch.from_numpy(read_npz(folder / file, ["tokens"])["tokens"][:SHOWN]).long()
            return Picture(grid_uri(tokens, shape, levels), alt)

        try:
            return problems.attempt(folder / file, show)
        except OSError as error:
            problems.append(f"{folder / file} is not shown: {error.strerror}")
            return None

    steps = [row["steps"] for row in value["steps"]]
    arms = []
    for arm in value["arms"]:
        label = arm_label(arm)
        grids = [(count, grid(arm["files"][str(count)], f"Samples of {label} with {count} steps")) for count in steps]
        distances = {row["steps"]: distance_text(row["distances"][arm["name"]]) for row in value["steps"]}
        shown = [{"steps": count, "picture": one, "distance": distances[count]} for count, one in grids if one]
        arms.append({"label": label, "grids": shown})
    return {
        "first": first_steps(value)["steps"],
        "position": steps.index(first_steps(value)["steps"]),
        "steps": steps,
        "reference": value["reference"]["name"],
        "real": grid(value["reference"]["file"], f"Images of {value['reference']['name']}"),
        "arms": arms,
        "command": format_command(value),
        "table": _table(value),
        "projection": _projection(value),
    }


def _table(value: Mapping[str, Any]) -> Table:
    """Return the distances and the paired differences to the first model."""
    arms = value["arms"]
    first, *others = (arm["name"] for arm in arms)
    labels = {arm["name"]: arm_label(arm) for arm in arms}
    rows = []
    for row in value["steps"]:
        distances = [
            Cell(f"{row['distances'][arm['name']]['value']:.3f}", (f"± {row['distances'][arm['name']]['error']:.3f}",))
            for arm in arms
        ]
        gaps = [row["differences"][f"{name} - {first}"] for name in others]
        intervals = [Cell(f"{gap['value']:+.3f}", (f"[{gap['low']:+.3f}, {gap['high']:+.3f}]",)) for gap in gaps]
        rows.append((f"{row['steps']} steps", *distances, *intervals))
    head = ("steps", *labels.values(), *(f"{labels[name]} − {labels[first]}" for name in others))
    return Table(head, rows, range(1, len(head)))


def _projection(value: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the projection changes; None where it was not measured."""
    found = value["projection"]
    if found is None:
        return None
    few, many = value["steps"][0], value["steps"][-1]
    gap = f"{found['arm']} - {found['of']}"
    dropped = {row["steps"]: row for row in found["dropped"]}
    names = [name for name in found["mean_scores"][0] if name != "t"]
    of = NAMES.get(found["of"], found["of"])
    labels = {"as it is": of, "projected": f"{of} repaired", **{arm["name"]: arm_label(arm) for arm in value["arms"]}}
    rows = [(f"t = {row['t']}", *(format_number(row[name], 3) for name in names)) for row in found["mean_scores"]]
    parts = found["parts"]
    return {
        "of": of,
        "few": {"steps": few["steps"], **_change(few["differences"][gap], dropped[few["steps"]])},
        "many": {"steps": many["steps"], **_change(many["differences"][gap], dropped[many["steps"]])},
        "lowest": min(found["mean_scores"], key=lambda row: row["projected"]),
        "parts": {name: f"{part['value']:.3f}" for name, part in parts["distances"].items()},
        "parts_steps": parts["steps"],
        "means": Table(("time", *(labels.get(name, name) for name in names)), rows, range(1, 1 + len(names))),
        "examples": found["examples"],
        "samples": found["dropped_samples"],
    }


def _change(gap: Mapping[str, float], dropped: Mapping[str, Any]) -> dict[str, Any]:
    """Return the change of the distance by the projection, and what the sampler drops without it."""
    text = "does not clearly change the distance"
    if gap["low"] * gap["high"] > 0:
        text = f"{'lowers' if gap['high'] < 0 else 'raises'} the distance by {abs(gap['value']):.3f}"
    return {
        "text": f"{text} (95% interval {gap['low']:+.3f} to {gap['high']:+.3f})",
        "mass": f"{dropped['mass']:.2g}",
        "positions": f"{dropped['positions']:.1%}",
    }
