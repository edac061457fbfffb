"""Measures of a model: the NELBO on held-out data, FID and KID of images, generative perplexity of text."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from m2s.evaluation import genppl
from m2s.report.blocks import (
    UNKNOWN,
    Cell,
    Picture,
    Table,
    conjunction,
    error_cell,
    figure_picture,
    format_number,
    interval_cell,
)
from m2s.report.curves import plot_integrand
from m2s.report.read_run import Result, TrainingRun
from m2s.report.sections.common import Problems, result_name, sampler_settings
from m2s.report.sections.provenance import format_command

DIFFERENCE_HEAD = ("difference in NELBO", "bits", "95% interval over times", "95% interval over examples")


def collect(runs: Sequence[TrainingRun], problems: Problems) -> dict[str, Any] | None:
    """Collect the measures.

    Args:
        runs: The runs.
        problems: Receives what cannot be shown.

    Returns:
        `likelihood`, `images` and `text`, each None where nothing of the kind was measured; None where nothing was.
    """
    data = {
        "likelihood": _likelihood(runs, problems),
        "images": _images(runs, problems),
        "text": _text(runs, problems),
    }
    return data if any(data.values()) else None


def _likelihood(runs: Sequence[TrainingRun], problems: Problems) -> dict[str, Any] | None:
    """Collect results of `m2s evaluate bpd`: `table`, `text_units` and the picture `integrand`."""
    rows = list(chain(*problems.each_result(runs, "bpd", _likelihood_rows)))
    if not rows:
        return None
    differences = problems.each_result(runs, "bpd", _likelihood_difference)
    commands = problems.each_result(runs, "bpd", lambda _, result: format_command(result.value) or None)
    head = ("run", "data", "bits per", "NELBO", "95% interval", "integral", "prior", "reconstruction", "examples")
    curves = problems.each_result(
        runs, "bpd", lambda run, result: (result_name(run, result), result.value["unit"], result.value["curve"])
    )
    alt = f"The integrand of the NELBO over time t of {conjunction(name for name, _, _ in curves)}" if curves else ""
    return {
        "table": Table(head, rows, range(3, 9)),
        "differences": Table(DIFFERENCE_HEAD, differences, range(1, 4)) if differences else None,
        "commands": list(dict.fromkeys(commands)),
        "text_units": _text_units(runs, problems),
        "integrand": problems.attempt(Path("the loss over t"), lambda: figure_picture(plot_integrand(curves), alt)),
    }


def _likelihood_rows(run: TrainingRun, result: Result) -> list[tuple[object, ...]]:
    """Return the row of a result, and that of the model it was compared with."""
    name, other = result_name(run, result), result.value.get("against")
    first = _likelihood_row(name, result.value, result.value)
    if other is None or "prior" not in other:  # an exact likelihood has no terms
        return [first]
    return [first, _likelihood_row(_other_name(result), other, result.value)]


def _other_name(result: Result) -> str:
    """Return the name of the model that a result compares with."""
    return Path(str(result.value["options"]["against"])).name


def _likelihood_difference(run: TrainingRun, result: Result) -> tuple[object, ...] | None:
    """Return the paired difference of a result and the model it was compared with; None where there is none."""
    if (other := result.value.get("against")) is None:
        return None
    bits = other["difference"]["nelbo"]["bits"]
    return (
        f"{result_name(run, result)} − {_other_name(result)}",
        error_cell(bits["value"], bits["error"], bits["rows_error"]),
        UNKNOWN if bits["low"] is None else f"{format_number(bits['low'])} … {format_number(bits['high'])}",
        f"{bits['value'] - 1.96 * bits['rows_error']:.4f} … {bits['value'] + 1.96 * bits['rows_error']:.4f}",
    )


def _likelihood_row(name: str, terms: Mapping[str, Any], value: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the NELBO of a model and its terms."""
    bits = {term: terms[term]["bits"] for term in ("nelbo", "integral", "prior", "reconstruction")}
    cells = {term: error_cell(one["value"], one["error"], one["rows_error"]) for term, one in bits.items()}
    low, high = bits["nelbo"]["low"], bits["nelbo"]["high"]
    return (
        name,
        Cell(value["data"]["name"], (value["data"]["split"] or "all",)),
        value["unit"],
        cells["nelbo"],
        UNKNOWN if low is None else f"{format_number(low)} … {format_number(high)}",
        cells["integral"],
        Cell(cells["prior"].text, ("exact",)),
        cells["reconstruction"],
        Cell(f"{value['rows']:,}", (f"× {len(value['passes'])} passes",)),
    )


