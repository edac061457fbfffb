"""The stages of a trained text row: samples, audits and repairs, and how important they are.

Level 1: samples with the sampler of the row's paper; for `sedd` the audit and the repair. Level 2: for `sedd` audits of the
paper's four trajectories, of earlier states and at all numbers of steps. Level 3: for heads of M2S the other samplers and grids
that the paper compares, and samples at lower temperatures, for the frontier of perplexity against entropy. A score has no
temperature, so there it is that of projected scores, and the row is called ROW-projected.
"""

import dataclasses
import functools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import text_leaderboard
from job_results import RUN_FILES
from job_stages import Stage, command_stage
from leaderboard import ENTRY, RESULT
from text_entries import Entry
from text_row import STATES

from m2s.io import output_folder
from m2s.training.export import export_state
from m2s.training.state import steps as saved_steps

STEPS = (16, 32, 64, 128)
TEMPERATURES = (0.7, 0.8, 0.9)
PROJECTED = "-projected"  # rows whose samples are those of projected scores
SCORES = ("sedd", "sedd-absorb", "neural-ctmc")  # methods whose heads have no posterior
DIAGNOSED = 4  # trajectories of the paper's diagnostic
FEWER = 4  # the audits of level 2 have this many times fewer samples than the main one


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
        compile_from: Networks are compiled for at least so many steps; None: never.
    """

    out: Path
    entry: Entry
    n: int
    audited: int
    steps: tuple[int, ...]
    micro_batch: int
    temperatures: tuple[float, ...] = TEMPERATURES
    compile_from: int | None = None

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
            options = [*self.sampling_options(sampling, steps), *more, "--temperature", f"{temperature:g}"]
            yield self.command("sample", run, out, out, self.n, steps, options, level=3)

    def sampling_options(self, sampling: Sampling, steps: int) -> list[str]:
        """Return the options of `m2s sample` of a sampler and grid.

        Args:
            sampling: The sampler and the grid.
            steps: The number of steps.
        """
        # The calls of an autoregressive sampler have as many shapes as tokens.
        compiled = [] if sampling.sampler == "autoregressive" else self.compiled(steps)
        return ["--sampler", sampling.sampler, "--grid", sampling.grid, "--batch-size", str(8 * self.micro_batch), *compiled]

    def compiled(self, steps: int) -> list[str]:
        """Return the option that compiles the network, where it saves more time than it takes.

        Args:
            steps: The number of sampling steps.
        """
        return [] if self.compile_from is None or steps < self.compile_from else ["--compile"]

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
            yield self.command("sample", run, out, out, self.n, steps, self.sampling_options(sampling, steps), level)

    def sedd(self, row: str, run: Path) -> Iterator[Stage]:
        """Yield audits and repairs of an unconstrained score.

        The samples without projection are the row's samples. They are those of `m2s sample` with SEDD's sampler.

        Args:
            row: The row.
            run: The folder of its run.
        """
        last = max(self.steps)
        yield self.audit(row, run, "audit", self.audited, last, level=1)
        # The paper's number of steps first. Then the fewest, where the repair changes most: both ends of the curve exist early,
        # and small numbers of steps take little time.
        for steps in (last, *sorted(set(self.steps) - {last})):
            folder = self.out / "repair" / f"{row}-{steps}"
            examined = "1" if steps == last else "0"  # an audited batch takes several times as long as another
            options = ["--measure", "none", "--audited", examined, "--batch-size", str(min(self.micro_batch, self.n))]
            options += self.compiled(steps)
            repair = self.command("repair", run, folder, folder / "repair.json", self.n, steps, options)
            yield dataclasses.replace(repair, part=folder / "unprojected.npz")
            target = self.out / "samples" / row / f"analytic-linear-{steps}.npz"
            yield Stage(f"samples of {folder}", target, lambda source=folder, target=target: copy_samples(source, target))
        yield self.audit(row, run, f"audit-{DIAGNOSED}", DIAGNOSED, last)
        states = saved_steps(run / "state")
        for step in (states[0], states[len(states) // 2 - 1]) if len(states) == STATES else ():
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


def small_files(out: Path, rows: list[str]) -> list[Path]:
    """Return the results of some rows without networks and states. Those of a repair that has not ended are among them.

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
    # Texts follow from tokens. The samples without projection are in samples/ once the repair has ended.
    left_out = ("unprojected.txt", "projected.txt")
    ended = {file.parent / "unprojected.npz" for file in found if file.name == "repair.json"}
    found = [file for file in found if file.name not in left_out and file not in ended]
    return [file for file in found if file.is_file() and not file.name.startswith(".")]  # those are not complete
