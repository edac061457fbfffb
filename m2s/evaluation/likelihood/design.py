"""Designs of the noise of the NELBO: the same expectation with a smaller variance per network call.

A group of m passes over a sequence shares random numbers, and groups are independent. Within a group

    stratified   pass p has its time in the p-th of m equal intervals of quantiles,
    antithetic   every second pass has the noise 1 - u of the pass before it,
    sweep        the number of replaced tokens is drawn by its inverse distribution function from stratified numbers, and the
                 passes take their positions one after the other from a random order of all positions, without replacement.

At each pass alone, the time has its density and every token is replaced independently, so that each pass is unbiased:
`tests/evaluation/test_design.py` enumerates this.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.errors import UserError
from m2s.evaluation.bpd.examples import EvaluationSet
from m2s.evaluation.likelihood.base import Options, Term, interval, needs_rates, reconstruction
from m2s.evaluation.likelihood.levels import COUNT, KIND, LEVEL_OF_TIME, POSITION, TOKEN, Point, Times
from m2s.evaluation.likelihood.measure import draw_term
from m2s.evaluation.likelihood.nelbo import IMPORTANCE, is_masking, last_terms
from m2s.evaluation.likelihood.touched import draw_number, replace_tokens
from m2s.heads import Head
from m2s.losses.elbo import NelboTerms
from m2s.losses.objective import Model
from m2s.losses.score_entropy import score_entropy
from m2s.modes import evaluation_mode
from m2s.ops.counter_noise import CounterNoise
from m2s.rng import derived_seed

Coupling = Literal["independent", "antithetic", "sweep"]


@dataclass(frozen=True)
class Design:
    """How noise is drawn in a group of passes.

    Args:
        importance: c of the density 1/(t + c) of times; None: uniform times.
        stratified: Whether the times of a group are stratified.
        coupling: How the replaced tokens of a group depend on each other.
        split: Whether the case that no token was replaced is computed apart in the reconstruction term (`Untouched`).
        last_every: There is one draw of the reconstruction term for so many of the integral.
    """

    importance: float | None = None
    stratified: bool = False
    coupling: Coupling = "independent"
    split: bool = False
    last_every: int = 1

    def __post_init__(self) -> None:
        validation.choice("coupling", self.coupling, ("independent", "antithetic", "sweep"))
        validation.positive_int("last_every", self.last_every)

    def terms(self, head: Head, t: float) -> list[Term]:
        """Return the reconstruction terms.

        Args:
            head: The head.
            t: The time of the reconstruction.
        """
        return last_terms(head, t) if self.split else [Term("reconstruction", Point(t), reconstruction)]


PLAIN = Design()


def efficient(head: Head) -> Design:
    """Return the design with the smallest variance per network call in `experiments/variance.py`.

    The split of the reconstruction term needs one more call, except under masking.

    Args:
        head: The head.
    """
    return Design(IMPORTANCE, stratified=True, coupling="sweep", split=is_masking(head), last_every=8)


@dataclass(frozen=True)
class Noise:
    """The times and noisy tokens of a group of passes for a batch.

    Args:
        head: A head over a rank-one process.
        design: The design.
        times: The density of times.
        passes: The number m of passes.
        seed: The seed.
        group: The number of the group.
    """

    head: Head
    design: Design
    times: Times
    passes: int
    seed: int
    group: int

    def draw(self, x_0: Int[Tensor, "B L"], rows: Int[Tensor, "B"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return times, their weights and noisy tokens of all passes.

        Args:
            x_0: Clean tokens, [B, L].
            rows: Numbers of the sequences, [B].

        Returns:
            Times [m, B], weights [m, B] and noisy tokens [m, B, L].
        """
        process, length = self.head.process.rank_one, x_0.shape[1]
        assert process is not None
        noise = [CounterNoise(self.seed, rows, length, self.group * self.passes + number) for number in range(self.passes)]
        u = torch.stack([each.once(LEVEL_OF_TIME) for each in noise])
        if self.design.stratified:
            u = (torch.arange(self.passes, device=u.device).unsqueeze(-1) + u) / self.passes
        sizes = torch.full_like(rows, length)
        t, weight = (torch.stack(part) for part in zip(*(self.times.draw(process, each, sizes) for each in u), strict=True))
        alpha = process.alpha(t)
        touched = self._sweep(noise, alpha, length) if self.design.coupling == "sweep" else self._independent(noise, alpha)
        x_t = [
            replace_tokens(process, x_0, time, where, each(KIND), each(TOKEN))
            for time, where, each in zip(t, touched, noise, strict=True)
        ]
        return t, weight, torch.stack(x_t)

    def _independent(self, noise: list[CounterNoise], alpha: Float[Tensor, "m B"]) -> list[Tensor]:
        """Every token by its own number, which antithetic passes mirror."""
        u = [each(POSITION) for each in noise]
        if self.design.coupling == "antithetic":
            u = [u[number] if number % 2 == 0 else 1 - u[number - 1] for number in range(len(u))]
        return [each >= kept.unsqueeze(-1) for each, kept in zip(u, alpha, strict=True)]

    def _sweep(self, noise: list[CounterNoise], alpha: Float[Tensor, "m B"], length: int) -> list[Tensor]:
        """The number of replaced tokens first; then positions in one random order, each pass where the one before ended."""
        order = noise[0](POSITION).argsort(-1).argsort(-1)
        shift, sizes = noise[0].once(COUNT), torch.full((alpha.shape[1],), length, device=alpha.device)
        start, found = torch.zeros_like(sizes), []
        for number, kept in enumerate(alpha):
            # The golden ratio spreads the quantiles of the numbers evenly over passes, also over neighboring ones.
            quantile = (shift + number * (math.sqrt(5) - 1) / 2) % 1 if self.design.stratified else noise[number].once(COUNT)
            count = draw_number(kept, sizes, quantile)
            found.append((order - start.unsqueeze(-1)) % length < count.unsqueeze(-1))
            start = (start + count) % length
        return found


