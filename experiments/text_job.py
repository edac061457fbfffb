"""Train rows of a text entry, and draw, audit and repair their samples, in calls of limited time on one machine.

    python experiments/text_job.py OUT --data packed/text --entry methods --rows sedd --seconds 560 --bundle back
    python experiments/text_job.py OUT ...                  # the same again: continues where the last call ended
    python experiments/transfer.py join back arrived       # on another machine

First `experiments/text.py` trains all rows and evaluates their NELBO. The stages of all rows follow, the most important ones
first. Level 1: samples with the sampler of the row's paper; for `sedd` the audit and the repair. Level 2: for `sedd` audits of
the paper's four trajectories, of earlier states and at all numbers of steps. Level 3: for heads of M2S the other samplers and
grids that the paper compares, and samples at lower temperatures, for the frontier of perplexity against entropy. A score has no
temperature, so there it is that of projected scores, and the row is called ROW-projected. `--level` leaves out the stages above
it. A stage is a command of m2s with one result that is not computed again. A call ends before `--seconds`. A stage that is
interrupted resumes in the next call.

With `--bundle` everything small of these rows is packed after each row and each stage, and at the end of every call, also of
one that ran out of time: rows, logs, samples and audits (experiments/job_results.py). Copy it away at any time, with
experiments/copy_results.sh. With `--weights` the averaged weights of the rows are written to OUT/weights in bf16. With
`--leaderboard` each row is also verified as an entry of docs/leaderboard.md.
Samples and repairs of many steps compile the network (`--compile-from`).
Trials: `--n`, `--audited`, `--steps`, `--temperatures` and the options of text.py after `--`.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the imports below, also where this file is loaded by its path
import text
import text_leaderboard
from deadline import Deadline, OutOfTime
from job_results import Packer, check_target
from job_stages import LEVELS, MARGIN, Clock, run_stages
from text_entries import BUDGETED, ENTRIES
from text_stages import STEPS, TEMPERATURES, Job, small_files

import m2s
from m2s.errors import UserError, suggest


def work(options: argparse.Namespace, clock: Clock, imports: float, packer: Packer) -> bool:
    """Compute everything that is missing: all rows, then their stages by level.

    Args:
        options: Command line options.
        clock: The time of the call.
        imports: Seconds of this process until its start.
        packer: Packs the results.

    Returns:
        Whether nothing failed.
    """
    entry = ENTRIES[options.entry]
    temperatures = tuple(options.temperatures)
    job = Job(
        options.out,
        entry,
        options.n,
        options.audited,
        tuple(options.steps),
        options.micro_batch,
        temperatures,
        options.compile_from,
    )
    failed, trained = [], []
    for row in options.rows:
        words = [
            str(options.out),
            "--entry",
            options.entry,
            "--rows",
            row,
            "--data",
            str(options.data),
            "--keep",
            *options.text,
        ]
        # Rows of the repository's result file have no network here: they are computed again.
        with text_leaderboard.wall_clock(options.out, row, imports):
            code = text.main([*words, "--results", str(options.out / "no-results")])
        if code:
            failed.append(row)
        else:
            trained.append(row)
        clock.log_end(f"row {row}, {packer()}")
    data = options.data if options.leaderboard else None
    stages = [stage for row in trained for stage in (*job.entries(row, data), *job.stages(row))]
    for level in range(1, options.level + 1):
        failed += run_stages((stage for stage in stages if stage.level == level), clock, packer)
    for row in trained if options.weights else ():
        save_weights(options.out, row)
    if failed:
        print(f"failed: {'; '.join(failed)}", file=sys.stderr)
    return not failed


def save_weights(out: Path, row: str) -> None:
    """Save the averaged weights of a row in bf16.

    Args:
        out: The folder of all results.
        row: The row.
    """
    target = out / "weights" / row
    if not (target / "config.json").exists():
        checkpoint = m2s.load(out / "runs" / row)
        checkpoint.model.bfloat16()
        checkpoint.save(target)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read and validate the command line.

    Args:
        arguments: Arguments in place of `sys.argv`.

    Raises:
        UserError: A value is invalid.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of all results")
    parser.add_argument("--data", type=Path, metavar="FOLDER", required=True, help="folder that m2s data prepare wrote")
    parser.add_argument("--entry", default="methods", choices=BUDGETED, help="the table (%(default)s)")
    parser.add_argument("--rows", required=True, metavar="A,B,C", help="the rows, in this order")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end before this many seconds; 0: only --bundle")
    parser.add_argument("--bundle", type=Path, metavar="FOLDER", help="pack the results of the rows into this folder")
    parser.add_argument("--weights", action="store_true", help="also write the averaged weights in bf16, OUT/weights/ROW")
    parser.add_argument(
        "--leaderboard", action="store_true", help="also verify each row as an entry of the leaderboard, seconds included"
    )
    parser.add_argument(
        "--level",
        type=int,
        default=LEVELS,
        choices=range(1, LEVELS + 1),
        help="leave out stages above it (%(default)s)",
    )
    parser.add_argument("--n", type=int, default=1024, help="samples of a set, and pairs of a repair (%(default)s)")
    parser.add_argument("--audited", type=int, default=128, help="samples of the main audit (%(default)s)")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="numbers of sampling steps (16 32 64 128)")
    parser.add_argument(
        "--temperatures", type=float, nargs="*", default=TEMPERATURES, help="of the frontier, beside 1 (0.7 0.8 0.9)"
    )
    parser.add_argument("--micro-batch", type=int, default=32, help="samples of one call of the network (%(default)s)")
    parser.add_argument(
        "--compile-from",
        type=int,
        metavar="STEPS",
        default=64 if torch.cuda.is_available() else None,
        help="compile the network for samples and repairs of at least so many steps (64 on a GPU, never on a CPU)",
    )
    words = sys.argv[1:] if arguments is None else arguments
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.text = words[end + 1 :]
    options.rows = options.rows.split(",")
    if options.bundle is not None:
        check_target(options.bundle)
    known = ENTRIES[options.entry].rows
    for name in options.rows:
        if name not in known:
            raise UserError(f"{options.entry} has no row {name!r}: {suggest(name, known)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.

    Returns:
        0: the call did what it could, 1: a row failed, 2: the input is invalid.
    """
    started, imports = time.monotonic(), text_leaderboard.process_seconds()
    code = 0
    try:
        options = parse(arguments)
        clock = Clock(started, options.seconds)
        packer = Packer(options.out, lambda: small_files(options.out, options.rows), options.bundle)
        try:
            if options.seconds > 0:
                with Deadline(options.seconds - MARGIN):
                    code = 0 if work(options, clock, imports, packer) else 1
                clock.log(f"finished: {', '.join(options.rows)}")
        except (OutOfTime, SystemExit) as error:
            if isinstance(error, SystemExit) and error.code != 128 + signal.SIGTERM:
                raise
            clock.log("not finished: the same command continues")
        packer.finish()
        return code
    except UserError as error:
        print(f"text_job.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
