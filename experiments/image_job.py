"""Train rows of an image entry, and measure bits, samples and FID, in calls of limited time on one machine.

    python experiments/image_job.py OUT --entry cifar10-1m --rows m2s-offset-multi --seconds 1600 --bundle back
    python experiments/image_job.py OUT ...                  # the same again: continues where the last call ended
    python experiments/transfer.py join back arrived         # on another machine
    python experiments/image_job.py arrived/results --entry cifar10-1m --table

experiments/image_entries.py has the entries. For each row a call trains the network, evaluates the NELBO on all test images,
and draws 64 samples as a picture and then the sets of samples. Each is a stage: a command of m2s with one result that is not
computed again. A call ends before `--seconds`. A stage that is interrupted resumes in the next call.

A long row trains in several calls. `--reserve` ends its training earlier, so that the states of this call are measured in the
time that is left: bits and FID of each. Its folder OUT/runs/ROW goes to the next machine by experiments/transfer.py. With the
option `--final` the 50,000 samples of the final FID are drawn in sets of 5,000, by the Euler steps of the paper. The sets may
come from several machines.

Inception's weights and the data must be in $M2S_DATA, or nothing starts. With `--bundle` everything small is packed after
each stage and at the end of every call: results, logs and pictures, and the sets of the final FID (experiments/job_results.py).
Trials on a CPU: `--limit` and `--set NAME=VALUE`.
"""

import argparse
import functools
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # for the imports below, also where this file is loaded by its path
from deadline import Deadline, OutOfTime
from image_entries import ENTRIES, Entry, SampleSet
from image_table import write_table
from job_results import RUN_FILES, Packer, check_target
from job_stages import MARGIN, Clock, Stage, command_stage, run_stages
from text_entries import as_json

from m2s import data
from m2s.errors import UserError, suggest
from m2s.evaluation import inception
from m2s.io import atomic_write, output_folder
from m2s.npz import read_npz
from m2s.presets import PRESETS
from m2s.training import Config, train
from m2s.training import config as configuration
from m2s.training.export import export_state
from m2s.training.state import steps as saved_steps

PICTURES, PICTURE_STEPS = 64, 200  # the paper's grids of samples
FINAL = SampleSet(256, "euler", "cosine")
FINAL_SAMPLES = 50_000


