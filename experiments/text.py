"""Train text models under one budget and measure the NELBO on held-out documents: the text tables of RESULTS.md.

    m2s data prepare texts/enwiki-sample.txt --out packed/enwiki --tokenizer gpt2
    python experiments/text.py out/recipe --data packed/enwiki      # on a GPU; finished rows are skipped
    python experiments/text.py out/recipe --table                   # writes experiments/results/text-recipe.json

An entry is a named table: its rows, and the settings that they have in common. A row runs `m2s train owt` with these
settings. Then it evaluates the NELBO with all terms on the held-out windows, with the averaged weights, as `m2s evaluate bpd`
does. All rows of an entry train on the same batches. OUT/ROW.json is written when a row is finished. The file of a failed row
holds the error. The next call repeats failed rows after all others. Rows of experiments/results/text-ENTRY.json with the same
settings and data count as finished.

The entries are in experiments/text_entries.py. The rows of some of them train for a number of seconds in place of a number of
steps. The speed of such a row is that of the same method and optimizer in the tables of `--speeds`. Without one a short run
measures it. OUT/budgets/ROW.json has the number of steps that follows, so that an interrupted row resumes.

The loss in the trace is the mean over `log_every` steps in nats per token. The gradient norm is that of the loss summed over
tokens and averaged over sequences. Tokens per second is the median over the intervals of the trace, without compilation.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the imports below, also where this file is loaded by its path
from text_entries import BUDGETED, ENTRIES, as_json
from text_results import RESULTS, check_settings, known_rows, read_rows, write_table
from text_row import Experiment, describe
from text_speed import measured_speeds

from m2s.cli.evaluate.bpd import finite
from m2s.data.files import BadData
from m2s.errors import UserError, suggest
from m2s.io import output_folder, write_json
from m2s.presets import PRESETS
from m2s.provenance import provenance
from m2s.training.config import resolve


def run(options: argparse.Namespace, started: float) -> bool:
    """Compute the rows that are not finished.

    Args:
        options: Command line options.
        started: `time.monotonic()` at the start of the process.

    Returns:
        Whether no row failed.
    """
    entry = ENTRIES[options.entry]
    changes = {key: as_json(value) for key, _, value in (pair.partition("=") for pair in options.set)}
    settings = {"data.length": PRESETS[entry.preset].data.length, **entry.settings, **changes}
    data = describe(options.data, settings["data.length"], options.limit)
    shared: dict[str, Any] = {"entry": options.entry, "settings": settings, "passes": entry.passes, "data": data}
    if entry.seconds is not None:
        entry = dataclasses.replace(entry, seconds=options.budget or entry.seconds)
        shared |= {"preset": entry.preset, "seconds": entry.seconds}
    shared = json.loads(json.dumps(shared))
    check_settings(options.out, shared)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speeds = measured_speeds(options.speeds, provenance(device)["device"])
    experiment = Experiment(options.out, options.data, entry, settings, data, device, speeds)
    for name in options.rows:
        resolve(experiment.config(name, entry.rows[name]))  # raise for invalid options before anything is written
    done = {**known_rows(options, shared), **read_rows(options.out, entry)}
    todo = [name for name in options.rows if name not in done]
    todo += [name for name in options.rows if "error" in done.get(name, {})]
    write_json(output_folder(options.out) / "entry.json", shared)
    for number, name in enumerate(todo):
        if time.monotonic() - started > options.seconds:
            print(f"{options.seconds:g} s have passed, not started: {', '.join(todo[number:])}")
            break
        print(f"{name} ({number + 1} of {len(todo)}), at {time.monotonic() - started:.0f} s", flush=True)
        try:
            row = experiment.measure(name, entry.rows[name])
        except Exception as error:
            row = {"row": name, "error": f"{type(error).__name__}: {error}"}
            print(f"{name} failed: {row['error']}", file=sys.stderr, flush=True)
            if device.type == "cuda":  # a failed graph capture leaves its stream current
                torch.cuda.set_stream(torch.cuda.default_stream())
        write_json(options.out / f"{name}.json", finite(row))
        if not options.keep and "error" not in row:
            shutil.rmtree(options.out / "runs" / name, ignore_errors=True)
    return not any("error" in row for row in read_rows(options.out, entry).values())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read and validate the command line.

    Args:
        arguments: Arguments in place of `sys.argv`.

    Raises:
        UserError: A value is invalid.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the rows")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder that m2s data prepare wrote")
    parser.add_argument("--entry", default="recipe", choices=ENTRIES, help="the table (%(default)s)")
    parser.add_argument("--rows", metavar="A,B,C", help="only these rows")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row after this many seconds")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="seconds of training of each row, in place of the entry's"
    )
    parser.add_argument(
        "--speeds",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="tables with the speed of rows, in place of short runs",
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="A.B=C", help="change settings of all rows")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N held-out windows")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint of each row in OUT/runs")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="folder of text-ENTRY.json")
    parser.add_argument("--table", action="store_true", help="print the table and write text-ENTRY.json")
    options = parser.parse_args(arguments)
    rows = ENTRIES[options.entry].rows
    options.rows = options.rows.split(",") if options.rows else list(rows)
    for name in options.rows:
        if name not in rows:
            raise UserError(f"{options.entry} has no row {name!r}: {suggest(name, rows)}")
    if options.data is None and not options.table:
        raise UserError("--data is missing: give the folder that `m2s data prepare` wrote")
    if options.budget is not None and (ENTRIES[options.entry].seconds is None or options.budget <= 0):
        budgeted = ", ".join(BUDGETED)
        raise UserError(f"--budget is {options.budget:g}, but it must be above 0, and belongs to the entries {budgeted}")
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit is {options.limit}, but it must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.
    """
    started = time.monotonic()
    try:
        options = parse(arguments)
        if options.table:
            write_table(options)
            return 0
        return 0 if run(options, started) else 1
    except (UserError, BadData) as error:
        print(f"text.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
