"""Audits: how many scores that a sampler used have a posterior."""

from collections.abc import Mapping, Sequence
from typing import Any

from m2s.realizability import SCORE_CLASSES
from m2s.report import audit
from m2s.report.blocks import UNKNOWN, Table, figure_picture, format_number, format_percentage
from m2s.report.read_run import Result, TrainingRun
from m2s.report.sections.common import Problems, result_name, sampler_settings
from m2s.report.sections.provenance import format_command

SYMBOLS = {"mu~": "μ̃", "rho": "ρ", "alpha": "α", "<=": "≤", ">=": "≥"}


def collect(runs: Sequence[TrainingRun], problems: Problems) -> dict[str, Any] | None:
    """Collect the audits.

    Args:
        runs: The runs.
        problems: Receives what cannot be shown.

    Returns:
        `audits`, one dictionary each; None where there is none.
    """
    audits = problems.each_result(runs, "audit", _audit)
    return {"audits": audits} if audits else None


def _audit(run: TrainingRun, result: Result) -> dict[str, Any]:
    """Return the tables, the picture and the steps of one audit."""
    value, name = result.value, result_name(run, result)
    overall, moved = value["overall"], value["overall"]["moved"]
    panels = audit.plot_panels(value)
    return {
        "name": name,
        "head": value["head"],
        "position_steps": f"{overall['position_steps']:,}",
        "samples": f"{value['settings']['n']:,}",
        "settings": sampler_settings(value["settings"]),
        "command": format_command(value),
        "clean": _is_clean(overall),
        "negative_weights": _negative_weights(overall["before"], overall["position_steps"]),
        "classes": _class_table(value),
        "violations": _violation_table(overall),
        "moved": {"mean": format_number(moved["mean"]), "most": format_number(moved["most"])},
        "panels": [figure_picture(figure, f"{name}: {what} over the time of the sampler") for what, figure in panels],
        "steps": audit.format_table(value),
    }


def _is_clean(overall: Mapping[str, Any]) -> bool:
    """Return whether every score is realizable and no weight is negative, so that the tables would show zeros only."""
    before = overall["before"]
    return before["strict"]["realizable"] == overall["position_steps"] and not before["negative_weights"]


def _negative_weights(before: Mapping[str, Any], total: int) -> dict[str, str] | None:
    """Return the fraction of positions with negative weights and their mean mass; None where there are none."""
    if not before["negative_weights"]:
        return None
    return {"fraction": f"{before['negative_weights'] / total:.1%}", "mass": f"{before['negative_mass']['mean']:.1e}"}


def _class_table(value: dict[str, Any]) -> Table:
    """Return the paper's table of the four classes."""
    overall, criteria = value["overall"], audit.criteria(value)
    total, before, after = overall["position_steps"], overall["before"], overall["after"]
    rows = []
    for kind in SCORE_CLASSES:
        strict, tolerant, projected = before["strict"][kind], before["classes"][kind], after["classes"][kind]
        counts = (format_number(strict), format_number(tolerant), format_number(projected))
        rows.append((audit.NAMES[kind], _with_symbols(criteria[kind]), format_percentage(strict, total), *counts))
    return Table(("position-step class", "criterion", "fraction", "count", "tolerant", "projected"), rows, range(2, 6))


def _violation_table(overall: dict[str, Any]) -> Table:
    """Return what else was counted, before and after projection."""
    total, coordinates, both = overall["position_steps"], overall["coordinates"], (overall["before"], overall["after"])

    def mass(counts: Mapping[str, Any] | None) -> str:
        return UNKNOWN if counts is None else f"{format_number(counts['mean'])} / {format_number(counts['most'])}"

    def fractions(key: str, total: int) -> list[str]:
        return [format_percentage(counts[key], total) for counts in both]

    rows = [
        ("single scores outside the box", *fractions("coordinates_outside", coordinates)),
        ("positions with μ̃ below -1e-6", *fractions("signed", total)),
        ("negative mass of μ̃, mean / most", *(mass(counts["signed_mass"]) for counts in both)),
        ("positions with negative sampler weights", *fractions("negative_weights", total)),
        ("negative mass of the weights, mean / most", *(mass(counts["negative_mass"]) for counts in both)),
    ]
    shown = [row for row in rows if set(row[1:]) - {"0%", "0 / 0", UNKNOWN}]
    return Table(("with a tolerance of 1e-6", "as it is", "projected"), shown, (1, 2))


def _with_symbols(criterion: str) -> str:
    """Return a criterion with Greek letters in the place of their ASCII names."""
    for word, symbol in SYMBOLS.items():
        criterion = criterion.replace(word, symbol)
    return criterion
