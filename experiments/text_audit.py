"""Audits and repairs of a text row, as numbers for the repository and as Markdown tables beside the paper's.

`python experiments/text_tables.py audit FOLDER JUDGED` calls this. FOLDER is that of experiments/text_job.py. It has the audit
of 128 trajectories, those at other numbers of steps, of earlier states of the training and of four trajectories, and the
repairs. JUDGED is the folder of experiments/text_judges.py, with the perplexities of both arms of each repair.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import text_judges

from m2s.errors import UserError
from m2s.evaluation.bootstrap import bootstrap, paired_bootstrap
from m2s.evaluation.genppl.scores import STATISTICS, sequence_columns
from m2s.realizability import SCORE_CLASSES

PAPER: dict[str, Any] = {
    "classes": {"outside": 0.250177, "material": 0.562310, "boundary": 0.187419, "realizable": 0.000094},
    "position_steps": 8_388_608,
    "overlap": 0.012584,
    "averages": {"coordinates_outside": 0.09781, "negative_weights": 0.37632},
    "repair": {
        "unprojected": {"value": 203.60, "low": 196.64, "high": 210.45},
        "projected": {"value": 175.07, "low": 169.10, "high": 181.19},
        "nats_per_token": {"value": -0.1510, "low": -0.1774, "high": -0.1251},
        "steps": 128,
    },
}
ARMS = {"unprojected": "", "projected": f"-{text_judges.PROJECTED}"}
STEP_KEYS = ("t", "s", "position_steps")


def summarize(folder: Path, row: str, judged: dict[str, dict[str, dict[str, Any]]] | None) -> dict[str, Any]:
    """Return the audits and repairs of a row.

    Args:
        folder: The folder of experiments/text_job.py.
        row: The row.
        judged: The results of experiments/text_judges.py by judge and set; None: without perplexities.

    Raises:
        UserError: The folder has no audit of the row.
    """
    audits = {path.parent.name: read(path) for path in sorted(folder.glob(f"audits/{row}-audit*/audit.json"))}
    main = audits.get(f"{row}-audit")
    if main is None:
        raise UserError(f"{folder} has no audits/{row}-audit/audit.json: run experiments/text_job.py --rows {row} to its end")
    trajectories = next((one for name, one in audits.items() if re.fullmatch(rf"{re.escape(row)}-audit-\d+", name)), None)
    result = read(folder / f"{row}.json")
    every_step = result["tokens"] // read(folder / "budgets" / f"{row}.json")["steps"]
    by_state = {int(name.rpartition("-")[2]) * every_step: one for name, one in audits.items() if "-audit-state-" in name}
    by_steps = [one for name, one in audits.items() if "-audit-steps-" in name]
    repairs = {int(path.parent.name.rpartition("-")[2]): read(path) for path in folder.glob(f"repair/{row}-*/repair.json")}
    entry = read(folder / "entry.json")
    return {
        "row": row,
        "seconds": entry["seconds"],
        "tokens": result["tokens"],
        "nelbo": result["nelbo"]["nelbo"]["nats"],
        "provenance": {key: main[key] for key in ("command", "device", "versions")},
        "audit": {**describe(main), "steps": [describe_step(step) for step in main["steps"]]},
        "by_steps": sorted((describe(one) for one in [*by_steps, main]), key=lambda one: int(one["settings"]["steps"])),
        "by_tokens": [
            {"tokens": tokens, **describe(one)} for tokens, one in sorted({**by_state, result["tokens"]: main}.items())
        ],
        "trajectories": None if trajectories is None else describe(trajectories),
        "repair": [
            describe_repair(steps, one, text_judges.row_name(row, entry), judged) for steps, one in sorted(repairs.items())
        ],
        "paper": PAPER,
    }


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file.

    Args:
        path: The file.

    Raises:
        UserError: It cannot be read.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): copy the results again") from error


def describe(audit: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of an audit, without its steps.

    Args:
        audit: The content of audit.json.
    """
    overall = audit["overall"]
    total = overall["position_steps"]
    counts = overall["before"]
    return {
        "settings": {key: audit["settings"][key] for key in ("n", "length", "steps", "sampler", "grid", "seed")},
        "position_steps": total,
        "counts": counts["strict"],
        "classes": {name: counts["strict"][name] / total for name in SCORE_CLASSES},
        "tolerant": counts["classes"],
        "projected": overall["after"]["classes"],
        "coordinates_outside": counts["coordinates_outside_strict"] / overall["coordinates"],
        "coordinates": overall["coordinates"],
        "signed": counts["signed"] / total,
        "overlap": counts["overlap"] / total,
        "signed_mass": counts["signed_mass"],
        "negative_weights": counts["negative_weights"] / total,
        "negative_mass": counts["negative_mass"],
        "negative_weights_projected": overall["after"]["negative_weights"] / total,
        "averages": audit["averages"],
        "moved": overall["moved"],
    }


