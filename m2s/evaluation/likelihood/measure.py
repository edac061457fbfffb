"""Unbiased estimates of every estimator on data, sequence by sequence, and what they say about the population.

A sequence gets `passes` independent draws of noise. Noise is a pure function of (seed, estimator, sequence, pass), so that
batch size and interruptions change rounding alone. Sequences are independent of each other: the mean over N of them has
Student's upper limit mean + t_{0.95, N-1} s / sqrt(N), s over sequences, which includes the choice of sequences.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from m2s import validation
from m2s.evaluation.bpd.estimate import student_t_quantile
from m2s.evaluation.bpd.examples import EvaluationSet
from m2s.evaluation.likelihood.base import Estimator, Options, Term
from m2s.evaluation.likelihood.levels import LEVEL_OF_TIME
from m2s.evaluation.likelihood.registry import ESTIMATORS
from m2s.heads import Head
from m2s.losses.elbo import NelboTerms
from m2s.losses.objective import Model
from m2s.modes import evaluation_mode
from m2s.ops.counter_noise import CounterNoise
from m2s.rng import derived_seed

HEAVY_SHARE = 0.2  # of the variance over sequences that one sequence may have before the limit is doubtful
FEWEST = 20  # sequences, below which the limit is doubtful


@dataclass(frozen=True)
class Draws:
    """The values of one estimator, nats per sequence.

    Args:
        terms: Each term by its name, [P, N].
        calls: Network calls for one sequence, all passes together.
    """

    terms: Mapping[str, Float[Tensor, "P N"]]
    calls: int

    @property
    def total(self) -> Float[Tensor, "P N"]:
        """The sum of the terms, [P, N]."""
        return torch.stack(list(self.terms.values())).sum(0)

    def noise_variance(self) -> float:
        """Return the variance of one pass over one sequence by its noise, averaged over sequences; NaN with one pass."""
        return float(self.total.var(0).mean()) if len(self.total) > 1 else math.nan

    def upper_limit(self) -> float:
        """Return the one-sided 95 % limit of the mean over sequences by Student's distribution, in nats per sequence."""
        each = self.total.mean(0)
        if len(each) < 2:
            return math.nan
        quantile = student_t_quantile(len(each) - 1, 0.9)  # two-sided 90 % is one-sided 95 %
        return float(each.mean() + quantile * each.std() / math.sqrt(len(each)))

    def drop(self, reference: "Draws") -> tuple[float, float]:
        """Return by how many nats per sequence this estimate is below another one, and the standard error of the difference.

        Terms with the same name and the same levels have the same noise, so that the difference varies less than its parts.

        Args:
            reference: The draws of the other estimator for the same sequences.
        """
        gap = reference.total.mean(0) - self.total.mean(0)
        return float(gap.mean()), float(gap.std() / math.sqrt(len(gap))) if len(gap) > 1 else math.nan

    def largest_share(self) -> float:
        """Return the greatest share of the variance over sequences that one sequence has."""
        squares = (self.total.mean(0) - self.total.mean()).square()
        return float(squares.max() / squares.sum()) if bool(squares.sum() > 0) else 0.0

    def summary(self, units: Mapping[str, float]) -> dict[str, Any]:
        """Return the numbers of a table, as JSON can store them.

        Args:
            units: The mean number of units of a sequence by name, such as {"token": 128.0, "byte": 530.0}.

        Returns:
            "nats" per sequence with its "error" over sequences and one-sided "upper" limit, each term, network calls
            of a pass, the variance by noise and its product with the calls, and bits per unit.
        """
        each = self.total.mean(0)
        count, mean, upper = len(each), float(each.mean()), self.upper_limit()
        variance, share = self.noise_variance(), self.largest_share()
        return {
            "nats": mean,
            "error": float(each.std() / math.sqrt(count)) if count > 1 else math.nan,
            "upper": upper,
            "terms": {name: float(values.mean()) for name, values in self.terms.items()},
            "calls": self.calls / len(self.total),
            "noise_variance": variance,
            "variance_times_calls": variance * self.calls / len(self.total),
            "largest_share": share,
            "heavy_tailed": count < FEWEST or share > HEAVY_SHARE,
            **{f"bits_per_{unit}": mean / math.log(2) / size for unit, size in units.items()},
            **{f"upper_bits_per_{unit}": upper / math.log(2) / size for unit, size in units.items()},
        }


