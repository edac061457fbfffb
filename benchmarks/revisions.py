"""Compare results of `m2s benchmark` from two revisions of the library, measured alternately on one machine.

    m2s benchmark train sample loss --repeats 11 --out out/before-1.json      # in a clone of the older revision
    m2s benchmark train sample loss --repeats 11 --out out/after-1.json       # in a clone of the newer one, and again
    python benchmarks/revisions.py --before out/before-*.json --after out/after-*.json --out benchmarks/results/renovation.json

The time of a contender is the mean of its medians over the runs of a revision. The spread is the greatest difference between
runs of one revision, relative to their mean. A difference between revisions that is smaller than the spread is noise.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from m2s.errors import UserError
from m2s.io import output_file, write_json
from m2s.provenance import command


def times(files: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the median milliseconds of every contender, one for each run.

    Args:
        files: Results of `m2s benchmark`.

    Returns:
        The times by "part: contender", of contenders that every run has measured.
    """
    runs = []
    for file in files:
        parts = {part: found["contenders"] for part, found in file["parts"].items()}
        runs.append({f"{part}: {name}": value["median_ms"] for part, found in parts.items() for name, value in found.items()})
    return {name: [run[name] for run in runs] for name in runs[0] if all(name in run for run in runs)}


def spread(values: list[float]) -> float:
    """Return the greatest difference between values, relative to their mean.

    Args:
        values: Times of the same contender.
    """
    return (max(values) - min(values)) / statistics.fmean(values)


def compare(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the runs of two revisions.

    Args:
        before: Results of the older revision.
        after: Results of the newer revision.

    Returns:
        For every contender that both have: the times, the ratio after / before, and the spread between runs of one revision.

    Raises:
        UserError: The files are not of one device, setting and revision each.
    """
    for files in (before, after):
        if len({file["versions"]["git"] for file in files}) != 1:
            raise UserError("the files of --before must be of one revision, and those of --after too")
    if len({json.dumps([file["device"], file["setting"]]) for file in before + after}) != 1:
        raise UserError("the files must have the same device and the same setting")
    old, new = times(before), times(after)
    return {
        name: {
            "before_ms": old[name],
            "after_ms": new[name],
            "ratio": statistics.fmean(new[name]) / statistics.fmean(old[name]),
            "spread": max(spread(old[name]), spread(new[name])),
        }
        for name in old
        if name in new
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, nargs="+", required=True, metavar="FILE", help="results of the older revision")
    parser.add_argument("--after", type=Path, nargs="+", required=True, metavar="FILE", help="results of the newer revision")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the file to write")
    options = parser.parse_args(arguments)
    try:
        output_file(options.out, (".json",))
        before, after = ([json.loads(path.read_text()) for path in paths] for paths in (options.before, options.after))
        contenders = compare(before, after)
    except UserError as error:
        print(f"revisions.py: {error}", file=sys.stderr)
        return 2
    about = {key: before[0][key] for key in ("device", "setting")}
    versions = {"before": before[0]["versions"], "after": after[0]["versions"]}
    write_json(options.out, {"command": command(), **about, **versions, "contenders": contenders})
    for name, found in contenders.items():
        print(f"{found['ratio']:8.3f}  {name}, spread {found['spread']:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
