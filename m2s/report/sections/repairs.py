"""Repairs: samples from the same noise, with the scores as they are and with projected scores."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from m2s.evaluation.repair import ARMS, TITLES
from m2s.realizability import SCORE_CLASSES
from m2s.report.blocks import UNKNOWN, Table, format_number, format_percentage, interval_cell
from m2s.report.read_run import Result, TrainingRun
from m2s.report.sections.common import Problems, result_name, sampler_settings
from m2s.report.sections.provenance import format_command

DIFFERENCE = "projected minus as it is"
TEXT_MEASURES = ("nats_per_token", "perplexity", "entropy_bits")


def collect(runs: Sequence[TrainingRun], problems: Problems) -> dict[str, Any] | None:
    """Collect the repairs.

    Args:
        runs: The runs.
        problems: Receives what cannot be shown.

    Returns:
        `repairs`, one dictionary each; None where there is none.
    """
    repairs = problems.each_result(runs, "repair", partial(_repair, problems))
    return {"repairs": repairs} if repairs else None


def _repair(problems: Problems, run: TrainingRun, result: Result) -> dict[str, Any]:
    """Return the measure, the classes of scores and the pairs of samples of one repair."""
    value, name = result.value, result_name(run, result)
    changes = value["changes"]
    rows = []
    for arm in ARMS:
        overall = value["audits"][arm]["overall"]
        total, before = overall["position_steps"], overall["before"]
        fractions = [format_percentage(before["classes"][kind], total) for kind in SCORE_CLASSES]
        weights = format_percentage(before["negative_weights"], total)
        rows.append((TITLES[arm], *fractions, weights, format_number(changes[f"distinct_{arm}"])))
    pairs = (run.path / result.file).parent / "pairs.png"
    alt = f"{name}: samples in pairs, on the left with the score as it is, on the right projected"
    return {
        "name": name,
        "command": format_command(value),
        "measure": _measure(value["measure"]),
        "settings": sampler_settings(value["audits"]["unprojected"]["settings"]),
        "changes": {key: f"{changes[key]:,}" for key in ("tokens", "tokens_changed", "samples", "samples_changed")},
        "classes": Table(("score", *SCORE_CLASSES, "negative weights", "distinct samples"), rows, range(1, 7)),
        "pairs": problems.picture(pairs, alt, f"{alt}; the noise is the same.") if pairs.is_file() else None,
    }


def _measure(measure: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the measure of both kinds of samples and of their difference; None where there is none."""
    if measure is None:
        return None
    difference = measure["difference"]
    if measure["kind"] == "fid":
        rows: list[tuple[object, ...]] = [(TITLES[arm], format_number(measure[arm])) for arm in ARMS]
        rows.append((DIFFERENCE, UNKNOWN if difference is None else interval_cell(difference)))
        samples, reference = f"{measure['samples']:,}", measure["reference"]["name"]
        return {"kind": "fid", "table": Table(("score", "FID"), rows, (1,)), "samples": samples, "reference": reference}
    rows = [(TITLES[arm], *(interval_cell(measure[arm][name]) for name in TEXT_MEASURES)) for arm in ARMS]
    rows.append((DIFFERENCE, *(interval_cell(difference[name]) for name in TEXT_MEASURES)))
    unprojected = measure["unprojected"]
    judge = Path(unprojected["judge"]["name"]).name
    return {
        "kind": "genppl",
        "table": Table(("score", f"nats per token, {judge}", f"perplexity, {judge}", "entropy, bits"), rows, (1, 2, 3)),
        "samples": f"{unprojected['samples']:,}",
        "judge": judge,
        "protocol": unprojected["protocol"]["name"],
        "departures": unprojected["departures"],
    }
