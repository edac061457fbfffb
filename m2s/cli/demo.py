"""`m2s demo`: the complete library on 8 x 8 digits, as commands that a user can repeat, and a page with the results."""

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from m2s.cli.help_text import help_from_source
from m2s.cli.parsing import parse
from m2s.errors import UserError, print_escaped
from m2s.io import output_folder

PAGE, TITLE = "index.html", "m2s on 8 x 8 digits"
STORY = """Two networks learn the same digits from the same batches and the same noise. M2S predicts the posterior of the clean
image. SEDD predicts a score: how much more likely each change would make the noisy image. Every posterior has a score, but not
every score has a posterior. The audit counts the scores of SEDD that have none. The repair replaces each by the nearest score
that has one."""


@dataclass(frozen=True)
@help_from_source
class Demo:
    """Train M2S and SEDD on 8 x 8 digits, sample, measure, audit and repair them: one page in under four minutes on two cores.

    Every step is a command of m2s, printed before it runs. The same command, given again, does not repeat finished training.

    Example: m2s demo --out out/demo
    """

    out: Path = Path("out/demo")
    """The folder for both runs and the page, index.html."""
    steps: int = 600
    """Training steps of each network."""
    n: int = 36
    """Samples of each network."""
    seed: int = 0
    """Seed of all randomness."""

    def run(self) -> None:
        """Run the commands and write the page.

        Raises:
            UserError: An option is out of range.
        """
        from m2s.report.page import write

        if self.steps < 1 or self.n < 1 or not 0 <= self.seed < 2**31:
            raise UserError(
                f"--steps is {self.steps}, --n is {self.n} and --seed is {self.seed}, but --steps and --n must be at least 1, "
                f"and --seed in 0..{2**31 - 1}"
            )
        output_folder(self.out)
        begin = time.monotonic()
        for title, command in self.commands():
            print(f"\n{title}\n$ m2s {shlex.join(command)}", flush=True)
            parse(command).run()
            sys.stdout.flush()
        runs = [self.out / "m2s", self.out / "sedd"]
        print_escaped(f"\nPut everything on one page.\n$ m2s report {runs[0]} {runs[1]} --out {self.out / PAGE}")
        for problem in write(runs, self.out / PAGE, TITLE, STORY):
            print(f"left out: {problem}")
        print_escaped(
            f"\n{time.monotonic() - begin:.0f} seconds. Open {self.out / PAGE} in a browser: it shows everything above."
        )

    def commands(self) -> list[tuple[str, list[str]]]:
        """Return each step as a title and the command that does it."""
        ours, theirs, seed = str(self.out / "m2s"), str(self.out / "sedd"), ["--seed", str(self.seed)]
        training = ["--steps", str(self.steps), "--log-every", "100", "--validate-every", "0", *seed]
        sampling = ["--n", str(self.n), "--steps", "64", *seed]
        return [
            (
                "Train M2S: the network predicts the posterior of the clean image.",
                ["train", "digits", "--method", "m2s-offset", *training, "--out", ours],
            ),
            (
                "Train SEDD on the same batches and noise: the network predicts an unconstrained score.",
                ["train", "digits", "--method", "sedd", *training, "--out", theirs],
            ),
            *[
                (
                    "Sample from both with the same noise.",
                    ["sample", run, "--sampler", "analytic", "--overwrite", *sampling, "--out", f"{run}/samples.png"],
                )
                for run in (ours, theirs)
            ],
            *[
                ("Bound the likelihood of held-out images.", ["evaluate", "bpd", run, "--out", f"{run}/bpd.json"])
                for run in (ours, theirs)
            ],
            *[
                (
                    "Audit: does every score that the sampler uses have a posterior?",
                    ["audit", run, "--overwrite", *sampling, "--out", f"{run}/audit"],
                )
                for run in (theirs, ours)
            ],
            (
                "Repair SEDD: at every step use the nearest score that has a posterior, with the same noise.",
                ["repair", theirs, "--measure", "none", "--overwrite", *sampling, "--out", f"{theirs}/repair"],
            ),
            *[
                ("Show how the digits appear.", ["figure", "film", "--source", run, "--out", f"{run}/film.png", *seed])
                for run in (ours, theirs)
            ],
        ]
