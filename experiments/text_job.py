"""Train rows of a text entry, and draw, audit and repair their samples, in calls of limited time on one machine.

    python experiments/text_job.py OUT --data packed/text --entry methods --rows sedd --seconds 560 --bundle back
    python experiments/text_job.py OUT ...                  # the same again: continues where the last call ended
    python experiments/transfer.py join back results       # on another machine

First `experiments/text.py` trains all rows and evaluates their NELBO. The stages of all rows follow, the most important ones
first. Level 1: samples with the sampler of the row's paper; for `sedd` the audit and the repair. Level 2: for `sedd` audits of
the paper's four trajectories, of earlier states and at all numbers of steps. Level 3: for heads of M2S the other samplers and
grids that the paper compares, and samples at lower temperatures, for the frontier of perplexity against entropy. A score has no
temperature, so there it is that of projected scores, and the row is called ROW-projected. `--level` leaves out the stages above
it. A stage is a command of m2s with one result that is not computed again. A call ends before `--seconds`. A stage that is
interrupted resumes in the next call.

With `--bundle` everything small of these rows is packed after each row and each level, and at the end of every call, also of
one that ran out of time: rows, logs, samples and audits, in parts for one transfer (`experiments/transfer.py`). Copy them away
as soon as they appear. With `--weights` the averaged weights of the
rows are written to OUT/weights in bf16. With `--leaderboard` each row is also verified as an entry of docs/leaderboard.md.
Trials: `--n`, `--audited`, `--steps`, `--temperatures` and the options of text.py after `--`.
"""

import argparse
import functools
import gc
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the imports below, also where this file is loaded by its path
import text
import text_leaderboard
import transfer
from deadline import Deadline, OutOfTime
from leaderboard import ENTRY, RESULT

import m2s
from m2s.cli import run as run_m2s
from m2s.errors import UserError, suggest
from m2s.io import output_folder
from m2s.provenance import recorded_command
from m2s.training.export import export_state
from m2s.training.state import steps as saved_steps

STEPS = (16, 32, 64, 128)
TEMPERATURES = (0.7, 0.8, 0.9)
PROJECTED = "-projected"  # rows whose samples are those of projected scores
SCORES = ("sedd", "sedd-absorb", "neural-ctmc")  # methods whose heads have no posterior
DIAGNOSED = 4  # trajectories of the paper's diagnostic
FEWER = 4  # the audits of level 2 have this many times fewer samples than the main one
MARGIN = 30.0  # seconds before the end of a call in which a run saves its state and results are packed
LEVELS = 3  # of importance of stages
RUN_FILES = ("train.json", "log.jsonl", "config.json")  # of a run that figures and reports read
PART_MIB, FILES, TOTAL_MIB = 15.5, 8, 63.5  # of one transfer


@dataclass(frozen=True)
class Sampling:
    """How samples of a row are drawn.

    Args:
        sampler: The sampler.
        grid: The time grid.
        steps: Numbers of steps.
    """

    sampler: str
    grid: str
    steps: tuple[int, ...] = STEPS


ANALYTIC = Sampling("analytic", "linear")
BAYES_COSINE = Sampling("bayes", "cosine")
PANEL_B = (BAYES_COSINE, Sampling("bayes", "linear"), Sampling("euler", "cosine"), Sampling("euler", "linear"))
SAMPLINGS = {  # by method. Of the others the grid is that of their papers, evenly spaced times
    "m2s": PANEL_B,
    "m2s-offset": PANEL_B,
    "sedd": (),  # those of the repair without projection
    "sedd-absorb": (ANALYTIC,),
    "mdlm": (Sampling("ancestral", "linear"),),
    "gidd": (Sampling("bayes", "linear"),),
    "duo": (Sampling("bayes", "linear"),),
    "neural-ctmc": (Sampling("euler", "linear"),),
    "ar": (Sampling("autoregressive", "linear", (512,)),),  # one call of the network for each token, whatever the steps
}


@dataclass(frozen=True)
class Stage:
    """One result of a row.

    Args:
        name: What it is, for messages.
        result: The file that exists when the stage is finished.
        run: Computes it. An interrupted stage resumes.
        level: 1 for the most important stages, at most LEVELS.
    """

    name: str
    result: Path
    run: Callable[[], object]
    level: int = 1


