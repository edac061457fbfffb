"""Make the tables of the text experiments from what the jobs brought home: JSON for the repository, Markdown on the terminal.

    python experiments/text_tables.py judges judged --ngrams ngrams       # writes experiments/results/text-judges.json
    python experiments/text_tables.py audit arrived/results judged        # writes experiments/results/text-audit.json
    python experiments/text_tables.py samples arrived/results ... --out docs/text-samples.md

`judges` reads the folder of experiments/text_judges.py, and text.json of `m2s evaluate text for-judges/samples/*/*.npz
--metrics repetition novelty`, whose metrics need the text that the models were trained on and no judge. It also writes
JUDGED/genppl-JUDGE.json and JUDGED/frontier-JUDGE.json, from which `m2s figure genppl` and `m2s figure frontier` draw. `audit`
compares the audits and repairs of a folder of experiments/text_job.py with the paper. `samples` writes a page with the first
sample of each row.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for the imports below, also where this file is loaded by its path
import text_audit
import text_judges

from m2s.data.tokenizer import from_dict
from m2s.errors import UserError
from m2s.evaluation import TEXT_METRICS
from m2s.evaluation.genppl import decode, format_areas, frontier_areas
from m2s.evaluation.text.table import MARK, WITHOUT_JUDGE, Ranking, Row, format_marks, rank_all
from m2s.io import output_file, write_json
from m2s.npz import read_npz
from m2s.provenance import command

RESULTS = Path(__file__).parent / "results"
PAPER = {  # generative perplexity under Gemma2-9B at 16, 32, 64 and 128 steps, of networks trained on 131 B tokens
    "m2s/bayes-cosine": (254.6, 175.3, 152.6, 148.8),
    "sedd/analytic-linear": (963.9, 353.2, 247.7, 204.1),
    "neural-ctmc/euler-linear": (578.3, 258.8, 189.7, 183.6),
    "gidd-uniform/bayes-linear": (2134.0, 455.6, 271.7, 226.0),
    "gidd-0.1/bayes-linear": (702.0, 398.9, 270.8, 249.8),
    "gidd-0.2/bayes-linear": (770.4, 430.1, 344.3, 293.0),
    "gidd-0/bayes-linear": (2773.1, 993.7, 529.6, 414.3),
    "mdlm/ancestral-linear": (1432.8, 553.7, 301.6, 210.5),
    "sedd-absorb/analytic-linear": (825.5, 337.9, 186.5, 127.2),
}
OTHERS = ("repeated_2", "distinct_4", "shared_4", "novel_4", "longest_copy")  # columns without a judge in the table
ENTROPY = "entropy_bits"
INTERVAL = ("value", "low", "high")


def read_judged(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the results of experiments/text_judges.py by judge and set.

    Args:
        folder: Its folder.

    Raises:
        UserError: There is none, or a judge lacks sets that another has.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*/*/*.json")):
        one = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(one["judge"]["described"]["name"], {})[one["set"]] = one
    if not found:
        raise UserError(f"{folder} has no results: judge the samples with experiments/text_judges.py judge")
    every = {name for sets in found.values() for name in sets}
    for judge, sets in found.items():
        if missing := sorted(every - sets.keys()):
            raise UserError(f"{judge} has not read {', '.join(missing)}: give text_judges.py judge again")
    return found


def read_ngrams(path: Path) -> dict[str, dict[str, Any]]:
    """Return what `m2s evaluate text` measured without a judge, by set.

    Args:
        path: The folder with its text.json.

    Raises:
        UserError: It cannot be read.
    """
    try:
        files = json.loads((path / "text.json").read_text(encoding="utf-8"))["files"]
        place = {False: lambda file: f"{file.parent.name}/{file.stem}", True: lambda _: held_out_name()}
        return {place[one["kind"] == "held-out"](Path(one["file"])): one["values"][WITHOUT_JUDGE] for one in files}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} has no text.json of m2s evaluate text ({type(error).__name__}: {error})") from error


def held_out_name() -> str:
    """Return the name of the set of held-out windows."""
    return f"{text_judges.HELD_OUT}/{text_judges.SPLIT}"


def make_rows(judged: dict[str, dict[str, dict[str, Any]]], ngrams: dict[str, dict[str, Any]]) -> dict[str, Row]:
    """Return the values of all metrics of each set.

    Args:
        judged: The results of the judges.
        ngrams: What was measured without a judge.
    """
    kinds = {text_judges.ADVERSARIES: "adversary", text_judges.HELD_OUT: "held-out"}
    rows = {}
    for name in sorted(next(iter(judged.values()))):
        values: dict[str, dict[str, dict[str, Any]]] = {}
        for judge, sets in judged.items():
            columns = [column.name for column in TEXT_METRICS["perplexity"].columns]
            values[judge] = {"perplexity": {key: sets[name]["genppl"][key] for key in columns}, **sets[name]["metrics"]}
        if name in ngrams:
            values[WITHOUT_JUDGE] = ngrams[name]
        rows[name] = Row(name, kinds.get(name.partition("/")[0], "samples"), values)  # type: ignore[arg-type]
    return rows


def is_sharpened(result: dict[str, Any]) -> bool:
    """Return whether samples were drawn at another temperature than 1.

    Args:
        result: The summary of a set.
    """
    return result["settings"].get("temperature", 1.0) != 1.0


def judges(options: argparse.Namespace) -> None:
    """Write the results of all judges and print their tables.

    Args:
        options: Command line options.
    """
    judged, ngrams = read_judged(options.judged), {} if options.ngrams is None else read_ngrams(options.ngrams)
    rows = make_rows(judged, ngrams)
    summaries = {judge: {name: one["genppl"] for name, one in sets.items()} for judge, sets in judged.items()}
    first = next(iter(summaries.values()))
    plain = {name for name, one in first.items() if not is_sharpened(one) and "-T" not in name}
    most = {name: rows[name] for name in rows if name in plain and is_longest(name, first)}
    rankings = rank_all(list(most.values()), TEXT_METRICS, list(judged))
    areas = {}
    for judge, sets in summaries.items():
        from_model = {name: one for name, one in sets.items() if rows[name].kind == "samples"}
        write_source(
            options.judged / f"genppl-{Path(judge).stem}.json", [one for name, one in from_model.items() if name in plain]
        )
        frontier = [one for name, one in from_model.items() if has_frontier(name, first)]
        write_source(options.judged / f"frontier-{Path(judge).stem}.json", frontier)
        areas[judge] = frontier_areas(frontier)
    found = {
        "command": command(),
        "judges": [next(iter(sets.values()))["judge"] for sets in judged.values()],
        "provenance": {key: next(iter(first_set(judged).values()))[key] for key in ("command", "device", "versions")},
        "departures": list(
            dict.fromkeys(one for sets in summaries.values() for each in sets.values() for one in each["departures"])
        ),
        "sets": [describe_set(row, first[row.name]) for row in rows.values()],
        "rankings": [ranking.to_dict() for ranking in rankings],
        "frontier": areas,
        "paper": {name: list(values) for name, values in PAPER.items()},
    }
    write_json(output_file(options.results, (".json",)), found)
    for judge in judged:
        print("\n".join([*format_perplexities(judge, rows, first, plain), ""]))
    print("\n".join([*format_metrics(most, rankings, list(judged)), "", *format_marks(rankings), ""]))
    for judge, area in areas.items():
        print("\n".join([f"{judge}:", *format_areas(area), ""]))
    print(f"{options.results} written")


def first_set(judged: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the sets of the first judge.

    Args:
        judged: The results of the judges.
    """
    return next(iter(judged.values()))


