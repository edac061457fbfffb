"""The opening of the page, and the table of runs."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from m2s.report.blocks import Cell, Table, error_cell, format_number
from m2s.report.read_run import Result, TrainingRun, loss_unit
from m2s.report.sections.common import Problems, config_value, device_name

MEASURED = {
    "bpd": "the NELBO on held-out data term by term",
    "fid": "distances between samples and data",
    "genppl": "generative perplexities",
    "audit": "audits of the scores",
    "repair": "samples with repaired scores",
}


def introduction(runs: Sequence[TrainingRun], problems: Problems) -> dict[str, Any]:
    """Return what the first paragraph of the page says.

    Args:
        runs: The runs.
        problems: Receives what cannot be shown.

    Returns:
        `count` of runs, the `unit` of their losses, their `data` sets and `names`, the `last_nelbo` of each run
        with validation, and what was `measured`.
    """
    methods = [config_value(run, "method") for run in runs]
    nelbo = [(_last_nelbo(run), run.name) for run in runs if run.validation]
    data = [problems.attempt(run.path / "config.json", partial(_data_name, run)) for run in runs]
    return {
        "count": len(runs),
        "unit": loss_unit(runs),
        "data": list(dict.fromkeys(name or "unknown data" for name in data)),
        "names": [
            run.name if run.name == method else f"{run.name} (method {method})"
            for run, method in zip(runs, methods, strict=True)
        ],
        "last_nelbo": [f"{' '.join([cell.text, *cell.notes])} for {name}" for cell, name in nelbo],
        "measured": list(
            dict.fromkeys(MEASURED[result.kind] for run in runs for result in run.results if result.kind in MEASURED)
        ),
    }


def collect(runs: Sequence[TrainingRun], problems: Problems) -> dict[str, Any]:
    """Collect one row for each run.

    Args:
        runs: The runs.
        problems: Receives what cannot be shown.

    Returns:
        `table` of the runs, and `diverged`: run, step, loss and gradient norm of each run that diverged.
    """
    rows = [problems.attempt(run.path / "train.json", partial(_row, run)) for run in runs]
    head = ("run", "method", "network", "data", "steps", f"held-out NELBO, {loss_unit(runs)}", "time", "device")
    return {
        "table": Table(head, [row for row in rows if row], (4, 5, 6)),
        "diverged": problems.each_result(runs, "diverged", _divergence),
    }


def _row(run: TrainingRun) -> tuple[object, ...]:
    """Return the row of a run."""
    done = max([line["step"] for line in run.log], default=0)
    steps = config_value(run, "run", "steps") or 0
    starts = run.record["starts"]
    head, noise = config_value(run, "head", "kind"), config_value(run, "process", "kind")
    return (
        run.name,
        Cell(str(config_value(run, "method")), (f"{head}, {noise} noise",)),
        Cell(_network_name(run), (f"{format_number(run.parameters)} parameters",)),
        Cell(_data_name(run), (f"vocabulary {format_number(run.record['data'].get('vocab'))}",)),
        Cell(f"{done:,}", (f"of {steps:,}",) if done < steps else ()),
        _last_nelbo(run),
        _duration(run.seconds),
        device_name(run, starts[-1] if starts else {}),
    )


def _divergence(run: TrainingRun, result: Result) -> dict[str, Any]:
    """Return where a run diverged."""
    return {"run": run.name, **{key: result.value[key] for key in ("step", "loss", "grad_norm")}}


def _data_name(run: TrainingRun) -> str:
    """Return the name of the data, the number of its examples and their size."""
    name, folder, data = config_value(run, "data", "name"), config_value(run, "data", "folder"), run.record["data"]
    shape = (run.config.get("data") or {}).get("shape")
    size = " × ".join(map(str, shape)) if shape else f"{data.get('length')} tokens"
    return f"{Path(folder).name if name == 'text' and folder else name} ({format_number(data.get('rows'))} examples of {size})"


def _last_nelbo(run: TrainingRun) -> Cell:
    """Return the last NELBO on held-out data in the log."""
    last = run.validation[-1] if run.validation else {}
    return error_cell(last.get("validation_bits"), last.get("validation_error"))


def _network_name(run: TrainingRun) -> str:
    """Return the kind and the sizes of the network."""
    model = run.config.get("model") or {}
    kind = {"unet": "U-Net", "dit": "DiT"}.get(str(model.get("kind")), str(config_value(run, "network", "kind")))
    sizes = [f"{key} {model[key]}" for key in ("width", "depth", "heads") if isinstance(model.get(key), int)]
    return ", ".join([kind, *sizes])


def _duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
