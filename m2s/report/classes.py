"""How many scores have a posterior behind them: the paper's four classes, before and after projection.

For each vector a leave-one-out law is drawn, a clean token from it, and a noisy one from that. A free score is the exact one
times independent log-normal noise, coordinate by coordinate, as a SEDD head gives that is not yet, or not perfectly,
trained. The scores of a posterior head come from random logits.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

import m2s
from m2s.process.base import draw
from m2s.report import Refused, target, write_json

SPREADS = (0.01, 0.1, 1.0)  # standard deviations of the noise on a free log-score
VOCABULARIES = (3, 32, 256)
TIMES = (0.1, 0.5, 0.9)
STEP = 1 / 128  # of the analytic sampler
ENTRIES = 1 << 15  # scores in a row: 2048 vectors at most, fewer for a large vocabulary


@dataclass(frozen=True)
class Counts:
    """What `m2s.diagnose` says of the vectors of one row."""

    outside: int  # vectors outside the coordinate box
    material: int  # in the box, with a signed posterior below -1e-6
    boundary: int  # between -1e-6 and 0: rounding
    realizable: int
    coordinates: float  # share of the single scores outside [rho, 1/rho], no tolerance
    negative_mass: float  # of the analytic sampler's weights for a step of 1/128, mean over vectors; the weights sum to one


@dataclass(frozen=True)
class Row:
    """One source of scores at one vocabulary and time."""

    source: str
    vocab: int
    time: float
    vectors: int
    before: Counts
    after: Counts  # of the scores of the projected posteriors


def settings() -> list[tuple[float | None, int, float]]:
    """(spread, vocabulary, time) of every row; no spread stands for the posterior head."""
    return [(spread, vocab, time) for spread in (*SPREADS, None) for vocab in VOCABULARIES for time in TIMES]


def random_classes(seed: int = 0) -> Iterator[Row]:
    """The rows, one at a time. The same seed gives the same rows, each from a stream of its own."""
    if seed < 0:
        raise Refused(f"the seed is {seed}, but it must not be negative")
    for index, (spread, vocab, time) in enumerate(settings()):
        generator = torch.Generator().manual_seed(1_000_003 * seed + index)
        yield _row(spread, vocab, time, generator)


def _row(spread: float | None, vocab: int, time: float, generator: torch.Generator) -> Row:
    process = m2s.Uniform(vocab, m2s.Linear())
    vectors = min(2048, ENTRIES // vocab)
    t = torch.full((vectors,), time, dtype=torch.float64)

    def normal() -> Float[Tensor, "N K"]:
        return torch.randn(vectors, vocab, dtype=torch.float64, generator=generator)

    leave_one_out = torch.softmax(2 * normal(), -1)
    x_t = process.corrupt(draw(leave_one_out, generator), t, generator)
    if spread is None:
        source = "posterior head"
        score = m2s.Posterior(process).log_score(2 * normal(), x_t, t).exp()
    else:
        source = f"free, spread {spread:g}"
        score = m2s.score_from_leave_one_out(leave_one_out, x_t, t, process) * torch.exp(spread * normal())
    repaired = m2s.score_from_posterior(m2s.project(score, x_t, t, process), x_t, t, process)
    return Row(source, vocab, time, vectors, count(score, x_t, t, process), count(repaired, x_t, t, process))


def count(score: Float[Tensor, "N K"], x_t: Int[Tensor, "N"], t: Float[Tensor, "N"], process: m2s.Uniform) -> Counts:
    """`m2s.diagnose`, counted."""
    diagnosis = m2s.diagnose(score, x_t, t, process, s=t - STEP)
    outside, material, boundary, realizable = torch.bincount(diagnosis.classes, minlength=4).tolist()
    coordinates = float(diagnosis.outside.double().mean()) / (process.vocab - 1)
    return Counts(outside, material, boundary, realizable, coordinates, float(diagnosis.negative_mass.mean()))


def table(rows: list[Row]) -> str:
    """Aligned columns: percentages of vectors, of single scores (`coords`), and the mean negative mass of a sampler step.

    After projection one column serves: the vectors still outside or material. The file that `save` writes has all of them.
    """
    width = max(len(row.source) for row in rows)
    names = ("outside", "material", "boundary", "realizable", "coords", "mass < 0")
    header = f"{'scores':{width}}    K     t | " + " ".join(f"{name:>10}" for name in names) + " | unrealizable   mass < 0"
    groups = f"{'':{width}}            | {'before projection':65} | after projection"
    lines = [groups, header]
    previous = None
    for row in rows:
        if row.source != previous:
            lines.append("-" * len(header))
        previous = row.source
        parts = (row.before.outside, row.before.material, row.before.boundary, row.before.realizable)
        before = " ".join(f"{part / row.vectors:>10.1%}" for part in parts)
        left = (row.after.outside + row.after.material) / row.vectors
        lines.append(
            f"{row.source:{width}} {row.vocab:>4} {row.time:>5g} | {before} {row.before.coordinates:>10.1%} "
            f"{_mass(row.before):>10} | {left:>12.1%} {_mass(row.after):>10}"
        )
    return "\n".join(lines)


def _mass(counts: Counts) -> str:
    return f"{counts.negative_mass:.1e}" if counts.negative_mass else "0"


def save(rows: list[Row], out: Path, seed: int) -> None:
    """The rows and what they were made with, as JSON."""
    target(out, (".json",))
    write_json(out, {"seed": seed, "step": STEP, "rows": [asdict(row) for row in rows]})
