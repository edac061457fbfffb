"""The frontier of perplexity against entropy: samples of one model at several temperatures, and the area below it.

A lower temperature gives a lower perplexity and a lower entropy, so one point says nothing about a model. Two models are
compared at the same entropy. For log perplexity f(H) as a piecewise linear function of the entropy H (nats per token, within a
sequence), the area over an interval [a, b] is the integral of f from a to b. [a, b] is the part of the entropy that every curve
covers, so that no curve is extrapolated. The area divided by b - a is the mean log perplexity at equal entropy. A lower one is
better.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from m2s.evaluation.bootstrap import Interval, error_bars, percentile_interval, resampled
from m2s.evaluation.genppl.scores import STATISTICS, sequence_columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED = "#1A1A1A", "#5A5A5A"
COLORS = ("#004F8A", "#D55E00", "#007A5A", "#9B4F96", "#8A6D00", "#5A5A5A")
VARIES = ("temperature", "seed", "start")  # settings that may differ between the points of one curve


@dataclass(frozen=True)
class Curve:
    """The results of one model at different temperatures, or a single result.

    Args:
        name: The name for tables and legends.
        results: Summaries of `m2s.evaluation.genppl.summarize`, by temperature where it is known.
    """

    name: str
    results: tuple[Mapping[str, Any], ...]

    @property
    def is_frontier(self) -> bool:
        """Whether it has points at two temperatures or more."""
        return len(self.results) > 1

    @property
    def points(self) -> tuple[Float[np.ndarray, "m"], Float[np.ndarray, "m"]]:
        """Entropy (nats) and log perplexity of each point, each [m]."""
        entropy = [result["entropy_nats"]["value"] for result in self.results]
        return np.array(entropy, np.float64), np.log([result["perplexity"]["value"] for result in self.results])


def frontier_curves(results: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """Group results into curves. The points of a curve have the same settings except for the temperature and the seed.

    Args:
        results: The summaries of several files.

    Returns:
        The curves, in the order of their first files. A file without a temperature, or with one that its group has twice, is
        a curve of one point.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for number, result in enumerate(results):
        settings = result["settings"]
        fixed = {name: value for name, value in settings.items() if name not in VARIES}
        key = json.dumps(fixed, sort_keys=True) if settings.get("temperature") is not None else f"file {number}"
        groups.setdefault(key, []).append(result)
    found: list[tuple[Mapping[str, Any], ...]] = []
    for group in groups.values():
        temperatures = [result["settings"].get("temperature") for result in group]
        if len(set(temperatures)) < len(temperatures):
            found += [(result,) for result in group]
        else:
            found.append(tuple(sorted(group, key=lambda result: result["settings"].get("temperature") or 0)))
    names = _names(found)
    return [Curve(name, group) for name, group in zip(names, found, strict=True)]


