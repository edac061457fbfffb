"""The result of `m2s compare` as a table and as a figure: the distance to the data over the number of sampling steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from m2s.io import atomic_write
from m2s.report.blocks import svg_text
from m2s.report.style import (
    BLUE,
    COLORS,
    GREEN,
    INK,
    MUTED,
    SMALL,
    TEXT,
    VERMILLION,
    format_frame,
    new_figure,
    plain_label,
    spread_labels,
)

ComparisonResult = Mapping[str, Any]  # the content of compare.json
KEYS = {"arms", "steps", "projection", "reference", "levels"}
NAMES = {"m2s": "M2S", "m2s-offset": "M2S offset", "sedd": "SEDD"}  # as the papers write them
EXACT = "offset='exact'"  # in the description of a head
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def arm_label(arm: Mapping[str, Any]) -> str:
    """Return the name of a model in one form.

    Args:
        arm: An entry of `arms` of the result.

    Returns:
        The name, such as "SEDD" or "SEDD repaired". M2S with the exact offset is not the paper's head, so it has its own name.
    """
    name = str(arm["name"]).removesuffix("-repaired") if arm["project"] else str(arm["name"])
    name = "m2s-offset" if name == "m2s" and EXACT in arm["head"] else name
    label = NAMES.get(name, name)
    return f"{label} repaired" if arm["project"] else label


def distance_text(interval: Mapping[str, float]) -> str:
    """Return a distance with its standard error.

    Args:
        interval: `value` and `error`.

    Returns:
        Such as "0.374 ± 0.012".
    """
    return f"{interval['value']:.3f} ± {interval['error']:.3f}"


def format_table(result: ComparisonResult) -> list[str]:
    """Format the distances as text, one line for each number of steps.

    Args:
        result: The content of compare.json.

    Returns:
        The lines.
    """
    arms = result["arms"]
    lines = [
        f"Fréchet distance of pixels between {result['settings']['n']:,} samples and {result['reference']['name']}, "
        "± standard error",
        f"{'steps':>6} " + " ".join(f"{arm_label(arm):>20}" for arm in arms),
    ]
    for row in result["steps"]:
        cells = " ".join(f"{distance_text(row['distances'][arm['name']]):>20}" for arm in arms)
        lines.append(f"{row['steps']:>6} {cells}")
    if real := result["reference"].get("real"):
        lines.append(f"{distance_text(real['distance'])} between {real['images']:,} real images and {real['against']:,} others")
    return lines


def plot_distances(result: ComparisonResult) -> Figure:
    """Plot the distance to the data over the number of sampling steps, one line for each model, with standard errors.

    Each line is labeled at its right end, so that there is no legend. A dotted line is the distance between real images.

    Args:
        result: The content of compare.json.

    Returns:
        The figure.
    """
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    steps = [row["steps"] for row in result["steps"]]
    ends: list[tuple[float, str, str]] = []
    for number, arm in enumerate(result["arms"]):
        found = [row["distances"][arm["name"]] for row in result["steps"]]
        values, errors = [one["value"] for one in found], [1.96 * one["error"] for one in found]
        color = (VERMILLION, "#9B4F96", BLUE, GREEN, *COLORS[4:])[number % 7]
        style: dict[str, Any] = {"color": color, "lw": 2.0, "marker": MARKERS[number % len(MARKERS)], "ms": 5.5, "capsize": 3}
        axes.errorbar(steps, values, errors, ls="--" if arm["project"] else "-", **style)
        ends.append((values[-1], arm_label(arm), color))
    if real := result["reference"].get("real"):
        axes.axhline(real["distance"]["value"], color=MUTED, lw=1.4, ls=":")
        ends.append((real["distance"]["value"], "real images", MUTED))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(steps))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(step) for step in steps])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sampling steps", fontsize=TEXT, color=INK)
    axes.set_ylabel("distance to the data (lower is better)", fontsize=TEXT, color=INK)
    axes.grid(axis="y", color=MUTED, alpha=0.2, lw=0.7)
    format_frame(axes)
    _label_lines(axes, steps[-1], ends)
    return figure


def _label_lines(axes: Any, at: int, ends: list[tuple[float, str, str]]) -> None:
    """Write the name of each line at its right end, moved apart where lines are close."""
    top = axes.get_ylim()[1]
    places = spread_labels([value / top for value, _, _ in ends], 0.075)
    for place, (value, name, color) in zip(places, ends, strict=True):
        axes.annotate(
            plain_label(name),
            (at, value),
            xytext=(1.04, place),
            textcoords="axes fraction",
            color=color,
            fontsize=SMALL + 1,
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )


def write_figure(result: ComparisonResult, out: Path, dark: bool = False) -> None:
    """Write the figure as SVG.

    Args:
        result: The content of compare.json.
        out: The picture, .svg.
        dark: Whether it is for a dark page.
    """
    with atomic_write(out) as temporary:
        temporary.write_text(svg_text(plot_distances(result), dark), encoding="utf-8")