def draw_term(
    network: NelboTerms,
    term: Term,
    x_0: Int[Tensor, "B L"],
    rows: Int[Tensor, "B"],
    seed: int,
    number: int,
    free: Bool[Tensor, "B L"] | None = None,
    condition: Tensor | None = None,
    strata: int = 1,
) -> Float[Tensor, "B"]:
    """Estimate a term once for each sequence, nats per sequence, float64.

    Args:
        network: The network.
        term: The term.
        x_0: Clean tokens, [B, L].
        rows: Numbers of the sequences, [B].
        seed: The seed.
        number: The number of the pass.
        free: True where a token is unknown, [B, L]. The others are given: they stay clean and cost nothing. None: all.
        condition: The network's third argument, [B, ...]; None: it gets none.
        strata: The number of passes whose levels are stratified together: each has one of so many equal intervals of quantiles.
            The mean over these passes is unbiased.

    Returns:
        Nats, [B].
    """
    counted = torch.ones_like(x_0, dtype=torch.bool) if free is None else free
    if term.levels is None:
        return torch.where(counted, term.prior(network, x_0, condition, free is None and condition is None), 0).sum(-1)
    assert term.value is not None
    process, seed = network.head.process, derived_seed(seed, term.name)
    u = CounterNoise(seed, rows, x_0.shape[1], number).once(LEVEL_OF_TIME)
    u = (number % strata + u) / strata
    level, weight = term.levels.draw(process, u, counted.sum(-1))
    x_t = term.levels.corrupt(process, x_0, level, rows, seed, number, free)
    t = term.levels.time(process, level)
    nats = term.value(network.head, network.network(x_t, t, condition), x_0, x_t, t).double()
    return weight * torch.where(counted, nats, 0).sum(-1)


@torch.no_grad()
def measure(
    model: Model,
    head: Head,
    x_0: EvaluationSet,
    estimator: Estimator | str = "nelbo",
    passes: int = 2,
    seed: int = 0,
    batch_size: int = 64,
    options: Options | None = None,
    labels: Int[Tensor, "N"] | None = None,
    first: int = 0,
    device: torch.device | str = "cpu",
    done: Callable[[int], None] = lambda count: None,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Draws:
    """Estimate the likelihood of sequences by a named estimator.

    Args:
        model: The network, called as model(x_t, t) or model(x_t, t, label).
        head: What its output means.
        x_0: The sequences.
        estimator: The estimator or its name.
        passes: Independent draws of noise for each sequence. With two or more, the variance by noise is known.
        seed: The seed of the noise.
        batch_size: Sequences per call of the network.
        options: t_min, and the number of steps in discrete time.
        labels: The network's third argument, [N].
        first: The number of the first sequence: those before it were measured earlier.
        device: Where the network is.
        done: Called with the number of sequences of a finished batch.
        autocast: Makes the context in which the network is called.

    Returns:
        The values of the sequences from `first` on.

    Raises:
        UserError: There is no such estimator.
    """
    validation.positive_int("passes", passes)
    validation.positive_int("batch_size", batch_size)
    chosen = ESTIMATORS.find(estimator, "estimator") if isinstance(estimator, str) else estimator
    options = options or Options()
    network, terms = NelboTerms(model, head, options.t_min, autocast=autocast), chosen.build(head, options)
    parts: dict[str, list[Tensor]] = {term.name: [] for term in terms}
    with evaluation_mode(model):
        for indices in torch.arange(first, len(x_0)).split(batch_size):
            rows, tokens = indices.to(device), x_0[indices].to(device).long()
            label = None if labels is None else labels[indices].to(device)
            for name in parts:
                draws = [_passes(network, term, tokens, rows, seed, passes, label) for term in terms if term.name == name]
                parts[name].append(torch.stack(draws).sum(0).cpu())
            done(len(indices))
    found = {name: torch.cat(values, 1) if values else torch.zeros(passes, 0).double() for name, values in parts.items()}
    return Draws(found, chosen.calls(head, options, passes))


def _passes(
    network: NelboTerms, term: Term, x_0: Tensor, rows: Tensor, seed: int, passes: int, condition: Tensor | None
) -> Float[Tensor, "P B"]:
    """A term in every pass; one without noise is computed once."""
    count = 1 if term.fixed else passes
    drawn = [draw_term(network, term, x_0, rows, seed, number, condition=condition) for number in range(count)]
    return torch.stack(drawn).expand(passes, -1)


def join(parts: Iterable[Draws]) -> Draws:
    """Return the draws of several groups of sequences as one.

    Args:
        parts: The draws, with the same terms and passes.
    """
    listed = list(parts)
    names = listed[0].terms
    return Draws({name: torch.cat([part.terms[name] for part in listed], 1) for name in names}, listed[0].calls)
