"""`m2s evaluate bpd | fid | genppl`: measure a model or its samples. One file per measure, one line per measure below."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from m2s.cli.evaluate.bpd import Bpd
from m2s.cli.evaluate.fid import Fid
from m2s.cli.evaluate.genppl import GenPPL


@tyro.conf.configure(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
@dataclass(frozen=True)
class Evaluate:
    """Measure a model on held-out data (bpd; of text its perplexity too), or its samples: images (fid) or text (genppl).

    Every measure prints its errors, and writes all that it depends on with --out result.json.

    Example: m2s evaluate bpd runs/digits
    """

    measure: (
        Annotated[Bpd, tyro.conf.subcommand("bpd")]
        | Annotated[Fid, tyro.conf.subcommand("fid")]
        | Annotated[GenPPL, tyro.conf.subcommand("genppl")]
    )

    def run(self) -> None:
        self.measure.run()
