"""Does a posterior stand behind the scores that a sampler is given? Counted at every site and step of real sampling runs.

found = m2s.audit(model, head, shape=(128, 512))
print(found)                              # the shares of the four classes
found.overall().before.classes            # outside the box, material, boundary, realizable
found.summary()                           # all of it, step by step, as JSON can hold it

The run itself is not changed: each score is looked at as the sampler gets it, and once more after projection. Nothing is kept
but sums, so that memory grows neither with the number of samples nor with that of their tokens.

Sites that nothing leads into (an unmasked site under absorbing) have no score that counts, and are left out.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from m2s import validation
from m2s.heads import Head, score_from_posterior
from m2s.io import write_json
from m2s.ops.last_layer import Output
from m2s.process import Absorbing, Chain, Process, RankOne
from m2s.realizability import diagnose, project
from m2s.realizability.quadratic import LIMIT
from m2s.samplers import Analytic, Euler, Prediction, StepEvent, sample
from m2s.samplers.options import SamplingOptions
from m2s.samplers.shards import CorruptShardError, SampleShards

CLASSES = ("outside", "material", "boundary", "realizable")
TOLERANCE = 1e-6  # on the box, relative, and on the signed posterior
ROUNDING = 1e-12  # of the mass of negative weights: less than this is float64's
ENTRIES = 1 << 23  # scores looked at together, at most
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass
class Counts:
    """Of score vectors, as they are or projected."""

    classes: list[int] = field(default_factory=lambda: [0] * len(CLASSES))
    strict: list[int] = field(default_factory=lambda: [0] * len(CLASSES))  # no tolerance on the box: the paper's count
    coordinates: int = 0  # single scores outside the box
    coordinates_strict: int = 0
    signed: int = 0  # vectors whose signed posterior mu~ has an entry below -1e-6, in the box or not
    overlap: int = 0  # those of them that are outside the box (strict)
    signed_mass: float = 0.0  # -sum of the negative entries of mu~
    signed_mass_most: float = 0.0
    negative: int = 0  # vectors with negative weights in the analytic step
    negative_mass: float = 0.0
    negative_mass_most: float = 0.0


@dataclass
class LogHistogram:
    """A histogram of real numbers d that needs no range: bin i holds d near sign(i) FINE (10^(|i|/PER_DECADE) - 1)."""

    FINE, PER_DECADE, END = 1e-6, 100, 1e12

    count: int = 0
    total: float = 0.0
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, values: Float[Tensor, "N"]) -> None:
        values = values.double().clamp(-self.END, self.END)
        index = (values.sign() * self.PER_DECADE * torch.log10(1 + values.abs() / self.FINE)).round().long()
        self.count += len(values)
        self.total += float(values.sum())
        for place, times in zip(*(part.tolist() for part in index.unique(return_counts=True)), strict=True):
            self.bins[place] = self.bins.get(place, 0) + times

    def quantile(self, share: float) -> float:
        """The least d with at least `share` of all at or below it, to a hundredth of its size."""
        seen, place = 0, 0
        for place in sorted(self.bins):
            seen += self.bins[place]
            if seen >= share * self.count:
                break
        size = self.FINE * (10 ** (abs(place) / self.PER_DECADE) - 1)
        return size if place >= 0 else -size


@dataclass
class StepStats:
    """Sums over the audited sites of one step."""

    samples: int = 0
    t: float = 0.0  # sums over samples
    s: float = 0.0
    sites: int = 0
    scores: int = 0  # single ones: the candidates y of every site that have a forward rate into its token
    before: Counts = field(default_factory=Counts)
    after: Counts = field(default_factory=Counts)
    moved: float = 0.0  # |s_projected - s| / |s|, summed
    moved_most: float = 0.0
    excess: LogHistogram = field(default_factory=LogHistogram)  # absorbing: sum(s) / c - 1, c = alpha/(1 - alpha)


Sums = TypeVar("Sums", StepStats, Counts, LogHistogram)


def merged(a: Sums, b: Sums) -> Sums:
    """The sums over what both have seen."""
    return type(a)(**{part.name: _both(part.name, getattr(a, part.name), getattr(b, part.name)) for part in fields(a)})


def _both(name: str, a: Any, b: Any) -> Any:
    if is_dataclass(a):
        return merged(a, b)
    if isinstance(a, dict):
        return {place: a.get(place, 0) + b.get(place, 0) for place in sorted({**a, **b})}
    if isinstance(a, list):
        return [x + y for x, y in zip(a, b, strict=True)]
    return max(a, b) if name.endswith("_most") else a + b


class Audit:
    """What was found, step by step. As a callback of `m2s.sample` it looks on; `merge` adds what another has seen."""

    def __init__(self, head: Head, sampler: str, steps: int) -> None:
        self.process, self.count = head.process, steps
        self.weighs = sampler == Analytic.name  # other samplers have no such weights
        self.moments: list[StepStats] = []

    def __repr__(self) -> str:
        """The shares of the classes, told apart as `m2s.classify` does."""
        found = self.overall()
        if not found.sites:
            return "Audit(nothing was counted)"
        shares = zip(found.before.classes, CLASSES, strict=True)
        return f"Audit({', '.join(f'{count / found.sites:.2%} {name}' for count, name in shares)} of {found.sites:,} scores)"

    @property
    def steps(self) -> list[StepStats]:
        """The steps that were asked for."""
        return self.moments[: self.count] if self.weighs else self.moments

    @property
    def denoiser(self) -> StepStats | None:
        """The call after the last step of the analytic sampler, which the paper does not count."""
        return self.moments[self.count] if self.weighs and len(self.moments) > self.count else None

    def overall(self) -> StepStats:
        """All steps together."""
        total = StepStats()
        for moment in self.steps:
            total = merged(total, moment)
        return total

    def merge(self, moments: list[StepStats]) -> None:
        for number, moment in enumerate(moments):
            self._at(number)
            self.moments[number] = merged(self.moments[number], moment)

    def _at(self, number: int) -> StepStats:
        while len(self.moments) <= number:
            self.moments.append(StepStats())
        return self.moments[number]

    def __call__(self, step: StepEvent) -> None:
        moment, prediction = self._at(step.number), step.prediction
        t = prediction.t.expand(len(step.x_t))
        moment.samples += len(step.x_t)
        moment.t += float(t.sum())
        moment.s += float(torch.minimum(step.s.to(t), t).sum())
        within = validation.align("t", (t > 0) & (t < 1), step.x_t)  # t = 1 has no classes
        counted = within & self._reached(prediction) & (True if prediction.free is None else prediction.free)
        if not bool(counted.any()):
            return
        s = validation.align("s", torch.minimum(step.s.to(t), t), step.x_t).expand(step.x_t.shape)
        if isinstance(self.process, RankOne):
            for at in counted.reshape(-1).nonzero().squeeze(-1).split(max(1, ENTRIES // self.process.states)):
                self._add(moment, _Found(*prediction[at].map(self._examine, s.reshape(-1)[at])))
        else:
            self._add(moment, _Found(*(value[counted] for value in prediction.map(self._examine, s))))

    def _reached(self, prediction: Prediction) -> Bool[Tensor, "B L"]:
        """Where some candidate has a forward rate into the current token."""
        if isinstance(self.process, RankOne):
            return ~prediction.known()
        return (self.process.rates_into(prediction.x_t, prediction.t) > 0).any(-1)

    def _examine(self, part: Prediction, s: Float[Tensor, "*site"]) -> tuple[Tensor, ...]:
        """Everything about the score vectors of some sites, before and after projection, in float64."""
        score, x_t, process = part.score(), part.x_t, part.process
        t = validation.align("t", part.t, x_t).expand(x_t.shape)
        finite = torch.where(score.isfinite(), score, 1.0)  # what is not counts as outside the box
        nearest = score_from_posterior(project(finite, x_t, t, process), x_t, t, process)
        counted = process.rates_into(x_t, t) > 0
        gap, size = (torch.linalg.vector_norm(value.where(counted, 0), dim=-1) for value in (nearest - finite, finite))
        excess = torch.zeros_like(size)
        if isinstance(process, Absorbing):
            site = process.at(x_t, t)
            excess = finite[..., : process.vocab].sum(-1) * site.own / site.alpha - 1
        looks = (value for one in (score, nearest) for value in self._look(one, x_t, t, s))
        return (*looks, gap / size.clamp(min=1e-300), excess, counted.sum(-1))

    def _look(self, score: Tensor, x_t: Tensor, t: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        diagnosis = diagnose(score, x_t, t, self.process, s if self.weighs else None, TOLERANCE, TOLERANCE)
        return (
            diagnosis.classes,
            diagnosis.strict,
            diagnosis.beyond,
            diagnosis.outside,
            diagnosis.lowest,
            diagnosis.signed_mass,
            diagnosis.negative_mass,
        )

    def _add(self, moment: StepStats, found: "_Found") -> None:
        for counts, (classes, strict, coordinates, coordinates_strict, lowest, below, negative) in (
            (moment.before, found.before),
            (moment.after, found.after),
        ):
            for kept, values in ((counts.classes, classes), (counts.strict, strict)):
                kept[:] = [a + b for a, b in zip(kept, values.bincount(minlength=len(CLASSES)).tolist(), strict=True)]
            counts.coordinates += int(coordinates.sum())
            counts.coordinates_strict += int(coordinates_strict.sum())
            counts.signed += int((lowest < -TOLERANCE).sum())
            counts.overlap += int(((lowest < -TOLERANCE) & (coordinates_strict > 0)).sum())
            counts.signed_mass += float(below.sum())
            counts.signed_mass_most = max(counts.signed_mass_most, float(below.max()))
            negative = negative.where(negative > ROUNDING, 0)
            counts.negative += int((negative > 0).sum())
            counts.negative_mass += float(negative.sum())
            counts.negative_mass_most = max(counts.negative_mass_most, float(negative.max()))
        moment.sites += found.moved.numel()
        moment.scores += int(found.scores.sum())
        moment.moved += float(found.moved.sum())
        moment.moved_most = max(moment.moved_most, float(found.moved.max()))
        if isinstance(self.process, Absorbing):
            moment.excess.add(found.excess)

    def summary(self) -> dict[str, Any]:
        """Counts and means, overall and step by step, as JSON can hold them."""
        denoiser = self.denoiser
        return {
            "tolerances": {"box": TOLERANCE, "posterior": TOLERANCE, "negative mass": ROUNDING},
            "overall": self._plain(self.overall(), timed=False),
            "steps": [self._plain(moment) for moment in self.steps],
            "denoiser": None if denoiser is None else self._plain(denoiser),
        }

    def _plain(self, moment: StepStats, timed: bool = True) -> dict[str, Any]:
        sites, samples = max(1, moment.sites), max(1, moment.samples)
        distribution = moment.excess
        return {
            **({"t": moment.t / samples, "s": moment.s / samples} if timed else {}),
            "position_steps": moment.sites,
            "coordinates": moment.scores,
            "before": self._plain_counts(moment.before, sites),
            "after": self._plain_counts(moment.after, sites),
            "moved": {"mean": moment.moved / sites, "most": moment.moved_most},
            "excess": {
                "mean": distribution.total / distribution.count,
                "quantiles": {f"{q:g}": distribution.quantile(q) for q in QUANTILES},
            }
            if distribution.count
            else None,
        }

    def _plain_counts(self, counts: Counts, sites: int) -> dict[str, Any]:
        weights = {"mean": counts.negative_mass / sites, "most": counts.negative_mass_most}
        return {
            "classes": dict(zip(CLASSES, counts.classes, strict=True)),
            "strict": dict(zip(CLASSES, counts.strict, strict=True)),
            "coordinates_outside": counts.coordinates,
            "coordinates_outside_strict": counts.coordinates_strict,
            "signed": counts.signed,
            "overlap": counts.overlap,
            "signed_mass": {"mean": counts.signed_mass / sites, "most": counts.signed_mass_most},
            "negative_weights": counts.negative if self.weighs else None,
            "negative_mass": weights if self.weighs else None,
        }


class _Found:
    """What `Audit._examine` says of each site."""

    def __init__(self, *values: Tensor) -> None:
        *looks, self.moved, self.excess, self.scores = values
        self.before, self.after = looks[: len(looks) // 2], looks[len(looks) // 2 :]


def restored(moments: list[dict[str, Any]]) -> list[StepStats]:
    """Moments from what `dataclasses.asdict` and JSON made of them."""
    return [
        StepStats(
            **{
                **moment,
                "before": Counts(**moment["before"]),
                "after": Counts(**moment["after"]),
                "excess": LogHistogram(
                    **{**moment["excess"], "bins": {int(i): n for i, n in moment["excess"]["bins"].items()}}
                ),
            }
        )
        for moment in moments
    ]


def check_auditable(head: Head) -> None:
    """Raise TypeError, with the reason, where there is nothing to audit."""
    validation.instance("head", head, Head, "a head such as m2s.LogScore(process)")
    process = head.process
    if head.exact:
        raise TypeError(
            f"{head} corrupts nothing, so that there are no scores to audit: give a model of another kind, such as sedd's"
        )
    if isinstance(process, Chain):
        raise TypeError(
            f"{head} speaks of a finite chain, which has no rates and so no scores to audit: "
            "train a score over m2s.Uniform, m2s.Absorbing, m2s.Hybrid or m2s.RateMatrix"
        )
    if not isinstance(process, RankOne) and process.states > LIMIT:
        raise TypeError(
            f"{process} has {process.states} states, but scores of tabulated processes are projected up to {LIMIT}: "
            "audit a rank-one process (m2s.Uniform, m2s.Absorbing, m2s.Hybrid)"
        )


def default_audit_sampler(process: Process) -> str:
    """The name of the sampler that is watched if nobody says which: SEDD's own step, or Euler's where rates are tabulated."""
    return Analytic.name if isinstance(process, RankOne) else Euler.name


def watched(
    model: Callable[..., Output], options: SamplingOptions, callback: Callable[[StepEvent], None] | None = None
) -> tuple[Int[Tensor, "n L"], Audit]:
    """The samples that were asked for, and what was found on their way. A network that answers NaN is an error."""
    found = Audit(options.head, options.chosen.name, options.steps)

    def look(step: StepEvent) -> None:
        found(step)
        if callback is not None:
            callback(step)

    with validation.checked():
        asked = {part.name: getattr(options, part.name) for part in fields(options)}
        return sample(model, callback=look, **asked), found


def audit(
    model: Callable[..., Output],
    head: Head,
    shape: tuple[int, int],
    steps: int = 128,
    sampler: str = "auto",
    grid: str = "linear",
    seed: int = 0,
    batch_size: int = 64,
) -> Audit:
    """Draw `shape[0]` samples of `shape[1]` tokens, as `m2s.sample` would, and audit every score on their way.

    It prints as the shares of the four classes; `summary()` is all that was counted, overall, step by step, and once more
    after projection. The sampler "auto" is analytic, as in SEDD's release, or euler where rates are tabulated. The network is
    called as it is: `model.eval()` before, where it has dropout.
    """
    check_auditable(head)
    sampler = default_audit_sampler(head.process) if sampler == "auto" else sampler
    options = SamplingOptions(head, shape, steps, sampler, grid, seed, batch_size=batch_size)
    total = Audit(head, options.chosen.name, steps)
    for first in range(0, shape[0], batch_size):
        batch = replace(options, shape=(min(batch_size, shape[0] - first), shape[1]), start=first)
        total.merge(watched(model, batch)[1].moments)
    return total


def audit_parts(
    model: Callable[..., Output],
    options: SamplingOptions,
    parts: SampleShards,
    callback: Callable[[StepEvent], None] | None = None,
) -> Audit:
    """The same over samples that are kept on disk: what is there already is not drawn again. `parts` keeps the tokens, and a
    file beside each part what was found on the way."""
    check_auditable(options.head)
    for first, count in parts.missing():
        batch = replace(options, shape=(count, options.shape[1]), start=options.start + first)
        tokens, found = watched(model, batch, callback)
        write_json(_beside(parts, first), [asdict(moment) for moment in found.moments])
        parts.put(first, tokens)
    total = Audit(options.head, options.chosen.name, options.steps)
    for first in parts.firsts():
        path = _beside(parts, first)
        try:
            total.merge(restored(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptShardError(
                f"{path} is damaged ({error}): delete {parts.folder} and run the same command again"
            ) from None
    return total


def _beside(parts: SampleShards, first: int) -> Path:
    return parts.folder / f"{first:09d}.json"