def steps_of(name: str, summaries: dict[str, Any]) -> int:
    """Return the number of steps of a set; 0 where it has none.

    Args:
        name: The set.
        summaries: The summaries of all sets.
    """
    return int(summaries[name]["settings"].get("steps", 0))


def is_longest(name: str, summaries: dict[str, Any]) -> bool:
    """Return whether a set has the most steps of those of its row, sampler and grid, without temperature.

    Args:
        name: The set.
        summaries: The summaries of all sets.
    """
    series = name.rpartition("-")[0] if steps_of(name, summaries) else name
    others = [other for other in summaries if other.rpartition("-")[0] == series and not is_sharpened(summaries[other])]
    return all(steps_of(name, summaries) >= steps_of(other, summaries) for other in others)


def has_frontier(name: str, summaries: dict[str, Any]) -> bool:
    """Return whether the row of a set was sampled at several temperatures in the same way.

    Args:
        name: The set.
        summaries: The summaries of all sets.
    """
    base = name.partition("-T")[0]
    if f"{name}-T1" in summaries:  # of a repair: those of the frontier were drawn by m2s sample
        return False
    return any(is_sharpened(summaries[other]) for other in summaries if other.partition("-T")[0] == base)


def write_source(path: Path, results: list[dict[str, Any]]) -> None:
    """Write summaries as `m2s evaluate genppl` does, for figures.

    Args:
        path: The file.
        results: The summaries.
    """
    write_json(path, {"results": results, "differences": [], "command": command()})


