"""Estimate the NELBO of a data set, term by term.

    -log p(x_0) <= integral + prior + reconstruction        (the terms are those of m2s.losses.elbo.NelboTerms)

Times have the density p(t) ~ 1/(t + 0.01) on [t_min, T] and the weight 1/p(t), because the integrand is noisiest near 0: there
a site is changed with probability ~t and then costs ~1/t. A pass gives each of N examples one time. Times are stratified: each
example has one of N equal intervals of quantiles, in random order. So the mean of a pass is unbiased, and passes are
independent. All noise is a pure function of (seed, example, pass): batch size and number of processes change only rounding.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.distributed import World
from m2s.evaluation.bpd.estimate import Estimate, student_t_quantile
from m2s.evaluation.bpd.examples import EvaluationSet
from m2s.heads import Head
from m2s.losses.elbo import NelboTerms
from m2s.losses.noise import corrupt_by_counter, sample_times
from m2s.losses.objective import Model
from m2s.modes import evaluation_mode
from m2s.ops import probe_triton
from m2s.progress import Progress
from m2s.rng import derived_seed, draw_seed

SINGLE_PROCESS = World(0, 1, torch.device("cpu"))
TERMS = ("nelbo", "integral", "prior", "reconstruction")
IMPORTANCE = 0.01  # c of the density 1/(t + c) of times
MAX_STRATA = 50  # greatest number of intervals of time in the error over examples


@dataclass(frozen=True)
class DatasetNelbo:
    """The terms of the NELBO of every example in every pass, in nats.

    Args:
        t: Times, [P, N].
        weight: Their weights 1/p(t), [P, N].
        integral: The integrand at `t` times its weight, [P, N].
        reconstruction: The reconstruction term, [P, N].
        prior: The prior term, [N]. It has no error.
        length: The number of sites of an example.
        t_min: The start of the integral.
        end: The end of the integral.
        exact: The reconstruction is the exact -log p, and all other terms are 0.
        seed: The seed of times and noise.
    """

    t: Float[Tensor, "P N"]
    weight: Float[Tensor, "P N"]
    integral: Float[Tensor, "P N"]
    reconstruction: Float[Tensor, "P N"]
    prior: Float[Tensor, "N"]
    length: int
    t_min: float
    end: float
    exact: bool = False
    seed: int | None = None

    @property
    def sites(self) -> Float[Tensor, "N"]:
        """The number of sites of each example, [N]."""
        return torch.full_like(self.prior, self.length)

    def term(self, name: str) -> Float[Tensor, "P N"]:
        """Return one of `TERMS`, [P, N].

        Args:
            name: "nelbo" (the sum of the other three), "integral", "prior" or "reconstruction".
        """
        if name == "nelbo":
            return self.integral + self.prior + self.reconstruction
        return getattr(self, name).expand_as(self.integral)

    def minus(self, other: "DatasetNelbo") -> "DatasetNelbo":
        """Return the difference, example by example and pass by pass.

        With the same examples, passes and seed both models had the same times and noise. Then the errors of the difference do
        not contain what both have in common.

        Args:
            other: The NELBO that is subtracted.

        Raises:
            ValueError: The other one has other examples, another number of passes, or another seed.
        """
        timed = other if self.exact else self
        passes, count = timed.t.shape
        for each in (self, other):
            if (len(each.prior), each.length) != (count, self.length) or not (each.exact or len(each.t) == passes):
                raise ValueError("a difference needs NELBOs of the same examples, with the same number of passes")
        if not (self.exact or other.exact or self.seed == other.seed):
            raise ValueError(
                f"a difference needs NELBOs on the same noise, but the seeds are {self.seed} and {other.seed}: "
                f"call dataset_nelbo(..., seed={self.seed}) for both"
            )

        def gap(name: str) -> Tensor:
            return (getattr(self, name) - getattr(other, name)).expand(passes, -1)

        parts = (timed.t, timed.weight, gap("integral"), gap("reconstruction"), self.prior - other.prior)
        return DatasetNelbo(*parts, self.length, timed.t_min, timed.end, timed.exact, timed.seed)

    def estimate(self, name: str, units: Float[Tensor, "N"] | None = None) -> Estimate:
        """Estimate R = sum of a term / sum of units, averaged over passes.

        The error over examples leaves out the part of the variance that stratified times remove. With v_pi the term of example
        i in pass p, u_i its units, and f_pi the mean of v over all in the same of S equal intervals of time quantiles:

            sqrt(PN/(PN - S) sum_i d_i^2) / sum_i u_i,     d_i = mean_p (v_pi - f_pi) - R (u_i - mean u)

        Args:
            name: One of `TERMS`.
            units: The number of units of each example, such as bytes, [N]; None: sites.

        Returns:
            Nats per unit.
        """
        values, units = self.term(name), self.sites if units is None else units
        passes, count = values.shape
        total, each = float(units.sum()), values.sum(1) / units.sum()
        ratio, error, low, high, rows_error = float(each.mean()), None, None, None, None
        if passes > 1:
            error = float(each.std()) / math.sqrt(passes)
            half_width = student_t_quantile(passes - 1) * error
            low, high = ratio - half_width, ratio + half_width
        if count > 1:
            strata = 1 if self.exact else max(1, min(MAX_STRATA, count // 4))
            stratum = self.t.argsort(1).argsort(1) * strata // count
            mean = torch.zeros(strata, dtype=values.dtype).scatter_reduce(
                0, stratum.flatten(), values.flatten(), "mean", include_self=False
            )
            deviation = (values - mean[stratum]).mean(0) - ratio * (units - units.mean())
            freedom = 1 - strata / (passes * count)
            rows_error = math.sqrt(float(deviation.square().sum()) / freedom) / total
        return Estimate(ratio, error, low, high, rows_error)


@torch.no_grad()
def dataset_nelbo(
    model: Model,
    head: Head,
    rows: EvaluationSet,
    passes: int = 4,
    t_min: float = 1e-3,
    seed: int | None = None,
    batch_size: int = 64,
    labels: Int[Tensor, "N"] | None = None,
    bf16: bool = False,
    world: World = SINGLE_PROCESS,
) -> DatasetNelbo:
    """Estimate the NELBO of every example of a data set. The network is called in evaluation mode.

    Args:
        model: The network, called as model(x_t, t) or model(x_t, t, label).
        head: What its output means.
        rows: The examples.
        passes: Times per example. A head with the exact likelihood needs one pass only.
        t_min: Both ends of time, [0, t_min) and (1 - t_min, 1], are cut off the integral.
        seed: The seed of times and noise. Two models with the same seed are evaluated on the same noise. None: drawn from
            torch's global CPU generator. `DatasetNelbo.seed` has the number that was used.
        batch_size: Examples per call of the network.
        labels: The network's third argument, [N]. The NELBO is then an upper bound on -log p(x_0 | label).
        bf16: Run the network under autocast, as in training. Everything after its output is float32 or float64.
        world: The processes among which the batches are divided. All of them return the full result.

    Returns:
        The terms of every example in every pass.

    Raises:
        ValueError: An argument is out of range, or a token is invalid.
    """
    validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
    validation.positive_int("passes", passes)
    seed = _shared_seed(seed, world)
    validation.positive_int("batch_size", batch_size)
    count, process, device = len(rows), head.process, world.device
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=bf16)
    terms = NelboTerms(model, head, t_min, autocast=autocast)
    probe_triton(device)
    validation.positive_int("len(rows)", count)
    low, end = terms.interval
    passes = 1 if head.exact else passes  # all passes would be equal
    seeds = [derived_seed(seed, "bpd", term) for term in ("integral", "reconstruction")]
    everyone = torch.arange(count)
    drawn = [sample_times(everyone, count, seeds[0], number, low, end, IMPORTANCE) for number in range(passes)]
    t, weight = (torch.stack(values) for values in zip(*drawn, strict=True))
    first_times = terms.first_times(count)
    integral, reconstruction = torch.zeros(2, passes, count, dtype=torch.float64, device=device)
    prior = torch.zeros(count, dtype=torch.float64, device=device)
    with evaluation_mode(model), Progress(count * passes, "NELBO", "example", quiet=not world.first) as progress:
        for first in range(world.rank * batch_size, count, world.size * batch_size):
            indices = everyone[first : first + batch_size]
            at, first_time = indices.to(device), first_times[indices].to(device)
            x_0 = rows[indices].to(device).long()
            label = None if labels is None else labels[indices].to(device)
            prior[at] = terms.prior(x_0, label, shared=label is None).double().sum(-1)
            for number in range(passes):
                time = terms.snap(t[number, indices].to(device))
                x_t = corrupt_by_counter(process, x_0, time, at, seeds[0], number)
                nats = terms.integrand(x_0, x_t, time, label).double().sum(-1)
                integral[number, at] = weight[number, indices].to(device) * nats

                x_t = corrupt_by_counter(process, x_0, first_time, at, seeds[1], number)
                reconstruction[number, at] = -terms.log_likelihood(x_0, x_t, first_time, label).double().sum(-1)
                progress.update(len(indices))
    integral, reconstruction, prior = (world.sum(term).cpu() for term in (integral, reconstruction, prior))
    return DatasetNelbo(t, weight, integral, reconstruction, prior, rows[everyone[:1]].shape[1], low, end, head.exact, seed)


def _shared_seed(seed: int | None, world: World) -> int:
    """The seed that was given, or one that the first process draws for all of them."""
    if seed is not None:
        validation.positive_int("seed", seed, 0)
        return seed
    drawn = float(draw_seed() if world.first else 0)
    return int(world.sum(torch.tensor([drawn], dtype=torch.float64, device=world.device)))


def integrand_curve(found: DatasetNelbo, bins: int = 20) -> list[dict[str, Any]]:
    """Estimate the integrand in equal intervals of t.

    With h the integrand and w the weight of its time, over the n samples in an interval: mean = sum w h / sum w, error =
    sqrt(n/(n-1) sum w^2 (h - mean)^2) / sum w. The means times the widths add up to about the integral.

    Args:
        found: The terms of a data set.
        bins: The number of intervals.

    Returns:
        For each interval: "from", "to", "samples", "bits" per position, and its standard "error"; None with too few samples.
    """
    validation.positive_int("bins", bins)
    t, weight = found.t.flatten(), found.weight.flatten()
    height = found.integral.flatten() / weight / found.length / math.log(2)
    edges = np.linspace(found.t_min, found.end, bins + 1).tolist()
    place = (bins * (t - found.t_min) / (found.end - found.t_min)).long().clamp(max=bins - 1)
    result = []
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        w, h = weight[place == number], height[place == number]
        count, total = len(h), float(w.sum())
        mean = float((w * h).sum()) / total if count else math.nan
        spread = float((w * (h - mean)).square().sum())
        error = math.sqrt(count / (count - 1) * spread) / total if count > 1 else None
        result.append({"from": low, "to": high, "samples": count, "bits": mean if count else None, "error": error})
    return result
