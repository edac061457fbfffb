"""The NELBO of a data set as JSON, as a table and as a figure."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from m2s.evaluation.bpd.nelbo import TERMS, DatasetNelbo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEGEND = """NELBO = integral + prior + reconstruction >= -log p; most papers report the integral alone, which is no bound
± times: standard error over passes (other times and noise, the same rows), with Student's 95% interval; ± rows: over rows"""
EXACT = """-log p itself, known exactly: no bound, no passes, no times; ± rows: standard error over rows"""
INK, MUTED, BLUE = "#1A1A1A", "#5A5A5A", "#004F8A"


def summarize(found: DatasetNelbo, text: Mapping[str, Float[Tensor, "N"]] | None = None) -> dict[str, dict[str, Any]]:
    """Summarize the NELBO in several units.

    Args:
        found: The terms of a data set.
        text: For text: the number of units of each example, by the name of the unit, such as {"byte": [N]}. None for images.

    Returns:
        For each term of `TERMS`: "bits" and "nats" per position; for text also "bits_per_UNIT", and "perplexity" of the NELBO
        and of the integral. Each is an `Estimate` as a dictionary.
    """
    result: dict[str, dict[str, Any]] = {}
    for name in TERMS:
        nats = found.estimate(name)
        each = {"bits": nats.scaled(1 / math.log(2)), "nats": nats}
        if text is not None:
            each |= {f"bits_per_{unit}": found.estimate(name, n).scaled(1 / math.log(2)) for unit, n in text.items()}
            if name in ("nelbo", "integral"):
                each["perplexity"] = nats.exp()
        result[name] = {measure: asdict(value) for measure, value in each.items()}
    return result


def format_table(result: Mapping[str, Mapping[str, Any]], unit: str, exact: bool = False) -> list[str]:
    """Format a summary as a table.

    Args:
        result: What `summarize` returned.
        unit: The name of a site: dimension or token.
        exact: The likelihood is known exactly, so there is only one term.

    Returns:
        Lines: one for each term, one for each other measure of the NELBO and of the integral, and a legend.
    """
    lines = [f"{f'bits per {unit}':30s}{'':>12s}{'± times':>11s}{'± rows':>11s}   95% (times)"]
    lines += [_line(_label(name), result[name]["bits"]) for name in ("integral", "prior", "reconstruction", "nelbo")]
    others = {measure: measure.replace("_", " ") for measure in result["nelbo"] if measure != "bits"}
    others["nats"] = f"nats per {unit}"
    if exact:
        measures = {"bits": "-log p", **others}
        return [lines[0], *(_line(label, result["nelbo"][measure]) for measure, label in measures.items()), EXACT]
    for measure, name in itertools.product(others, ("integral", "nelbo")):
        lines.append(_line(f"{others[measure]}, {_label(name)}", result[name][measure]))
    return [*lines, *LEGEND.splitlines()]


def format_difference(
    against: str,
    theirs: Mapping[str, Mapping[str, Any]],
    gaps: Mapping[str, Mapping[str, Any]],
    unit: str,
    exact: tuple[bool, bool] = (False, False),
) -> list[str]:
    """Format the comparison of two models as text.

    Args:
        against: The name of the second model.
        theirs: The summary of the second model.
        gaps: The summary of the first minus the second.
        unit: The name of a site: dimension or token.
        exact: Whether the likelihood of the first and of the second is known exactly. Then only the totals are compared.

    Returns:
        Lines: the NELBO of the second model, and the differences.
    """
    name = "its -log p" if exact[1] else "its NELBO"
    lines = [f"bits per {unit}, against {against}", _line(name, theirs["nelbo"]["bits"])]
    if any(exact):
        same = "rows" if all(exact) else "rows; one is -log p itself, the other an upper bound on its own"
        return [
            *lines,
            _line("difference", gaps["nelbo"]["bits"]),
            f"difference: the first minus the second, on the same {same}",
        ]
    lines += [_line(f"difference, {_label(name)}", gaps[name]["bits"]) for name in TERMS]
    return [*lines, "difference: the first minus the second, on the same rows, times and noise; below 0 the first is better"]


def _label(name: str) -> str:
    """Return the name of a term in a table."""
    return "NELBO" if name == "nelbo" else name


def _line(name: str, value: Mapping[str, float | None]) -> str:
    """Format one estimate."""
    digits = 2 if (value["value"] or 0) >= 100 else 5
    error, rows_error = ("-" if value[key] is None else f"{value[key]:.{digits}f}" for key in ("error", "rows_error"))
    interval = "-" if value["low"] is None else f"{value['low']:.{digits}f} .. {value['high']:.{digits}f}"
    return f"{name:30s}{value['value']:>12.{digits}f}{error:>11s}{rows_error:>11s}   {interval}"


def plot_integrand(points: Sequence[Mapping[str, Any]], unit: str) -> "Figure":
    """Plot the integrand over t with its standard errors. The area under it is the integral.

    Args:
        points: What `integrand_curve` returned.
        unit: The name of a site: dimension or token.

    Returns:
        The figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported late: matplotlib is slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    known = [point for point in points if point["bits"] is not None]
    left, right = (np.array([point[side] for point in known]) for side in ("from", "to"))
    height, error = (np.array([point[key] or 0.0 for point in known]) for key in ("bits", "error"))
    axes.bar(left, height, right - left, align="edge", color=BLUE, alpha=0.18, lw=0)
    axes.errorbar((left + right) / 2, height, error, (right - left) / 2, fmt="none", color=BLUE, lw=1.6, elinewidth=1.2)
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("t", color=INK)
    axes.set_ylabel(f"integrand, bits per {unit}", color=INK)
    axes.set_title("The loss over time; the area is the integral", loc="left", fontsize=11, color=INK)
    axes.tick_params(colors=MUTED, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
