"""`m2s report RUN ...`: one HTML page about runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from m2s.cli.help_text import help_from_source
from m2s.errors import print_escaped
from m2s.io import require_absent


@dataclass(frozen=True)
@help_from_source
class Report:
    """Write one HTML page about runs: curves, samples, tables, audits, and the commands and versions that made them. The page
    opens from the disk, without a network.

    The page shows the log of m2s train, and every result in the folder of a run or one folder below. Results are recognized
    by their content. Commands that write results there:

    m2s evaluate bpd RUN --out RUN/bpd.json, m2s evaluate fid|genppl SAMPLES --out RUN/fid.json, m2s sample RUN --out
    RUN/samples.png, m2s audit RUN --out RUN/audit, m2s repair RUN --out RUN/repair.

    The page omits results that a run does not have. The command prints the files that it cannot read. The same files give the
    same page.

    Example: m2s report runs/m2s runs/sedd --out report.html
    """

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN")]
    """Folders of m2s train."""
    out: Path
    """The page to write, .html."""
    title: str = "Runs of discrete diffusion"
    """Title of the page."""
    notes: str = ""
    """Your text for the start of the page. An empty line ends a paragraph."""
    overwrite: bool = False
    """Replace an existing page."""

    def run(self) -> None:
        """Write the page, and print what was left out."""
        from m2s.report.page import write

        require_absent([self.out] if self.out.is_file() else [], self.overwrite)
        problems = write(self.runs, self.out, self.title, self.notes)
        print_escaped("\n".join([*(f"left out: {problem}" for problem in problems), f"{self.out} written"]))
