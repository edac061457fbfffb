"""m2s report: one page about runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from m2s.io import require_absent


@dataclass(frozen=True)
class Report:
    """Put all that is known about runs on one HTML page that opens from the disk, with no network: curves, samples, tables,
    audits, and the commands and versions that made them.

    Beside what m2s train leaves in its folder, results are found there, or one folder below, by what they hold:

    m2s evaluate bpd RUN --out RUN/bpd.json, m2s evaluate fid|genppl SAMPLES --out RUN/fid.json, m2s sample RUN --out
    RUN/samples.png, m2s audit RUN --out RUN/audit, m2s repair RUN --out RUN/repair.

    What a run does not have is left out; what cannot be read is named. The same files give the same page.

    Example: m2s report runs/m2s runs/sedd --out report.html
    """

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN")]
    """Folders that m2s train made."""
    out: Path
    """The page to write: .html."""
    title: str = "Runs of discrete diffusion"
    """Of the page."""
    notes: str = ""
    """Words of your own for the opening; an empty line ends a paragraph."""
    overwrite: bool = False
    """Replace a page that is there."""

    def run(self) -> None:
        from m2s.report.page import write

        require_absent([self.out] if self.out.is_file() else [], self.overwrite)
        problems = write(self.runs, self.out, self.title, self.notes)
        print("\n".join([*(f"left out: {problem}" for problem in problems), f"{self.out} written"]))