@torch.no_grad()
def nelbo_groups(
    model: Model,
    head: Head,
    x_0: EvaluationSet,
    design: Design | None = None,
    groups: int = 2,
    passes: int = 8,
    seed: int = 0,
    batch_size: int = 64,
    options: Options | None = None,
) -> tuple[Float[Tensor, "G N"], float]:
    """Estimate the NELBO of sequences by independent groups of passes.

    Args:
        model: The network, called as model(x_t, t).
        head: What its output means, over uniform, masking or hybrid noise.
        x_0: The sequences.
        design: How the passes of a group draw noise; None: `efficient(head)`.
        groups: The number of groups.
        passes: The passes m of a group.
        seed: The seed.
        batch_size: Sequences per call of the network.
        options: t_min.

    Returns:
        Nats per sequence, [groups, N]: their mean over groups is unbiased, and their variance is that of a group. And the
        network calls of a group for a sequence.

    Raises:
        UserError: The process is not rank-one.
    """
    options = options or Options()
    if head.process.rank_one is None or needs_rates(head):
        raise UserError(f"a design of noise needs uniform, masking or hybrid noise, not {head.process}")
    design = efficient(head) if design is None else design
    network, (low, end) = NelboTerms(model, head, options.t_min), interval(head, options)
    times, last, found = Times(low, end, importance=design.importance), design.terms(head, low), []
    with evaluation_mode(model):
        for rows in torch.arange(len(x_0)).split(batch_size):
            tokens = x_0[rows].long()
            prior = Term("prior").prior(network, tokens, shared=True).sum(-1)
            each = []
            for group in range(groups):
                noise = Noise(head, design, times, passes, derived_seed(seed, "integral"), group)
                total = prior + _integral(network, noise, tokens, rows)
                each.append(total + _last(network, last, design, tokens, rows, seed, group, passes))
            found.append(torch.stack(each))
    calls = passes + sum(1 if term.fixed else max(1, passes // design.last_every) for term in last)
    return torch.cat(found, 1), float(calls)


def _integral(network: NelboTerms, noise: Noise, x_0: Tensor, rows: Tensor) -> Float[Tensor, "B"]:
    """The integral by one group of passes."""
    total = torch.zeros(len(x_0), dtype=torch.float64)
    for t, weight, x_t in zip(*noise.draw(x_0, rows), strict=True):
        nats = score_entropy(network.head, network.network(x_t, t), x_0, x_t, t)
        total += weight * nats.double().sum(-1) / noise.passes
    return total


def _last(
    network: NelboTerms, terms: list[Term], design: Design, x_0: Tensor, rows: Tensor, seed: int, group: int, passes: int
) -> Float[Tensor, "B"]:
    """The reconstruction by one group of passes."""
    count, total = max(1, passes // design.last_every), torch.zeros(len(x_0), dtype=torch.float64)
    for term in terms:
        numbers = [0] if term.fixed else range(group * count, (group + 1) * count)
        drawn = [draw_term(network, term, x_0, rows, seed, number) for number in numbers]
        total += torch.stack(drawn).mean(0)
    return total
