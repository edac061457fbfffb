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

PAGE, TITLE = "index.html", "Mean-to-Score discrete diffusion on 8 x 8 digits"
STORY = """Three networks learn the same digits from the same batches and noise. M2S predicts the posterior of the clean image.
SEDD predicts a score: the ratio of the probabilities of the noisy image with and without a change of one pixel. Every
posterior has a score, but not every score has a posterior. Repair replaces each score of SEDD by the nearest one that
has a posterior. M2S is the method of the paper "Mean-to-Score Discrete Diffusion: Posterior-Mean Denoisers for Score
Entropy". M2S offset is M2S with one addition, the exact offset, which needs fewer training steps and is the default
of m2s train."""
AUDITED = 8  # sampling steps of the audit: with many steps there are few negative weights


@dataclass(frozen=True)
@help_from_source
class Demo:
    """Train M2S, M2S with the exact offset and SEDD on 8 x 8 digits, sample, compare and audit them: one page in three minutes.

    Every step is a command of m2s, printed before it runs, and the page shows it below its result. The same command, given
    again, does not repeat finished training.

    Example: m2s demo --out out/demo
    """

    out: Path = Path("out/demo")
    """The folder for the runs and the page, index.html."""
    steps: int = 600
    """Training steps of each network."""
    n: int = 512
    """Samples of each network at each number of sampling steps."""
    seed: int = 0
    """Seed of all randomness."""

    def run(self) -> None:
        """Run the commands. The last one writes the page.

        Raises:
            UserError: An option is out of range.
        """
        from m2s.provenance import recorded_command

        if self.steps < 1 or self.n < 4 or not 0 <= self.seed < 2**31:
            raise UserError(
                f"--steps is {self.steps}, --n is {self.n} and --seed is {self.seed}, but --steps must be at least 1, --n at "
                f"least 4, and --seed in 0..{2**31 - 1}"
            )
        output_folder(self.out)
        begin = time.monotonic()
        for title, command in self.commands():
            print(f"\n{title}\n$ m2s {shlex.join(command)}", flush=True)
            with recorded_command(["m2s", *command]):
                parse(command).run()
            sys.stdout.flush()
        print_escaped(
            f"\n{time.monotonic() - begin:.0f} seconds. Open {self.out / PAGE} in a browser: it shows everything above."
        )

    def commands(self) -> list[tuple[str, list[str]]]:
        """Return each step as a title and the command that does it."""
        ours, paper, theirs = (str(self.out / name) for name in ("m2s-offset", "m2s", "sedd"))
        seed = ["--seed", str(self.seed)]
        comparison, page, notes = f"{ours}/compare", str(self.out / PAGE), " ".join(STORY.split())
        compared = [theirs, paper, ours, "--against", "digits:train", "--n", str(self.n)]
        training = ["--steps", str(self.steps), "--log-every", "50", "--validate-every", "0", *seed]
        sampling = ["--sampler", "analytic", "--grid", "linear", *seed, "--overwrite"]
        return [
            (
                "Train M2S with the exact offset: the network predicts the posterior of the clean image.",
                ["train", "digits", "--method", "m2s-offset", *training, "--out", ours],
            ),
            (
                "Train M2S as in the paper, without the offset, on the same batches and noise.",
                ["train", "digits", "--method", "m2s", *training, "--out", paper],
            ),
            (
                "Train SEDD on the same batches and noise: the network predicts an unconstrained score.",
                ["train", "digits", "--method", "sedd", *training, "--out", theirs],
            ),
            (
                "Sample SEDD, SEDD with repaired scores, and both M2S on the same noise, with few and many steps.",
                ["compare", *compared, *sampling, "--out", comparison],
            ),
            (
                "Audit SEDD: does every score that the sampler uses have a posterior?",
                ["audit", theirs, "--n", str(min(self.n, 64)), "--steps", str(AUDITED), *sampling, "--out", f"{theirs}/audit"],
            ),
            (
                "Bound the likelihood of held-out images, for M2S offset and SEDD on the same noise.",
                ["evaluate", "bpd", ours, "--against", theirs, "--passes", "8", *seed, "--out", f"{ours}/bpd.json"],
            ),
            (
                "Put everything on one page.",
                ["report", ours, paper, theirs, "--title", TITLE, "--notes", notes, "--overwrite", "--out", page],
            ),
        ]