@dataclass(frozen=True)
class Job:
    """The options of a call, and the stages that follow from them.

    Args:
        out: The folder of all results.
        entry: The entry.
        settings: Further options of `m2s train`, for a trial.
        limit: Use at most this many images, samples and sampling steps, for a trial; None: no limit.
        final: Draw the samples of the final FID.
    """

    out: Path
    entry: Entry
    settings: dict[str, Any]
    limit: int | None
    final: bool

    def run(self, row: str) -> Path:
        """Return the folder of the run of a row.

        Args:
            row: The row.
        """
        return self.out / "runs" / self.entry.run.format(row=row)

    def config(self, row: str) -> Config:
        """Return the training configuration of a row.

        Args:
            row: The row.
        """
        config = PRESETS[self.entry.preset]
        options = {**self.entry.settings, **self.entry.rows[row].options, **self.settings, "out": self.run(row)}
        for key, value in options.items():
            config = configuration.replace(config, key, value)
        return config

    def limited(self, count: int) -> int:
        """Return a number, or the limit of a trial.

        Args:
            count: The number.
        """
        return count if self.limit is None else min(count, self.limit)

    def stages(self, row: str) -> Iterator[Stage]:
        """Yield the stages of a trained row, the most important ones first.

        Args:
            row: The row.
        """
        method, run, samples = self.entry.rows[row].method, self.run(row), self.out / "samples" / row
        yield self.bits(row, run, self.out / "bpd" / f"{row}.json")
        picture = self.out / "pictures" / f"{row}.png"
        yield self.sample(run, picture, PICTURES, replace(FINAL, steps=PICTURE_STEPS, sampler="auto"))
        for chosen in self.entry.rows[row].sets:
            file = samples / f"{chosen.label(method)}.npz"
            yield self.sample(run, file, self.entry.n, chosen)
            yield self.fid(file, self.out / "fid" / row / f"{chosen.label(method)}.json")
        if self.final:
            yield from self.final_stages(row, run)

    def points(self, row: str) -> Iterator[Stage]:
        """Yield the stages of the states of a run: bits and FID after other numbers of images.

        Args:
            row: The row.
        """
        run, chosen = self.run(row), self.entry.rows[row].sets[0]
        for step in saved_steps(run / "state"):
            exported, results = self.out / "states" / f"{row}-{step}", self.out / "points" / row / str(step)
            export = functools.partial(export_state, run, step, exported)
            yield Stage(f"export of state {step}", exported / "config.json", export)
            yield self.bits(row, exported, results.with_suffix(".bpd.json"))
            file = self.out / "samples" / row / f"step-{step}.npz"
            yield self.sample(exported, file, self.entry.n, chosen)
            yield self.fid(file, results.with_suffix(".fid.json"))

    def final_stages(self, row: str, run: Path) -> Iterator[Stage]:
        """Yield the sets of the final FID, the file that joins them, and the FID.

        Args:
            row: The row.
            run: The folder of its run.
        """
        size = self.limited(self.entry.shards)
        total = FINAL_SAMPLES if self.limit is None else 2 * size
        starts = range(0, total, size)
        files = [self.out / "shards" / row / f"{start:05d}.npz" for start in starts]
        for start, file in zip(starts, files, strict=True):
            yield self.sample(run, file, size, replace(FINAL, options=("--start", str(start))))
        joined = self.out / "samples" / row / "final.npz"
        yield Stage(f"join {joined}", joined, lambda: join_samples(files, joined))
        yield self.fid(joined, self.out / "fid" / row / "final.json", protocol="cifar10-50k")

    def bits(self, row: str, checkpoint: Path, result: Path) -> Stage:
        """Return the stage of the NELBO, with the smallest time of the training run.

        Args:
            row: The row.
            checkpoint: The folder of the network.
            result: The result.
        """
        limit = [] if self.limit is None else ["--limit", str(self.limit)]
        config = self.config(row)
        words = ["evaluate", "bpd", str(checkpoint), "--data", config.data.name, "--t-min", str(config.run.t_min)]
        words += ["--passes", str(self.entry.passes), *limit]
        return command_stage([*words, "--out", str(result)], result, result)

    def sample(self, checkpoint: Path, out: Path, n: int, chosen: SampleSet) -> Stage:
        """Return the stage of a set of samples.

        Args:
            checkpoint: The folder of the network.
            out: The .npz or .png file.
            n: Number of samples.
            chosen: How they are drawn.
        """
        n, size = self.limited(n), self.limited(self.entry.micro_batch)
        words = [
            "sample",
            str(checkpoint),
            "--n",
            str(n),
            "--steps",
            str(self.limited(chosen.steps)),
            "--sampler",
            chosen.sampler,
        ]
        words += ["--grid", chosen.grid, "--micro-batch", str(size), "--batch-size", str(size), *chosen.options]
        return command_stage([*words, "--out", str(out)], out, out)

    def fid(self, samples: Path, result: Path, protocol: str = "") -> Stage:
        """Return the stage of the FID of a set of samples.

        Args:
            samples: The samples.
            result: The result.
            protocol: A protocol in place of that of the entry.
        """
        against = ["--protocol", protocol] if protocol else list(self.entry.fid)
        if self.limit is not None:
            name = PRESETS[self.entry.preset].data.name
            against = ["--against", f"{name}:test", "--limit", str(self.limit), "--few"]
        words = ["evaluate", "fid", str(samples), *against, "--no-kid", "--out", str(result)]
        return command_stage(words, result, result)


def join_samples(files: list[Path], target: Path) -> None:
    """Join sets of samples in one file.

    Args:
        files: The sets, in their order.
        target: The file to write.
    """
    parts = [read_npz(file, ("tokens", "settings", "command")) for file in files]
    output_folder(target.parent)
    with atomic_write(target) as temporary:
        first = {name: parts[0][name] for name in ("settings", "command")}  # those of the others differ in --start alone
        np.savez_compressed(temporary, tokens=np.concatenate([part["tokens"] for part in parts]), **first)


def work(options: argparse.Namespace, clock: Clock, packer: Packer) -> bool:
    """Compute everything that is missing, row by row.

    Args:
        options: Command line options.
        clock: The time of the call.
        packer: Packs the results.

    Returns:
        Whether nothing failed.
    """
    entry, failed = ENTRIES[options.entry], []
    job = Job(options.out, entry, options.settings, options.limit, options.final)
    for row in options.rows:
        if entry.trained and not (job.run(row) / "config.json").exists():
            raise UserError(f"{job.run(row)} has no network: train it first, by experiments/mnist.py with {options.out} as OUT")
        end = clock.started + clock.seconds - MARGIN
        complete = entry.trained or train_until(job.config(row), end - options.reserve)
        clock.log_end(f"row {row}, {packer()}")
        with Deadline(remaining(end)):
            if entry.points:
                failed += run_stages(job.points(row), clock, packer)
            if not complete:
                raise OutOfTime
            failed += run_stages(job.stages(row), clock, packer)
    if failed:
        print(f"failed: {'; '.join(failed)}", file=sys.stderr)
    return not failed


