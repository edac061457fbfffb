"""`m2s figure NAME`: draw one of the paper's figures. One function and one line for each figure."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m2s.cli.help_text import help_from_source
from m2s.errors import UserError, print_escaped, suggest
from m2s.io import atomic_write, output_file, require_absent

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

    from m2s.report.traces import Grid

SUFFIXES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
@help_from_source
class Figure:
    """Draw a figure of the paper.

    toy: scores of three tokens, with and without a posterior. It computes its own numbers and writes them beside the picture
    as .json.

    audit: from one audit.json its four panels. From several, or with folders of runs, the paper's figure: which scores have a
    posterior, where the sampler's weights are negative, and the losses of the runs, one panel per data set.

    genppl: generative perplexity against steps, from results of m2s evaluate genppl. frontier: the same against entropy, one
    curve for each model with several temperatures. losses: training curves of runs. samples: grids of images side by side, from
    .npz files and splits of data sets such as mnist:test. film: how samples of a run become images, with all steps in a .gif
    or .html.

    Example: m2s figure toy --out toy.png

    Example: m2s figure audit --source runs/sedd/audit/audit.json runs/m2s runs/sedd --out audit.pdf

    Example: m2s figure film --source runs/digits --out film.gif

    Example: m2s figure samples --source mnist:test runs/m2s/samples.npz runs/sedd/samples.npz --out grids.png
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """The figure: toy, audit, genppl, frontier, losses, samples or film."""
    out: Path
    """The picture to write: .png, .pdf or .svg; for film also .gif (an animation) or .html (a page with a slider)."""
    source: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE|RUN ...")] = ()
    """The files, runs or data sets to draw, as described above. toy takes none."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """toy: draw the data distribution at random from this seed; by default the example of the documentation. film: seed of the
    samples; by default 0."""
    overwrite: bool = False
    """Replace a figure that is there already."""

    def run(self) -> None:
        """Draw the figure.

        Raises:
            UserError: There is no such figure.
        """
        if self.name not in FIGURES:
            raise UserError(f"there is no figure {self.name!r}: {suggest(self.name, list(FIGURES))}")
        files = [self.out, *([self.out.with_suffix(".json")] if self.name == "toy" and self.out.suffix else [])]
        require_absent([path for path in files if path.is_file()], self.overwrite)
        print_escaped(f"{FIGURES[self.name](self)} written")

    def sources(self, what: str, most: int | None = None) -> list[Path]:
        """Return what to draw.

        Args:
            what: What the figure is drawn from, for the error message.
            most: The largest number of sources; None is any number.

        Raises:
            UserError: There is no source, or there are too many.
        """
        if not self.source or (most is not None and len(self.source) > most):
            raise UserError(f"the figure {self.name} is drawn from {what}: give --source")
        return [Path(name) for name in self.source]

    def check_no_seed(self) -> None:
        """Raise UserError where a seed was given, which most figures do not use.

        Raises:
            UserError: There is a seed.
        """
        if self.seed is not None:
            raise UserError(f"the figure {self.name} uses no random numbers: leave out --seed")

    def save(self, figure: "MatplotlibFigure") -> str:
        """Write a figure to --out.

        Args:
            figure: The figure.

        Returns:
            The name of the file.
        """
        with atomic_write(output_file(self.out, SUFFIXES)) as temporary:
            figure.savefig(temporary, dpi=200)
        return str(self.out)


def _toy(command: Figure) -> str:
    """Scores of three tokens, with and without a posterior."""
    from m2s.report.toy import write_toy

    if command.source:
        raise UserError("the figure toy computes its own numbers: leave out --source")
    write_toy(command.out, command.seed)
    return f"{command.out} and {command.out.with_suffix('.json')}"


def _audit(command: Figure) -> str:
    """The panels of audits, with the losses of runs."""
    from m2s.report.audit import plot_audit, read_audit
    from m2s.report.read_run import read_runs
    from m2s.report.traces import plot_audits_and_losses

    command.check_no_seed()
    sources = command.sources("the audit.json that m2s audit writes, one or several, and folders of runs")
    folders = [path for path in sources if path.is_dir()]
    audits = {path: read_audit(path) for path in sources if path not in folders}
    if not audits:
        raise UserError("the figure audit is drawn from the audit.json that m2s audit writes: give one before the runs")
    if len(audits) == 1 and not folders:
        return command.save(plot_audit(*audits.values()))
    return command.save(plot_audits_and_losses(audits, read_runs(folders) if folders else []))


def _genppl(command: Figure) -> str:
    """Generative perplexity against the number of steps."""
    from m2s.report.traces import plot_perplexity_over_steps

    command.check_no_seed()
    return command.save(plot_perplexity_over_steps(_perplexities(command)))


def _frontier(command: Figure) -> str:
    """Generative perplexity against entropy."""
    from m2s.evaluation.genppl import plot_frontier

    command.check_no_seed()
    return command.save(plot_frontier(_perplexities(command)))


def _perplexities(command: Figure) -> list[dict[str, Any]]:
    """The results of m2s evaluate genppl in all sources."""
    from m2s.report.read_run import read_json

    results: list[dict[str, Any]] = []
    for source in command.sources("results of m2s evaluate genppl (.json)"):
        try:
            results += read_json(source)["results"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{source} is no result of m2s evaluate genppl ({type(error).__name__}: {error})") from error
    return results


def _losses(command: Figure) -> str:
    """Training curves of runs."""
    from m2s.report.read_run import read_runs
    from m2s.report.traces import plot_losses

    command.check_no_seed()
    return command.save(plot_losses(read_runs(command.sources("folders of runs"))))


def _samples(command: Figure) -> str:
    """Grids of images side by side."""
    from m2s.report.traces import plot_sample_grids

    command.check_no_seed()
    command.sources(".npz files of m2s sample, and splits of data sets such as mnist:test")
    return command.save(plot_sample_grids([grid(name) for name in command.source]))


def grid(name: str) -> "Grid":
    """Return the first images of a file of samples, or of a split of a data set.

    Args:
        name: An .npz of m2s sample, or a split such as mnist:test.

    Returns:
        The images, with a title.

    Raises:
        UserError: There are no images of that name.
    """
    import math

    import torch

    from m2s.cli.evaluate.images import ImageTokens, is_split, load_split, read_settings, read_tokens
    from m2s.report.traces import Grid

    if is_split(name):
        found = load_split(name)
    else:
        path = Path(name)
        data = (read_settings(name) if path.is_file() and path.suffix == ".npz" else {}) or {}
        data = data.get("data") or {"kind": "unknown"}
        if data["kind"] != "image":
            raise UserError(
                f"{name} holds no images that m2s sample drew: give an .npz of images, or a split such as mnist:test"
            )
        shape = tuple(data["shape"])
        like = ImageTokens(name, torch.zeros(0, math.prod(shape)), shape, data["levels"])
        found = ImageTokens(path.parent.name or path.stem, read_tokens(path, like), shape, data["levels"])
    return Grid(found.name, found.tokens[:GRID_IMAGES].long(), found.shape, found.levels)


def _film(command: Figure) -> str:
    """How samples of a run become images."""
    from m2s.cli.sampling_args import load_checkpoint
    from m2s.report.film_strip import write_film

    (source,) = command.sources("a run or checkpoint of images", most=1)
    checkpoint = load_checkpoint(str(source))
    data = checkpoint.data or {}
    if data.get("kind") != "image":
        raise UserError(f"{source} is not a model of images, and the figure film shows images")
    write_film(command.out, checkpoint.model, checkpoint.head, tuple(data["shape"]), data["levels"], seed=command.seed or 0)
    return str(command.out)


GRID_IMAGES = 36
FIGURES: dict[str, Callable[[Figure], str]] = {
    "toy": _toy,
    "audit": _audit,
    "genppl": _genppl,
    "frontier": _frontier,
    "losses": _losses,
    "samples": _samples,
    "film": _film,
}
