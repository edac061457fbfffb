"""The command line of the campaign: `python -m tests.faults --help`."""

import argparse
import atexit
import os
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "faults.json"
PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def main() -> int:
    """Run the campaign, or a part of it.

    Returns:
        The exit code: 1 where a case fails.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--minutes", type=float, default=30, help="time of the long version (the default)")
    what.add_argument("--short", action="store_true", help="the version of make test; nothing is written")
    what.add_argument("--case", metavar="SUITE/NUMBER", help="run one case and print what is wrong")
    what.add_argument("--list", action="store_true", help="list the suites")
    parser.add_argument("--only", metavar="SUITE", action="append", default=[], help="suites whose names start so")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of the counts")
    given = parser.parse_args()

    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1"}
    for inherited in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(inherited, None)
    from .campaign import Results, all_suites, run_case, run_long, run_short, write_table
    from .commands import prepare_process

    def say(line: str) -> None:
        print(line, flush=True)

    suites = [one for one in all_suites().values() if not given.only or one.name.startswith(tuple(given.only))]
    prepare_process()
    if given.list:
        say("\n".join(f"{one.name:24s}{one.size():>8,}  {one.skip() or one.title}" for one in suites))
        return 0
    if given.case:
        name, _, number = given.case.rpartition("/")
        failure = run_case(all_suites()[name], int(number))
        say(f"{given.case}: {failure['wrong'] if failure else 'passes'}")
        return int(failure is not None)
    if given.short:
        failures = run_short(suites, say)
        for failure in failures:
            say(f"\n{failure['repeat']}\n{failure['wrong']}")
        return int(bool(failures))
    results = Results(given.results)
    run_long(suites, results, given.minutes, say)
    if given.results == RESULTS:
        write_table(PAGE, results)
    cases = sum(entry["cases"] for entry in results.suites.values())
    say(f"{cases:,} cases in {results.minutes:.0f} minutes, {len(results.failures)} failures: {given.results}")
    return int(bool(results.failures))


if __name__ == "__main__":
    code = main()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # some packages print lists of leaked objects when the interpreter ends