def _names(groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Name each group by its first file, or groups of several files by their folders where these differ."""
    paths = [Path(group[0]["file"]) for group in groups]
    folders = [path.parent.name for path, group in zip(paths, groups, strict=True) if len(group) > 1]
    by_folder = len(set(folders)) == len(folders) > 1 and all(folders)
    return [path.parent.name if by_folder and len(group) > 1 else path.stem for path, group in zip(paths, groups, strict=True)]


def area_below(entropy: Float[np.ndarray, "m"], log_perplexity: Float[np.ndarray, "m"], low: float, high: float) -> float:
    """Integrate the log perplexity over an interval of the entropy, linearly interpolated between the points.

    Args:
        entropy: The entropies of the points, [m], in any order.
        log_perplexity: The log perplexities, [m].
        low: The start of the interval.
        high: The end of the interval. Outside the points the curve is constant.

    Returns:
        The area, in nats squared.
    """
    order = np.lexsort((log_perplexity, entropy))
    x, y = entropy[order], log_perplexity[order]
    knots = np.unique(np.concatenate([[low, high], x[(x > low) & (x < high)]]))
    return float(np.trapezoid(np.interp(knots, x, y), knots))


def common_interval(curves: Sequence[Curve]) -> tuple[float, float] | None:
    """Return the entropies that every curve of several points covers.

    Args:
        curves: The curves. Those of one point do not count.

    Returns:
        The ends of the interval in nats; None where it is empty or there is no curve.
    """
    ranges = [curve.points[0] for curve in curves if curve.is_frontier]
    if not ranges:
        return None
    low, high = float(max(x.min() for x in ranges)), float(min(x.max() for x in ranges))
    return (low, high) if low < high else None


def frontier_areas(results: Sequence[Mapping[str, Any]], resamples: int = 2000, seed: int = 0) -> dict[str, Any] | None:
    """Compute the area below each frontier over the entropies that all of them cover, with 95% bootstrap intervals.

    The sequences of each file are resampled, and the interval of the entropy stays as it is. A resampled curve that ends inside
    the interval continues there with its last value.

    Args:
        results: The summaries of several files.
        resamples: The number of bootstrap resamples.
        seed: The seed of the bootstrap.

    Returns:
        "entropy_nats", the ends of the interval or None where the curves have no entropy in common, and "curves": for each its
        "name", "files", "temperatures", "area" (nats squared) and "mean_log_perplexity", the area over the length of the
        interval. None where no model has two temperatures.
    """
    curves = frontier_curves(results)
    frontiers = [curve for curve in curves if curve.is_frontier]
    if not frontiers:
        return None
    interval = common_interval(curves)
    found = []
    for curve in frontiers:
        entry: dict[str, Any] = {
            "name": curve.name,
            "files": [result["file"] for result in curve.results],
            "temperatures": [result["settings"]["temperature"] for result in curve.results],
        }
        if interval is not None:
            area = _area_interval(curve, *interval, resamples, seed)
            length = interval[1] - interval[0]
            mean = Interval(area.value / length, area.low / length, area.high / length)
            entry |= {"area": asdict(area), "mean_log_perplexity": asdict(mean)}
        found.append(entry)
    return {"entropy_nats": None if interval is None else list(interval), "curves": found}


def _area_interval(curve: Curve, low: float, high: float, resamples: int, seed: int) -> Interval:
    """The area below one curve, with its bootstrap interval."""
    entropies, perplexities = [], []
    for result in curve.results:
        columns = sequence_columns(**{name: np.array(values, float) for name, values in result["sequences"].items()})
        entropies.append(resampled(columns, STATISTICS["entropy_nats"], resamples, seed))
        average = STATISTICS[f"perplexity_over_{result['protocol']['average']}"]
        perplexities.append(np.log(resampled(columns, average, resamples, seed)))
    areas = [area_below(x, y, low, high) for x, y in zip(np.stack(entropies, 1), np.stack(perplexities, 1), strict=True)]
    return percentile_interval(area_below(*curve.points, low, high), np.array(areas))


def format_areas(areas: Mapping[str, Any] | None) -> list[str]:
    """Format the areas below frontiers as a table.

    Args:
        areas: The result of `frontier_areas`.

    Returns:
        Lines of text; none where there is no frontier.
    """
    if areas is None:
        return []
    if areas["entropy_nats"] is None:
        names = ", ".join(curve["name"] for curve in areas["curves"])
        return [f"frontiers of {names}: they have no entropy in common, so no areas are compared: draw more temperatures"]
    low, high = areas["entropy_nats"]
    width = max(len("frontier"), *(len(curve["name"]) for curve in areas["curves"]))
    lines = [
        f"area below log perplexity over the entropies {low:.3f} .. {high:.3f} nats that all curves cover (lower is better)",
        f"{'frontier':{width}s}  {'temperatures':>12s}  {'area':>8s}  {'95%':>19s}  {'mean log PPL':>12s}",
    ]
    for curve in areas["curves"]:
        area, mean = curve["area"], curve["mean_log_perplexity"]["value"]
        ends = f"{area['low']:.4f} .. {area['high']:.4f}"
        count = len(curve["temperatures"])
        lines.append(f"{curve['name']:{width}s}  {count:>12d}  {area['value']:>8.4f}  {ends:>19s}  {mean:>12.4f}")
    return lines


def plot_frontier(results: Sequence[Mapping[str, Any]]) -> "Figure":
    """Plot perplexity against entropy: one point per file with 95% intervals, one line per model with several temperatures.

    Args:
        results: The summaries. The entropies over which the areas of several models are compared are shaded.

    Returns:
        The figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported late: matplotlib is slow to import
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    curves = frontier_curves(results)
    frontiers = [curve for curve in curves if curve.is_frontier]
    if len(frontiers) > 1 and (interval := common_interval(curves)) is not None:
        axes.axvspan(*(end / np.log(2) for end in interval), color="#F4F4F2", zorder=0)
    for curve in curves:
        x, y = (error_bars([result[name] for result in curve.results]) for name in ("entropy_bits", "perplexity"))
        color = COLORS[frontiers.index(curve) % len(COLORS)] if curve.is_frontier else COLORS[0]
        bars: dict[str, Any] = {"xerr": x[1], "yerr": y[1], "ecolor": MUTED, "elinewidth": 1.0, "capsize": 2}
        label = curve.name if curve.is_frontier else None
        axes.errorbar(x[0], y[0], fmt="o-" if curve.is_frontier else "o", color=color, lw=1.6, ms=6, label=label, **bars)
        for result, at in zip(curve.results, zip(x[0], y[0], strict=True), strict=True):
            name = f"T = {result['settings']['temperature']:g}" if curve.is_frontier else Path(result["file"]).stem
            axes.annotate(name, at, xytext=(6, -11), textcoords="offset points", fontsize=9, color=INK)
    values = [result["perplexity"]["value"] for result in results]
    axes.set_yscale("log")
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(ScalarFormatter())
    if max(values) > 4 * min(values):
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("entropy of the tokens of a sample, bits", color=INK)
    axes.set_ylabel(f"generative perplexity\n{Path(results[0]['judge']['name']).name}", color=INK)
    axes.set_title("Right is more varied, down is more likely", loc="left", fontsize=11, color=INK)
    axes.tick_params(colors=MUTED, labelsize=9)
    axes.margins(0.12)
    if len(frontiers) > 1:
        axes.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