@dataclass(frozen=True)
class Job:
    """The options of a call, and the stages that follow from them.

    Args:
        out: The folder of all results.
        entry: The table of experiments/text.py.
        n: Samples of each set, and pairs of a repair.
        audited: Samples of an audit.
        steps: Numbers of sampling steps.
        micro_batch: Samples of one call of the network.
        temperatures: Temperatures of the frontier, without 1.
    """

    out: Path
    entry: text.Entry
    n: int
    audited: int
    steps: tuple[int, ...]
    micro_batch: int
    temperatures: tuple[float, ...] = TEMPERATURES

    def stages(self, row: str) -> Iterator[Stage]:
        """Yield the stages of a trained row.

        Args:
            row: The row.
        """
        method, run = self.entry.rows[row]["method"], self.out / "runs" / row
        samplings = SAMPLINGS[method]
        for number, sampling in enumerate(samplings):
            yield from self.samples(row, run, sampling, level=1 if number == 0 else 3)
        if method == "sedd":
            yield from self.sedd(row, run)
        yield from self.frontier(row, run, samplings[0] if samplings else ANALYTIC, method not in SCORES)

    def entries(self, row: str, data: Path | None) -> Iterator[Stage]:
        """Yield the stage that verifies a row as an entry of the leaderboard.

        Args:
            row: The row.
            data: Folder that `m2s data prepare` wrote; None: there is no such stage.
        """
        if data is not None:
            folder = self.out / text_leaderboard.FOLDER / row
            yield Stage(f"entry {folder}", folder / RESULT, lambda: text_leaderboard.verify(self.out, row, data))

    def frontier(self, row: str, run: Path, sampling: Sampling, has_posterior: bool) -> Iterator[Stage]:
        """Yield samples at lower temperatures, at the last but one number of steps.

        Args:
            row: The row.
            run: The folder of its run.
            sampling: The sampler and the grid.
            has_posterior: Whether the head has a posterior, which the temperature sharpens. Otherwise scores are projected,
                also at temperature 1, which the samples of the row are not.
        """
        steps = sorted(sampling.steps if sampling.steps != STEPS else self.steps)[-2:][0]
        folder = self.out / "samples" / (row if has_posterior else row + PROJECTED)
        more = [] if has_posterior else ["--project"]
        for temperature in self.temperatures if has_posterior else (*self.temperatures, 1.0):
            out = folder / f"{sampling.sampler}-{sampling.grid}-{steps}-T{temperature:g}.npz"
            options = [*self.sampling_options(sampling), *more, "--temperature", f"{temperature:g}"]
            yield self.command("sample", run, out, out, self.n, steps, options, level=3)

    def sampling_options(self, sampling: Sampling) -> list[str]:
        """Return the options of `m2s sample` of a sampler and grid.

        Args:
            sampling: The sampler and the grid.
        """
        return ["--sampler", sampling.sampler, "--grid", sampling.grid, "--batch-size", str(8 * self.micro_batch)]

    def samples(self, row: str, run: Path, sampling: Sampling, level: int) -> Iterator[Stage]:
        """Yield the sets of samples of one sampler and grid.

        Args:
            row: The row.
            run: The folder of its run.
            sampling: The sampler and the grid.
            level: That of the stages.
        """
        for steps in sampling.steps if sampling.steps != STEPS else self.steps:
            out = self.out / "samples" / row / f"{sampling.sampler}-{sampling.grid}-{steps}.npz"
            yield self.command("sample", run, out, out, self.n, steps, self.sampling_options(sampling), level)

    def sedd(self, row: str, run: Path) -> Iterator[Stage]:
        """Yield audits and repairs of an unconstrained score.

        The samples without projection are the row's samples. They are those of `m2s sample` with SEDD's sampler.

        Args:
            row: The row.
            run: The folder of its run.
        """
        last = max(self.steps)
        yield self.audit(row, run, "audit", self.audited, last, level=1)
        for steps in sorted(self.steps, reverse=True):
            folder = self.out / "repair" / f"{row}-{steps}"
            examined = "1" if steps == last else "0"  # an audited batch takes several times as long as another
            options = ["--measure", "none", "--audited", examined, "--batch-size", str(min(self.micro_batch, self.n))]
            yield self.command("repair", run, folder, folder / "repair.json", self.n, steps, options)
            target = self.out / "samples" / row / f"analytic-linear-{steps}.npz"
            yield Stage(f"samples of {folder}", target, lambda source=folder, target=target: copy_samples(source, target))
        yield self.audit(row, run, f"audit-{DIAGNOSED}", DIAGNOSED, last)
        states = saved_steps(run / "state")
        for step in (states[0], states[len(states) // 2 - 1]) if len(states) == text.STATES else ():
            exported = self.out / "states" / f"{row}-{step}"
            export = functools.partial(export_state, run, step, exported)
            yield Stage(f"export of state {step}", exported / "config.json", export, level=2)
            yield self.audit(row, exported, f"audit-state-{step}", max(1, self.audited // FEWER), last)
        for steps in sorted(self.steps)[:-1]:
            yield self.audit(row, run, f"audit-steps-{steps}", max(1, self.audited // FEWER), steps)

    def audit(self, row: str, checkpoint: Path, name: str, n: int, steps: int, level: int = 2) -> Stage:
        """Return the stage of an audit.

        Args:
            row: The row.
            checkpoint: The folder of the network.
            name: The name of the audit.
            n: Number of samples.
            steps: Number of steps.
            level: That of the stage.
        """
        folder = self.out / "audits" / f"{row}-{name}"
        return self.command("audit", checkpoint, folder, folder / "audit.json", n, steps, ["--batch-size", "32"], level)

    def command(
        self, word: str, checkpoint: Path, out: Path, result: Path, n: int, steps: int, options: list[str], level: int = 1
    ) -> Stage:
        """Return the stage of a command of m2s.

        Args:
            word: The command.
            checkpoint: The folder of the network.
            out: What the command writes.
            result: The file that it writes last.
            n: Number of samples.
            steps: Number of steps.
            options: Further options.
            level: That of the stage.
        """
        size = min(self.micro_batch, n)
        words = [word, str(checkpoint), "--out", str(out), "--n", str(n), "--steps", str(steps), "--micro-batch", str(size)]
        words += options

        return command_stage(words, out, result, level)


def command_stage(words: list[str], out: Path, result: Path, level: int = 1) -> Stage:
    """Return the stage of a command of m2s.

    Args:
        words: The command.
        out: What it writes.
        result: The file that it writes last.
        level: That of the stage.
    """

    def run() -> None:
        output_folder(out.parent)
        with recorded_command(["m2s", *words]):
            run_m2s(words)

    return Stage(" ".join(["m2s", *words]), result, run, level)


def copy_samples(repair: Path, target: Path) -> None:
    """Copy the samples of a repair without projection.

    Args:
        repair: The folder of the repair.
        target: The file to write.
    """
    output_folder(target.parent)
    temporary = target.with_suffix(".tmp")
    shutil.copyfile(repair / "unprojected.npz", temporary)
    temporary.replace(target)


def work(options: argparse.Namespace, started: float, imports: float) -> bool:
    """Compute everything that is missing: all rows, then their stages by level.

    Args:
        options: Command line options.
        started: `time.monotonic()` at the start of the process.
        imports: Seconds of this process until then.

    Returns:
        Whether nothing failed.
    """
    entry = text.ENTRIES[options.entry]
    temperatures = tuple(options.temperatures)
    job = Job(options.out, entry, options.n, options.audited, tuple(options.steps), options.micro_batch, temperatures)
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
        bundle_so_far(options)
    data = options.data if options.leaderboard else None
    stages = [stage for row in trained for stage in (*job.entries(row, data), *job.stages(row))]
    for level in range(1, options.level + 1):
        failed += run_stages((stage for stage in stages if stage.level == level), started)
        bundle_so_far(options)
    for row in trained if options.weights else ():
        save_weights(options.out, row)
    if failed:
        print(f"failed: {'; '.join(failed)}", file=sys.stderr)
    return not failed


def run_stages(stages: Iterable[Stage], started: float) -> list[str]:
    """Run the stages that are not finished. A stage that fails does not end the others.

    Args:
        stages: The stages.
        started: `time.monotonic()` at the start of the process.

    Returns:
        The names of those that failed.
    """
    failed = []
    for stage in stages:
        if not stage.result.exists():
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            print(f"at {time.monotonic() - started:.0f} s: {stage.name}", flush=True)
            try:
                stage.run()
            except Exception as error:
                failed.append(stage.name)
                print(f"failed: {stage.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return failed


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


def bundle_so_far(options: argparse.Namespace) -> None:
    """Pack what there is, where the call packs results. Results that do not fit are an error at the end of the call only.

    Args:
        options: Command line options.
    """
    if options.bundle:
        try:
            bundle(options.out, options.rows, options.bundle)
        except UserError as error:
            print(f"not packed: {error}", file=sys.stderr, flush=True)


def bundle(out: Path, rows: list[str], target: Path) -> None:
    """Pack the small results of some rows in parts for one transfer.

    Args:
        out: The folder of all results.
        rows: The rows.
        target: The folder of the parts.

    Raises:
        UserError: They do not fit into one transfer.
    """
    pack(out, small_files(out, rows), rows, target)


def pack(out: Path, files: Iterable[Path], rows: list[str], target: Path) -> None:
    """Pack files in parts for one transfer.

    Args:
        out: The folder of all results.
        files: Files in it.
        rows: The rows that they belong to, for the message.
        target: The folder of the parts.

    Raises:
        UserError: They do not fit into one transfer.
    """
    collected = out / "bundle" / "results"
    shutil.rmtree(collected, ignore_errors=True)
    collected.mkdir(parents=True)
    for file in files:
        place = collected / file.relative_to(out)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    transfer.split(collected, out / "bundle" / "parts", int(PART_MIB * transfer.MIB))
    count, transfers = transfer.copy_group(out / "bundle" / "parts", target, 0, FILES, int(TOTAL_MIB * transfer.MIB))
    print(f"{count} parts of results in {target}", flush=True)
    if transfers > 1:
        raise UserError(f"the results of {', '.join(rows)} need {transfers} transfers: bundle fewer rows at once (--rows)")


def small_files(out: Path, rows: list[str]) -> list[Path]:
    """Return the results of some rows without networks and states.

    Args:
        out: The folder of all results.
        rows: The rows.
    """
    found = [out / "entry.json"]
    for row in rows:
        found += [out / text_leaderboard.FOLDER / row / name for name in (ENTRY, RESULT)]
        found += [out / f"{row}.json", out / "budgets" / f"{row}.json", *(out / "runs" / row / name for name in RUN_FILES)]
        found += [path for name in (row, row + PROJECTED) for path in sorted((out / "samples" / name).glob("*.npz"))]
        folders = [path for kind in ("audits", "repair") for path in sorted((out / kind).glob(f"{row}-*"))]
        kept = (".json", ".txt", ".png", ".npz")
        found += [file for folder in folders for file in sorted(folder.iterdir()) if file.suffix in kept]
    # The samples without projection are in samples/, and texts follow from tokens.
    left_out = ("unprojected.npz", "unprojected.txt", "projected.txt")
    return [file for file in found if file.is_file() and file.name not in left_out]


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
    parser.add_argument("--entry", default="methods", choices=text.BUDGETED, help="the table (%(default)s)")
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
    words = sys.argv[1:] if arguments is None else arguments
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.text = words[end + 1 :]
    options.rows = options.rows.split(",")
    known = text.ENTRIES[options.entry].rows
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
        try:
            if options.seconds > 0:
                with Deadline(options.seconds - MARGIN):
                    code = 0 if work(options, started, imports) else 1
                print(f"finished: {', '.join(options.rows)}, after {time.monotonic() - started:.0f} s")
        except (OutOfTime, SystemExit) as error:
            if isinstance(error, SystemExit) and error.code != 128 + signal.SIGTERM:
                raise
            print(f"not finished after {time.monotonic() - started:.0f} s: the same command continues", flush=True)
        if options.bundle:
            bundle(options.out, options.rows, options.bundle)
        return code
    except UserError as error:
        print(f"text_job.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