def remaining(end: float) -> float:
    """Return the seconds that are left.

    Args:
        end: `time.monotonic()` at the end.

    Raises:
        OutOfTime: There are none.
    """
    if (left := end - time.monotonic()) <= 0:
        raise OutOfTime
    return left


def train_until(config: Config, end: float) -> bool:
    """Train to the end, or until the time is used up. The state is saved then.

    Args:
        config: The run.
        end: `time.monotonic()` at which to stop.

    Returns:
        Whether the run is complete.
    """
    try:
        with Deadline(remaining(end)):
            train(config)
    except (OutOfTime, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code != 128 + signal.SIGTERM:
            raise
        return False
    return True


def small_files(out: Path, rows: list[str], entry: Entry) -> list[Path]:
    """Return the results of some rows without networks, states and large sets of samples.

    Args:
        out: The folder of all results.
        rows: The rows.
        entry: Their entry.
    """
    found: list[Path] = []
    for row in rows:
        run = out / "runs" / entry.run.format(row=row)
        found += [*(run / name for name in RUN_FILES), out / "bpd" / f"{row}.json", out / "pictures" / f"{row}.png"]
        found += [out / "pictures" / f"{row}.npz", *sorted((out / "fid" / row).glob("*.json"))]
        found += [*sorted((out / "points" / row).glob("*.json")), *sorted((out / "shards" / row).glob("*.npz"))]
    return [file for file in found if file.is_file()]


def check_inputs(entry: Entry) -> None:
    """Check that the data and Inception's weights are there, before the first row is trained.

    Args:
        entry: The entry.

    Raises:
        UserError: One of them is missing.
    """
    inception.load()
    data.load(PRESETS[entry.preset].data.name)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read and validate the command line.

    Args:
        arguments: Arguments in place of `sys.argv`.

    Raises:
        UserError: A value is invalid.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of all results")
    parser.add_argument("--entry", required=True, choices=ENTRIES, help="the table")
    parser.add_argument("--rows", metavar="A,B,C", help="the rows, in this order (all)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end before this many seconds; 0: only --bundle")
    parser.add_argument("--reserve", type=float, default=0.0, help="seconds of these in which nothing is trained (%(default)s)")
    parser.add_argument("--final", action="store_true", help="also the FID of 50,000 samples")
    parser.add_argument("--bundle", type=Path, metavar="FOLDER", help="pack the results of the rows into this folder")
    parser.add_argument("--limit", type=int, metavar="N", help="a trial: at most N images, samples and sampling steps")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="a trial: other options of m2s train")
    parser.add_argument("--table", action="store_true", help="write the table of the rows that are finished")
    parser.add_argument("--results", type=Path, metavar="FILE", help="the table that --table writes (OUT/ENTRY.json)")
    options = parser.parse_args(arguments)
    known = ENTRIES[options.entry].rows
    options.rows = options.rows.split(",") if options.rows else list(known)
    for name in options.rows:
        if name not in known:
            raise UserError(f"{options.entry} has no row {name!r}: {suggest(name, known)}")
    if options.final and not ENTRIES[options.entry].shards:
        raise UserError(f"--final is for cifar10-long, but the entry is {options.entry}")
    if options.limit is not None and options.limit < 2:
        raise UserError(f"--limit is {options.limit}, but a covariance needs at least 2 images")
    pairs = [(name, as_json(value)) for name, _, value in (text.partition("=") for text in options.set)]
    options.settings = {name: tuple(value) if isinstance(value, list) else value for name, value in pairs}
    if options.bundle is not None:
        check_target(options.bundle)
    options.results = options.results or options.out / f"{options.entry}.json"
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.

    Returns:
        0: the call did what it could, 1: a row failed, 2: the input is invalid.
    """
    started = time.monotonic()
    code = 0
    try:
        options = parse(arguments)
        entry = ENTRIES[options.entry]
        clock = Clock(started, options.seconds)
        packer = Packer(options.out, lambda: small_files(options.out, options.rows, entry), options.bundle)
        if options.table:
            write_table(options.out, entry, options.rows, options.results)
            return 0
        if options.seconds > 0:
            check_inputs(entry)
            try:
                code = 0 if work(options, clock, packer) else 1
                clock.log(f"finished: {', '.join(options.rows)}")
            except OutOfTime:
                clock.log("not finished: the same command continues")
        packer.finish()
        return code
    except UserError as error:
        print(f"image_job.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
