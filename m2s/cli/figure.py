"""`m2s figure NAME`: draw one of the paper's figures from computed numbers. One function and one line for each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from m2s.errors import UserError
from m2s.io import atomic_write, output_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawn

    from m2s.report.traces import Grid

SUFFIXES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class Figure:
    """Draw a figure of the paper, and write its numbers beside it as JSON where they were not given.

    toy: scores of three tokens, with and without a posterior behind them. audit: from one audit.json its four panels; from
    several, or with folders of runs, the paper's figure, that is which scores have a posterior, where the sampler's weights are
    negative, and the losses of the runs, a panel for each data set. genppl: generative perplexity against steps, from results
    of m2s evaluate genppl. losses: traces of the loss of runs. samples: grids of images side by side, from .npz files and parts
    of data sets such as mnist:test. film: how samples of a run become images.

    Example: m2s figure toy --out toy.png

    Example: m2s figure audit --source runs/sedd/audit/audit.json runs/m2s runs/sedd --out audit.pdf

    Example: m2s figure samples --source mnist:test runs/m2s/samples.npz runs/sedd/samples.npz --out grids.png
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """Which figure; see above."""
    out: Path
    """The picture to write: .png, .pdf or .svg."""
    source: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE|RUN ...")] = ()
    """What to draw; see above. toy takes none."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """toy: draw the data at random from this seed; without it, the example of the documentation. film: of the samples."""

    def run(self) -> None:
        if self.name not in FIGURES:
            from m2s.errors import suggest

            raise UserError(f"there is no figure {self.name!r}: {suggest(self.name, list(FIGURES))}")
        print(f"{FIGURES[self.name](self)} written")

    def sources(self, what: str, most: int | None = None) -> list[Path]:
        """What is to be drawn, which must be given."""
        if not self.source or (most is not None and len(self.source) > most):
            raise UserError(f"the figure {self.name} is drawn from {what}: give --source")
        return [Path(name) for name in self.source]

    def no_seed(self) -> None:
        if self.seed is not None:
            raise UserError(f"the figure {self.name} is drawn from --source alone: leave out --seed")

    def save(self, figure: "Drawn") -> str:
        with atomic_write(output_file(self.out, SUFFIXES)) as temporary:
            figure.savefig(temporary, dpi=200)
        return str(self.out)


def toy(asked: Figure) -> str:
    from m2s.report.toy import write_toy

    if asked.source:
        raise UserError("the figure toy computes its own numbers: leave out --source")
    write_toy(asked.out, asked.seed)
    return f"{asked.out} and {asked.out.with_suffix('.json')}"


def audit(asked: Figure) -> str:
    from m2s.report.audit import draw, read
    from m2s.report.read_run import read_runs
    from m2s.report.traces import audited

    asked.no_seed()
    sources = asked.sources("the audit.json that m2s audit writes, one or several, and folders of runs")
    folders = [path for path in sources if path.is_dir()]
    audits = {path: read(path) for path in sources if path not in folders}
    if not audits:
        raise UserError("the figure audit is drawn from the audit.json that m2s audit writes: give one before the runs")
    if len(audits) == 1 and not folders:
        return asked.save(draw(*audits.values()))
    return asked.save(audited(audits, read_runs(folders) if folders else []))


def genppl(asked: Figure) -> str:
    from m2s.report.read_run import read_json
    from m2s.report.traces import against_steps

    results = []
    for source in asked.sources("results of m2s evaluate genppl (.json)"):
        try:
            results += read_json(source)["results"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{source} is no result of m2s evaluate genppl ({type(error).__name__}: {error})") from error
    asked.no_seed()
    return asked.save(against_steps(results))


def losses(asked: Figure) -> str:
    from m2s.report.read_run import read_runs
    from m2s.report.traces import losses

    asked.no_seed()
    return asked.save(losses(read_runs(asked.sources("folders of runs"))))


def samples(asked: Figure) -> str:
    from m2s.report.traces import grids

    asked.no_seed()
    asked.sources(".npz files of m2s sample, and parts of data sets such as mnist:test")
    return asked.save(grids([grid(name) for name in asked.source]))


def grid(name: str) -> "Grid":
    """The first images of a file of samples, or of a part of a data set."""
    import math

    import torch

    from m2s.cli.evaluate.fid import Images, is_split, settings, split, tokens_of
    from m2s.report.traces import Grid

    if is_split(name):
        found = split(name)
    else:
        path = Path(name)
        data = (settings(name) if path.is_file() and path.suffix == ".npz" else {}) or {}
        data = data.get("data") or {"kind": "unknown"}
        if data["kind"] != "image":
            raise UserError(f"{name} holds no images that m2s sample drew: give an .npz of them, or a part such as mnist:test")
        shape = tuple(data["shape"])
        like = Images(name, torch.zeros(0, math.prod(shape)), shape, data["levels"])
        found = Images(path.parent.name or path.stem, tokens_of(path, like), shape, data["levels"])
    return Grid(found.name, found.tokens[:SHOWN].long(), found.shape, found.levels)


def film(asked: Figure) -> str:
    from m2s.hub import load
    from m2s.report.film_strip import write_film

    (source,) = asked.sources("a run or checkpoint of images", most=1)
    try:
        checkpoint = load(str(source))
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        raise UserError(str(error)) from error
    data = checkpoint.data or {}
    if data.get("kind") != "image":
        raise UserError(f"{source} does not hold a model of images, and text makes no film")
    write_film(asked.out, checkpoint.model, checkpoint.head, tuple(data["shape"]), data["levels"], seed=asked.seed or 0)
    return str(asked.out)


SHOWN = 36  # images of a grid
FIGURES: dict[str, Callable[[Figure], str]] = {
    "toy": toy,
    "audit": audit,
    "genppl": genppl,
    "losses": losses,
    "samples": samples,
    "film": film,
}
