"""`m2s figure NAME`: draw one of the paper's figures from computed numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from m2s.report import Refused


def toy(out: Path, seed: int | None) -> None:
    """Figure 1: scores of three tokens, with and without a posterior behind them."""
    from m2s.report.toy import write_toy

    write_toy(out, seed)


FIGURES: dict[str, Callable[[Path, int | None], None]] = {"toy": toy}


@dataclass(frozen=True)
class Figure:
    """Draw a figure of the paper, and write its numbers beside it as JSON.

    Figures: toy (Figure 1: scores of three tokens, with and without a posterior behind them).

    Example: m2s figure toy --out toy.png
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """Which figure: toy."""
    out: Path
    """The picture to write: .png, .pdf or .svg. The numbers go beside it, ending in .json."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Draw the data at random from this seed; without it, the example of the documentation."""

    def run(self) -> None:
        if self.name not in FIGURES:
            raise Refused(f"there is no figure {self.name!r}: choose from {', '.join(FIGURES)}")
        FIGURES[self.name](self.out, self.seed)
        print(f"{self.out} and {self.out.with_suffix('.json')} written")
