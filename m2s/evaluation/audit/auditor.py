"""`Audit`: a callback of `m2s.sample` that examines every score and counts its class."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from m2s import validation
from m2s.evaluation.audit.stats import Counts, StepStats, merge_stats
from m2s.heads import Head, score_from_posterior
from m2s.realizability import SCORE_CLASSES, Diagnosis, diagnose, project
from m2s.realizability.classes import diagnose_projected
from m2s.samplers import Analytic, Prediction, StepEvent

TOLERANCE = 1e-6  # on the box, relative, and on the signed posterior
ROUNDING = 1e-12  # a smaller mass of negative weights is the rounding error of float64
MAX_SCORES = {"cpu": 1 << 23, "cuda": 1 << 26}  # the greatest number of scores that are examined at once
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


class _ScoreFindings(NamedTuple):
    """What `m2s.realizability.diagnose` finds at each site."""

    classes: Tensor
    strict: Tensor
    coordinates: Tensor  # single scores outside the box
    coordinates_strict: Tensor
    lowest: Tensor  # the least entry of the signed posterior
    signed_mass: Tensor
    negative_mass: Tensor

    @classmethod
    def of(cls, diagnosis: Diagnosis) -> "_ScoreFindings":
        """The fields of a diagnosis that are counted."""
        return cls(
            diagnosis.classes,
            diagnosis.strict,
            diagnosis.beyond,
            diagnosis.outside,
            diagnosis.lowest,
            diagnosis.signed_mass,
            diagnosis.negative_mass,
        )


class _SiteFindings:
    """What `Audit._examine` returns for each site: the scores as they are, the projected ones, and their distance."""

    def __init__(self, *values: Tensor) -> None:
        fields = len(_ScoreFindings._fields)
        self.before, self.after = _ScoreFindings(*values[:fields]), _ScoreFindings(*values[fields : 2 * fields])
        self.moved, self.excess, self.scores = values[2 * fields :]


class Audit:
    """The counts of an audit, step by step. As a callback of `m2s.sample` it examines every score.

    Args:
        head: The head of the network that is sampled.
        sampler: The name of the sampler. Only the analytic sampler has weights that can be negative.
        steps: The number of sampling steps.
        seed: The seed of the samples, where it is known.

    Attributes:
        seed: The seed of the samples; None where it is not known.
    """

    def __init__(self, head: Head, sampler: str, steps: int, seed: int | None = None) -> None:
        self.process, self.count, self.seed = head.process, steps, seed
        self.has_weights = sampler == Analytic.name
        self.calls: list[StepStats] = []

    def __repr__(self) -> str:
        """Print the fractions of the four classes of `m2s.classify`."""
        found = self.overall()
        if not found.sites:
            return "Audit(nothing was counted)"
        fractions = zip(found.before.classes, SCORE_CLASSES, strict=True)
        parts = ", ".join(f"{count / found.sites:.2%} {name}" for count, name in fractions)
        return f"Audit({parts} of {found.sites:,} scores)"

    def _repr_html_(self) -> str:
        """The counts of the four classes before and after projection, as a notebook shows them."""
        found = self.overall()
        if not found.sites:
            return "<p>Audit: nothing was counted</p>"
        rows = []
        for name, before, after in zip(SCORE_CLASSES, found.before.classes, found.after.classes, strict=True):
            shares = "".join(f"<td>{count:,}</td><td>{count / found.sites:.2%}</td>" for count in (before, after))
            rows.append(f"<tr><td>{name}</td>{shares}</tr>")
        head = "<tr><th>class</th><th>scores</th><th></th><th>projected</th><th></th></tr>"
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"<p>Audit of {found.sites:,} scores in {len(self.steps)} steps{seed}</p><table>{head}{''.join(rows)}</table>"

    @property
    def steps(self) -> list[StepStats]:
        """The counts of each sampling step."""
        return self.calls[: self.count] if self.has_weights else self.calls

    @property
    def denoiser(self) -> StepStats | None:
        """The counts of the network call after the last step of the analytic sampler. The paper does not include it."""
        return self.calls[self.count] if self.has_weights and len(self.calls) > self.count else None

    def overall(self) -> StepStats:
        """Return the sum of the counts over all steps."""
        total = StepStats()
        for step in self.steps:
            total = merge_stats(total, step)
        return total

    def averages(self) -> dict[str, dict[str, float | None]]:
        """Return rates averaged over the steps, before and after projection: the paper's diagnostic of four trajectories.

        Every step counts alike, also where masking leaves few positions to audit. Steps without any are left out.

        Returns:
            For "before" and "after": the rate of single scores outside the box without a tolerance, "coordinates_outside", and
            of positions with a negative weight, "negative_weights" (None where the sampler has no weights).
        """
        steps = [step for step in self.steps if step.sites]
        found: dict[str, dict[str, float | None]] = {}
        for name in ("before", "after"):
            counts: list[Counts] = [getattr(step, name) for step in steps]
            outside = [one.coordinates_strict / step.scores for one, step in zip(counts, steps, strict=True)]
            negative = [one.negative / step.sites for one, step in zip(counts, steps, strict=True)]
            found[name] = {
                "coordinates_outside": _mean(outside),
                "negative_weights": _mean(negative) if self.has_weights else None,
            }
        return found

    def merge(self, calls: list[StepStats]) -> None:
        """Add the counts of another audit, call by call.

        Args:
            calls: The counts of each network call of the other audit, its `calls`.
        """
        for number, stats in enumerate(calls):
            self._stats(number)
            self.calls[number] = merge_stats(self.calls[number], stats)

    def _stats(self, number: int) -> StepStats:
        """Return the counts of call `number`, which start at 0."""
        while len(self.calls) <= number:
            self.calls.append(StepStats())
        return self.calls[number]

    def __call__(self, step: StepEvent) -> None:
        """Examine the scores of one step.

        Args:
            step: The step, as `m2s.sample` passes it to a callback.
        """
        stats, prediction = self._stats(step.number), step.prediction
        t = prediction.t.expand(len(step.x_t))
        stats.samples += len(step.x_t)
        stats.t += float(t.sum())
        stats.s += float(torch.minimum(step.s.to(t), t).sum())
        within = validation.align("t", (t > 0) & (t < 1), step.x_t)  # at t = 1 the classes are not defined
        counted = within & self._reached(prediction) & (True if prediction.free is None else prediction.free)
        if not bool(counted.any()):
            return
        s = validation.align("s", torch.minimum(step.s.to(t), t), step.x_t).expand(step.x_t.shape)
        if prediction.has_log_score_rows:
            at = counted.reshape(-1).nonzero().squeeze(-1)
            # Where all sites are counted, their logits are not copied.
            every = len(at) == counted.numel()
            part, end = (prediction, s) if every else (prediction[at], s.reshape(-1)[at])
            columns = part.map_log_scores(self._examine_rows, end)
            self._add(stats, _SiteFindings(*(column.reshape(-1) for column in columns)))
        elif self.process.rank_one is not None:
            sites = max(1, MAX_SCORES.get(step.x_t.device.type, MAX_SCORES["cpu"]) // self.process.states)
            parts = counted.reshape(-1).nonzero().squeeze(-1).split(sites)
            found = [prediction[at].map(self._examine, s.reshape(-1)[at]) for at in parts]
            # Added up once for all parts: every number that is read waits for the GPU.
            self._add(stats, _SiteFindings(*(torch.cat(column) for column in zip(*found, strict=True))))
        else:
            # A transition matrix belongs to one sample, so all sites of a sample are examined and then selected.
            self._add(stats, _SiteFindings(*(value[counted] for value in prediction.map(self._examine, s))))

    def _reached(self, prediction: Prediction) -> Bool[Tensor, "B L"]:
        """Return where some candidate has a forward rate into the current token."""
        if self.process.rank_one is not None:
            return ~prediction.is_clean_by_mixing()
        return (self.process.rates_into(prediction.x_t, prediction.t) > 0).any(-1)

    def _examine_rows(self, log_score: Tensor, x_t: Tensor, t: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        """Examine rows of log-scores by the kernels of score measures, for `_SiteFindings`."""
        process = self.process.rank_one
        assert process is not None
        steps = s if self.has_weights else None
        found = diagnose_projected(log_score, x_t, t, process, steps, TOLERANCE, TOLERANCE)
        site = process.at(x_t, t)
        excess = found.total * site.m_k / site.alpha - 1 if process.is_pure_mask else torch.zeros_like(found.total)
        scores = torch.where(site.rate > 0, process.states - 1, 0)
        findings = (value for one in (found.before, found.after) for value in _ScoreFindings.of(one))
        return (*findings, found.distance, excess, scores)

    def _examine(self, prediction: Prediction, s: Float[Tensor, "*site"]) -> tuple[Tensor, ...]:
        """Examine the score vectors of some sites before and after projection, in float64, for `_SiteFindings`."""
        score, x_t, process = prediction.score(), prediction.x_t, prediction.process
        t = validation.align("t", prediction.t, x_t).expand(x_t.shape)
        finite = torch.where(score.isfinite(), score, 1.0)  # an infinite score counts as outside the box, in `_diagnose`
        nearest = score_from_posterior(project(finite, x_t, t, process), x_t, t, process)
        counted = process.rates_into(x_t, t) > 0
        gap, size = (torch.linalg.vector_norm(value.where(counted, 0), dim=-1) for value in (nearest - finite, finite))
        excess = torch.zeros_like(size)
        rank_one = process.rank_one
        if rank_one is not None and rank_one.is_pure_mask:
            site = rank_one.at(x_t, t)
            excess = finite[..., : process.vocab].sum(-1) * site.m_k / site.alpha - 1
        findings = (value for one in (score, nearest) for value in self._diagnose(one, x_t, t, s))
        return (*findings, gap / size.clamp(min=1e-300), excess, counted.sum(-1))

    def _diagnose(self, score: Tensor, x_t: Tensor, t: Tensor, s: Tensor) -> _ScoreFindings:
        """Classify score vectors."""
        return _ScoreFindings.of(diagnose(score, x_t, t, self.process, s if self.has_weights else None, TOLERANCE, TOLERANCE))

    def _add(self, stats: StepStats, found: _SiteFindings) -> None:
        """Add the findings of some sites to the counts of a step. All numbers are read at once: a read waits for the GPU."""
        sides = ((stats.before, found.before), (stats.after, found.after))
        sums, most = zip(*(_sums(findings) for _, findings in sides), strict=True)
        integers = torch.cat([*(counts for counts, _ in sums), found.scores.sum().reshape(1)]).tolist()
        floats = torch.stack([*(value for _, masses in sums for value in masses), found.moved.sum()]).tolist()
        greatest = torch.stack([*(value for values in most for value in values), found.moved.max()]).tolist()
        for number, (counts, _) in enumerate(sides):  # the second half of each list, before its last number, is of `after`
            _add_findings(counts, *(values[number * (len(values) // 2) :] for values in (integers, floats, greatest)))
        stats.sites += found.moved.numel()
        stats.scores += integers[-1]
        stats.moved += floats[-1]
        stats.moved_most = max(stats.moved_most, greatest[-1])
        rank_one = self.process.rank_one
        if rank_one is not None and rank_one.is_pure_mask:
            stats.excess.add(found.excess)

    def summary(self) -> dict[str, Any]:
        """Return counts and means, overall and step by step, as JSON can store them."""
        denoiser = self.denoiser
        return {
            "tolerances": {"box": TOLERANCE, "posterior": TOLERANCE, "negative mass": ROUNDING},
            "overall": self._step_summary(self.overall(), timed=False),
            "averages": self.averages(),
            "steps": [self._step_summary(step) for step in self.steps],
            "denoiser": None if denoiser is None else self._step_summary(denoiser),
        }

    def _step_summary(self, stats: StepStats, timed: bool = True) -> dict[str, Any]:
        """Return the counts and means of one step."""
        sites, samples = max(1, stats.sites), max(1, stats.samples)
        excess = stats.excess
        return {
            **({"t": stats.t / samples, "s": stats.s / samples} if timed else {}),
            "position_steps": stats.sites,
            "coordinates": stats.scores,
            "before": self._counts_summary(stats.before, sites),
            "after": self._counts_summary(stats.after, sites),
            "moved": {"mean": stats.moved / sites, "most": stats.moved_most},
            "excess": {
                "mean": excess.total / excess.count,
                "quantiles": {f"{q:g}": excess.quantile(q) for q in QUANTILES},
            }
            if excess.count
            else None,
        }

    def _counts_summary(self, counts: Counts, sites: int) -> dict[str, Any]:
        """Return the counts and means of the scores before or after projection."""
        weights = {"mean": counts.negative_mass / sites, "most": counts.negative_mass_most}
        return {
            "classes": dict(zip(SCORE_CLASSES, counts.classes, strict=True)),
            "strict": dict(zip(SCORE_CLASSES, counts.strict, strict=True)),
            "coordinates_outside": counts.coordinates,
            "coordinates_outside_strict": counts.coordinates_strict,
            "signed": counts.signed,
            "overlap": counts.overlap,
            "signed_mass": {"mean": counts.signed_mass / sites, "most": counts.signed_mass_most},
            "negative_weights": counts.negative if self.has_weights else None,
            "negative_mass": weights if self.has_weights else None,
        }


def _mean(values: list[float]) -> float | None:
    """The mean; None of no values."""
    return sum(values) / len(values) if values else None


def _sums(findings: _ScoreFindings) -> tuple[tuple[Tensor, list[Tensor]], list[Tensor]]:
    """Sum the findings over sites: counts in one tensor, sums of masses, and the greatest masses, for `_add_findings`."""
    signed = findings.lowest < -TOLERANCE
    negative = findings.negative_mass.where(findings.negative_mass > ROUNDING, 0)
    classes = (one.bincount(minlength=len(SCORE_CLASSES)) for one in (findings.classes, findings.strict))
    numbers = (
        findings.coordinates,
        findings.coordinates_strict,
        signed,
        signed & (findings.coordinates_strict > 0),
        negative > 0,
    )
    counts = torch.cat([*classes, torch.stack([number.sum() for number in numbers])])
    masses = (findings.signed_mass, negative)
    return (counts, [mass.sum() for mass in masses]), [mass.max() for mass in masses]


def _add_findings(counts: Counts, integers: list[int], sums: list[float], most: list[float]) -> None:
    """Add the sums of some sites, before or after projection: the numbers of `_sums`, perhaps with others behind them."""
    classes = len(SCORE_CLASSES)
    for total, values in ((counts.classes, integers), (counts.strict, integers[classes:])):
        total[:] = [a + b for a, b in zip(total, values[:classes], strict=True)]
    coordinates, strict, signed, overlap, negative = integers[2 * classes : 2 * classes + 5]
    counts.coordinates += coordinates
    counts.coordinates_strict += strict
    counts.signed += signed
    counts.overlap += overlap
    counts.negative += negative
    counts.signed_mass += sums[0]
    counts.negative_mass += sums[1]
    counts.signed_mass_most = max(counts.signed_mass_most, most[0])
    counts.negative_mass_most = max(counts.negative_mass_most, most[1])