def describe_set(row: Row, summary: dict[str, Any]) -> dict[str, Any]:
    """Return what the result file stores of a set: how it was drawn, and its numbers with their intervals.

    Args:
        row: The values of the set.
        summary: Its summary by one of the judges.
    """
    settings = {
        key: summary["settings"][key] for key in ("sampler", "grid", "steps", "temperature") if key in summary["settings"]
    }
    values = {
        group: {
            key: {end: value.get(end) for end in INTERVAL}
            for metric in metrics.values()
            for key, value in metric.items()
            if isinstance(value, dict) and "value" in value
        }
        for group, metrics in row.values.items()
    }
    counts = {key: summary[key] for key in ("samples", "distinct")}
    return {"set": row.name, "kind": row.kind, "settings": settings, **counts, "values": values}


def format_perplexities(judge: str, rows: dict[str, Row], summaries: dict[str, Any], plain: Iterable[str]) -> list[str]:
    """Return a Markdown table: perplexity and, in brackets, entropy over steps, beside the paper's perplexities.

    Args:
        judge: The judge.
        rows: The values of all sets.
        summaries: The summaries of all sets.
        plain: The sets that were drawn at temperature 1.
    """
    series: dict[str, dict[int, str]] = {}
    for name in plain:
        if rows[name].kind == "samples":
            series.setdefault(name.rpartition("-")[0], {})[steps_of(name, summaries)] = name
    every = sorted({steps for found in series.values() for steps in found})
    lines = [f"| {Path(judge).name}: perplexity (entropy, bits) | {' | '.join(f'{steps} steps' for steps in every)} | paper |"]
    lines.append("|---" * (len(every) + 2) + "|")
    for name, found in sorted(series.items()):
        cells = [perplexity_cell(rows[found[steps]], judge) if steps in found else "-" for steps in every]
        paper = " / ".join(f"{value:.1f}" for value in PAPER.get(name, ())) or "-"
        lines.append(f"| `{name}` | {' | '.join(cells)} | {paper} |")
    return lines


def perplexity_cell(row: Row, judge: str) -> str:
    """Return a perplexity with half of its interval, and the entropy of the tokens within a sequence.

    Args:
        row: The values of a set.
        judge: The judge.
    """
    perplexity, entropy = (row.value(judge, "perplexity", name) for name in ("perplexity", "entropy_bits"))
    assert perplexity is not None and entropy is not None
    return f"{interval_cell(perplexity, '.1f')} ({entropy['value']:.2f})"


def interval_cell(value: dict[str, Any] | None, spec: str) -> str:
    """Return a value with half of its interval.

    Args:
        value: The value; None where it was not measured.
        spec: The format.
    """
    if value is None:
        return "-"
    low, high = value.get("low"), value.get("high")
    half = "" if low is None or high is None else f" ± {format((high - low) / 2, spec)}"
    return f"{format(value['value'], spec)}{half}"


