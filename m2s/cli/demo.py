"""`m2s demo`: the whole library on 8 x 8 digits, as commands that one can give oneself, and a page that shows what came out."""

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from m2s.errors import UserError
from m2s.io import output_folder

PAGE, TITLE = "index.html", "m2s on 8 x 8 digits"
STORY = """Two networks learn the same digits from the same batches and the same noise. M2S says what it believes the clean
image to be; SEDD says how much likelier each change would make the noisy one. Every belief has a score, but not every score
has a belief behind it: the audit counts SEDD's scores that have none, and the repair puts the nearest one that has in their
place."""


@dataclass(frozen=True)
class Demo:
    """Train M2S and SEDD on 8 x 8 digits, sample, measure, audit and repair them: one page in under four minutes on two cores.

    Every step is a command of m2s, printed before it runs. Given again, finished training is not repeated.

    Example: m2s demo --out out/demo
    """

    out: Path = Path("out/demo")
    """The folder for both runs and the page, index.html."""
    steps: int = 600
    """Updates of each network."""
    n: int = 36
    """Samples of each."""
    seed: int = 0
    """Of all randomness."""

    def run(self) -> None:
        from m2s.cli import parse
        from m2s.report.page import write

        if self.steps < 1 or self.n < 1 or not 0 <= self.seed < 2**31:
            raise UserError(f"--steps {self.steps} and --n {self.n} must be at least 1, --seed {self.seed} in 0..{2**31 - 1}")
        output_folder(self.out)
        begin = time.monotonic()
        for what, command in self.commands():
            print(f"\n{what}\n$ m2s {shlex.join(command)}", flush=True)
            parse(command).run()
            sys.stdout.flush()
        runs = [self.out / "m2s", self.out / "sedd"]
        print(f"\nPut it all on one page.\n$ m2s report {runs[0]} {runs[1]} --out {self.out / PAGE}")
        for problem in write(runs, self.out / PAGE, TITLE, STORY):
            print(f"left out: {problem}")
        print(f"\n{time.monotonic() - begin:.0f} seconds. Open {self.out / PAGE} in a browser: everything above is on it.")

    def commands(self) -> list[tuple[str, list[str]]]:
        """What is done, and the command that does it."""
        ours, theirs, seed = str(self.out / "m2s"), str(self.out / "sedd"), ["--seed", str(self.seed)]
        training = ["--steps", str(self.steps), "--log-every", "100", "--validate-every", "0", *seed]
        drawing = ["--n", str(self.n), "--steps", "64", *seed]
        return [
            ("Train M2S: the network's output is a belief about the clean image.", train(ours, "m2s-offset", training)),
            ("Train SEDD on the same batches and noise: the output is a free score.", train(theirs, "sedd", training)),
            *[
                (
                    "Draw from both, on the same noise.",
                    ["sample", run, "--sampler", "analytic", "--overwrite", *drawing, "--out", f"{run}/samples.png"],
                )
                for run in (ours, theirs)
            ],
            *[
                ("Bound the likelihood of images that neither has seen.", ["evaluate", "bpd", run, "--out", f"{run}/bpd.json"])
                for run in (ours, theirs)
            ],
            *[
                (
                    "Audit: is there a belief behind every score that the sampler was given?",
                    ["audit", run, "--overwrite", *drawing, "--out", f"{run}/audit"],
                )
                for run in (theirs, ours)
            ],
            (
                "Repair SEDD: the nearest score that has a belief, at every step, on the same noise.",
                ["repair", theirs, "--measure", "none", "--overwrite", *drawing, "--out", f"{theirs}/repair"],
            ),
            *[
                ("Watch the digits appear.", ["figure", "film", "--source", run, "--out", f"{run}/film.png", *seed])
                for run in (ours, theirs)
            ],
        ]


def train(out: str, method: str, options: list[str]) -> list[str]:
    return ["train", "digits", "--method", method, *options, "--out", out]