def describe_step(step: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of one step of an audit.

    Args:
        step: The step.
    """
    before = step["before"]
    return {
        **{key: step[key] for key in STEP_KEYS},
        "counts": before["strict"],
        "negative_weights": before["negative_weights"],
        "negative_mass": before["negative_mass"]["mean"],
    }


def describe_repair(
    steps: int, repair: dict[str, Any], row: str, judged: dict[str, dict[str, dict[str, Any]]] | None
) -> dict[str, Any]:
    """Return the numbers of a repair, with the perplexities of both arms by each judge that has read them.

    Args:
        steps: Sampling steps.
        repair: The content of repair.json.
        row: The row among those of all entries.
        judged: The results of the judges.
    """
    found: dict[str, Any] = {"steps": steps, "changes": repair["changes"], "judges": {}}
    for judge, sets in (judged or {}).items():
        arms = {arm: sets.get(f"{row}{end}/analytic-linear-{steps}") for arm, end in ARMS.items()}
        if all(arms.values()):
            columns = {arm: columns_of(one["genppl"]["sequences"]) for arm, one in arms.items() if one is not None}
            found["judges"][judge] = compare(columns["unprojected"], columns["projected"])
    return found


def columns_of(sequences: dict[str, list[float]]) -> Any:
    """Return the numbers of each sequence, as the bootstrap takes them.

    Args:
        sequences: `sequences` of the summary of a set.
    """
    return sequence_columns(**{name: np.array(values, float) for name, values in sequences.items()})


def compare(unprojected: Any, projected: Any) -> dict[str, Any]:
    """Return perplexity and entropy of both arms, and paired differences, with 95% bootstrap intervals over sequences.

    Args:
        unprojected: Columns of the samples of the scores as they are.
        projected: Columns of the samples of the projected scores. Sequence i of both is a pair.
    """
    both = {"unprojected": unprojected, "projected": projected}
    names = {"perplexity": "perplexity_over_tokens", "nats_per_token": "nats_per_token", "entropy_bits": "entropy_bits"}
    return {
        "sequences": len(unprojected),
        **{
            arm: {name: asdict(bootstrap(columns, STATISTICS[key])) for name, key in names.items()}
            for arm, columns in both.items()
        },
        "difference": {name: asdict(paired_bootstrap(projected, unprojected, STATISTICS[key])) for name, key in names.items()},
    }


# ----------------------------------------------------------------------------------------------------------------------- tables


def format_tables(found: dict[str, Any]) -> list[str]:
    """Return all tables in Markdown.

    Args:
        found: What `summarize` returned.
    """
    tables = [_classes(found), _series(found["by_steps"], "steps"), _series(found["by_tokens"], "tokens")]
    return [line for table in [*tables, _trajectories(found), _repairs(found)] if table for line in [*table, ""]][:-1]


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Return a Markdown table."""
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def percent(value: float) -> str:
    """Return a fraction in per cent, with the digits of the paper's table.

    Args:
        value: The fraction.
    """
    return f"{100 * value:.4f}%"


def _classes(found: dict[str, Any]) -> list[str]:
    """The four classes beside the paper's."""
    audit, paper = found["audit"], found["paper"]
    rows = [
        [name, percent(audit["classes"][name]), f"{audit['counts'][name]:,}", percent(paper["classes"][name])]
        for name in SCORE_CLASSES
    ]
    rows.append(["outside and with negative posterior", percent(audit["overlap"]), "", percent(paper["overlap"])])
    return _table(["class", "position-steps", "count", "paper"], rows)


def _series(audits: list[dict[str, Any]], key: str) -> list[str]:
    """The classes, negative weights and their mass by number of steps, or by tokens of training."""
    rows = []
    for one in audits:
        first = f"{one['tokens'] / 1e6:.1f} M" if key == "tokens" else str(one["settings"]["steps"])
        values = [percent(one["classes"][name]) for name in SCORE_CLASSES]
        rows.append([first, *values, percent(one["negative_weights"]), f"{one['negative_mass']['mean']:.2e}"])
    head = "tokens of training" if key == "tokens" else "sampling steps"
    return _table([head, *SCORE_CLASSES, "negative weights", "their mean mass"], rows)


def _trajectories(found: dict[str, Any]) -> list[str]:
    """The paper's diagnostic of four trajectories."""
    one, paper = found["trajectories"], found["paper"]["averages"]
    if one is None:
        return []
    names = {"coordinates_outside": "single scores outside the box", "negative_weights": "positions with negative weights"}
    rows = [
        [text, *(f"{one['averages'][when][name]:.3%}" for when in ("before", "after")), f"{paper[name]:.3%}"]
        for name, text in names.items()
    ]
    return _table([f"{one['settings']['n']} trajectories, averaged over steps", "score", "projected", "paper, score"], rows)


def _repairs(found: dict[str, Any]) -> list[str]:
    """Perplexities of both arms, and their paired difference, beside the paper's."""
    rows = []
    for one in found["repair"]:
        changes = one["changes"]
        distinct = f"{changes['distinct_unprojected']:,} / {changes['distinct_projected']:,} of {changes['samples']:,}"
        for judge, by in one["judges"].items():
            values = [bracket(by[arm]["perplexity"], ".2f") for arm in ARMS]
            values += [bracket(by["difference"]["nats_per_token"], "+.4f"), bracket(by["difference"]["entropy_bits"], "+.3f")]
            rows.append(
                [str(one["steps"]), Path(judge).name, *values, f"{changes['tokens_changed'] / changes['tokens']:.1%}", distinct]
            )
    if rows:
        paper = found["paper"]["repair"]
        values = [bracket(paper[arm], ".2f") for arm in ARMS]
        rows.append(
            [f"{paper['steps']} (paper)", "gemma-2-9b", *values, bracket(paper["nats_per_token"], "+.4f"), "-", "-", "all"]
        )
    heads = ["steps", "judge", "perplexity", "projected", "difference, nats per token", "difference of the entropy, bits"]
    return _table([*heads, "tokens that differ", "distinct"], rows) if rows else []


def bracket(value: dict[str, float], spec: str) -> str:
    """Return a value with its interval.

    Args:
        value: The value and the ends of its interval.
        spec: The format.
    """
    return f"{format(value['value'], spec)} [{format(value['low'], spec)}, {format(value['high'], spec)}]"