def _text_units(runs: Sequence[TrainingRun], problems: Problems) -> Table | None:
    """Return the NELBO of text per byte, per character and as a perplexity."""

    def row(run: TrainingRun, result: Result) -> tuple[object, ...] | None:
        nelbo, integral = result.value["nelbo"], result.value["integral"]
        if "bits_per_byte" not in nelbo:  # images, or text whose number of bytes is not known
            return None
        units = [nelbo["bits_per_byte"], nelbo["bits_per_character"], nelbo["perplexity"], integral["perplexity"]]
        return (result_name(run, result), *(error_cell(unit["value"], unit["error"]) for unit in units))

    rows = problems.each_result(runs, "bpd", row)
    head = ("run", "bits per byte", "bits per character", "perplexity per token", "perplexity of the integral alone")
    return Table(head, rows, range(1, 5)) if rows else None


def _images(runs: Sequence[TrainingRun], problems: Problems) -> Table | None:
    """Return the results of `m2s evaluate fid`."""
    rows = problems.each_result(runs, "fid", _image_row)
    head = ("run", "samples", "against", "features of", "FID", "1000 × KID")
    return Table(head, rows, (4, 5)) if rows else None


def _image_row(run: TrainingRun, result: Result) -> tuple[object, ...]:
    """Return FID and KID of a result."""
    value = result.value
    samples, reference, kid = value["samples"], value["reference"], value["kid"]
    return (
        result_name(run, result),
        Cell(f"{samples['count']:,} of {Path(samples['name']).name}", (sampler_settings(samples["settings"]),)),
        Cell(f"{reference['count']:,} of {reference['name']}", (f"protocol {value['protocol'] or 'none'}",)),
        value["network"]["name"],
        format_number(value["fid"], 2),
        UNKNOWN if kid is None else error_cell(1000 * kid["mean"], 1000 * kid["error"], digits=3),
    )


def _text(runs: Sequence[TrainingRun], problems: Problems) -> dict[str, Any] | None:
    """Collect results of `m2s evaluate genppl`: `table`, `departures`, `differences` and the pictures `frontiers`."""
    rows = list(chain(*problems.each_result(runs, "genppl", _perplexity_rows)))
    if not rows:
        return None
    head = ("run", "samples", "judge", "perplexity", "nats per token", "entropy, bits", "distinct")
    departures = problems.each_result(
        runs, "genppl", lambda _, result: [text for one in result.value["results"] for text in one["departures"]]
    )
    differences = list(chain(*problems.each_result(runs, "genppl", _difference_rows)))
    difference_head = ("run", "difference", "judge", "perplexity", "nats per token", "from the same noise")
    return {
        "table": Table(head, rows, range(3, 7)),
        "departures": list(dict.fromkeys(chain(*departures))),
        "differences": Table(difference_head, differences, (3, 4)) if differences else None,
        "frontiers": problems.each_result(runs, "genppl", _frontier),
    }


def _perplexity_rows(run: TrainingRun, result: Result) -> list[tuple[object, ...]]:
    """Return one row for each file of samples that was judged."""
    return [
        (
            run.name,
            Cell(f"{one['samples']:,} of {Path(one['file']).name}", (sampler_settings(one["settings"]),)),
            Cell(Path(one["judge"]["name"]).name, (f"protocol {one['protocol']['name']}",)),
            interval_cell(one["perplexity"], 2),
            interval_cell(one["nats_per_token"]),
            interval_cell(one["entropy_bits"], 3),
            format_number(one["distinct"]),
        )
        for one in result.value["results"]
    ]


def _difference_rows(run: TrainingRun, result: Result) -> list[tuple[object, ...]]:
    """Return one row for each pair of files that was compared."""
    same_noise = {True: "yes", False: "no", None: "not known"}
    return [
        (
            run.name,
            f"{Path(one['file']).name} less {Path(one['against']).name}",
            Path(result.value["results"][0]["judge"]["name"]).name,
            interval_cell(one["perplexity"], 2),
            interval_cell(one["nats_per_token"]),
            same_noise[one["same_noise"]],
        )
        for one in result.value["differences"]
    ]


def _frontier(run: TrainingRun, result: Result) -> Picture | None:
    """Return the figure of perplexity against entropy, where there is more than one point."""
    results = result.value["results"]
    if len(results) < 2:
        return None
    alt = f"{result_name(run, result)}: generative perplexity against the entropy of samples"
    caption = f"{alt}, with 95% intervals. Right is more varied, down is likelier."
    return figure_picture(genppl.plot_frontier(results), alt, caption)