def format_metrics(rows: dict[str, Row], rankings: Sequence[Ranking], names: Sequence[str]) -> list[str]:
    """Return a Markdown table of all metrics at the most steps, with adversaries and held-out text.

    Args:
        rows: The values of the sets.
        rankings: The rankings. A column that ranks an adversary first is marked.
        names: The judges.
    """
    columns = [one for one in rankings if one.group in names and one.column.name in ("perplexity", "mauve", "frechet")]
    # The entropy counts the tokens of the samples, so it is the same for all judges.
    columns += [one for one in rankings if one.group == names[0] and one.column.name == ENTROPY]
    columns += [one for one in rankings if one.group not in names and one.column.name in OTHERS]
    heads = [
        one.column.name
        + (f", {Path(one.group).name}" if one.group in names and one.column.name != ENTROPY else "")
        + (f" {MARK}" if one.is_fooled else "")
        for one in columns
    ]
    lines = [f"| set | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    order = {"samples": 0, "adversary": 1, "held-out": 2}
    for name, row in sorted(rows.items(), key=lambda item: (order[item[1].kind], item[0])):
        cells = [interval_cell(row.value(one.group, one.metric, one.column.name), one.column.format) for one in columns]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def samples(options: argparse.Namespace) -> None:
    """Write a page with the first sample of each row, at the most steps of its first sampler by name and at temperature 1.

    Args:
        options: Command line options.

    Raises:
        UserError: There are no samples.
    """
    chosen: dict[str, tuple[int, str, Path]] = {}
    for folder in options.folders:
        for name, path in text_judges.collect(folder).items():
            row, _, kind = name.partition("/")
            found = (-int(json.loads(str(read_npz(path, ["settings"])["settings"]))["steps"]), kind, path)
            if "-T" not in kind and (row not in chosen or found[:2] < chosen[row][:2]):
                chosen[row] = found
    if not chosen:
        raise UserError(f"{', '.join(map(str, options.folders))} have no samples")
    lines = [SAMPLES_HEADING]
    for row, (steps, kind, path) in sorted(chosen.items()):
        found = read_npz(path, ["tokens", "settings"])
        described = json.loads(str(found["settings"]))["data"]["tokenizer"]
        described.pop("path", None)
        words = decode(from_dict(described), found["tokens"][0].astype("int64"))
        sampler = kind.rpartition("-")[0].replace("-", ", grid ")
        lines += [f"## {row}", "", f"{-steps} steps, sampler {sampler}, sample 0.", "", "~~~~text", words.strip(), "~~~~", ""]
    options.out.write_text("\n".join(lines), encoding="utf-8")
    print(f"{len(chosen)} samples in {options.out}")


SAMPLES_HEADING = """# Samples of text

One sample of each row of the text tables in [RESULTS.md](../RESULTS.md): the first one, not chosen. The text between the lines
is what the network wrote. `python experiments/text_tables.py samples` made this page.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line.

    Args:
        arguments: Arguments in place of `sys.argv`.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    one = actions.add_parser("judges", help="tables of perplexity, entropy, MAUVE, Frechet distance, n-grams and the frontier")
    one.add_argument("judged", type=Path, help="folder of experiments/text_judges.py judge")
    one.add_argument("--ngrams", type=Path, metavar="FOLDER", help="folder of m2s evaluate text --metrics repetition novelty")
    one.add_argument("--results", type=Path, default=RESULTS / "text-judges.json", metavar="FILE", help="the result file")
    one = actions.add_parser("audit", help="tables of the audits and the repair of sedd, beside the paper's")
    one.add_argument("folder", type=Path, help="folder of experiments/text_job.py with the row sedd")
    one.add_argument(
        "judged", type=Path, nargs="?", help="folder of experiments/text_judges.py judge, for the perplexities of the repair"
    )
    one.add_argument("--row", default="sedd", help="the row (%(default)s)")
    one.add_argument("--results", type=Path, default=RESULTS / "text-audit.json", metavar="FILE", help="the result file")
    one = actions.add_parser("samples", help="a page with the first sample of each row")
    one.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folders of experiments/text_job.py")
    one.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page to write")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.
    """
    options = parse(arguments)
    try:
        if options.action == "judges":
            judges(options)
        elif options.action == "samples":
            samples(options)
        else:
            judged = None if options.judged is None else read_judged(options.judged)
            found = text_audit.summarize(options.folder, options.row, judged)
            write_json(output_file(options.results, (".json",)), {"command": command(), **found})
            print("\n".join([*text_audit.format_tables(found), "", f"{options.results} written"]))
        return 0
    except UserError as error:
        print(f"text_tables.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
