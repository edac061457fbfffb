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
from jaxtyping import Bool, Float, Int
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

MANY = 8  # passes from which importance sampling pays under masking
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


def efficient(head: Head, passes: int) -> Design:
    """Return the design with the smallest variance per network call in `experiments/variance.py`.

    The split of the reconstruction term needs one more call, except under masking. There importance sampling pays only with
    many strata: the expected integrand is nearly constant in t, so that uneven weights alone add variance.

    Args:
        head: The head.
        passes: The number of passes of a group.
    """
    masks = is_masking(head)
    importance = None if masks and passes < MANY else IMPORTANCE
    return Design(importance, stratified=True, coupling="sweep", split=masks, last_every=8)


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

    def draw(
        self, x_0: Int[Tensor, "B L"], rows: Int[Tensor, "B"], free: Bool[Tensor, "B L"] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return times, their weights and noisy tokens of all passes.

        Args:
            x_0: Clean tokens, [B, L].
            rows: Numbers of the sequences, [B].
            free: True where a token is unknown, [B, L]. The others stay clean. None: all.

        Returns:
            Times [m, B], weights [m, B] and noisy tokens [m, B, L].
        """
        process, length = self.head.process.rank_one, x_0.shape[1]
        assert process is not None
        noise = [CounterNoise(self.seed, rows, length, self.group * self.passes + number) for number in range(self.passes)]
        u = torch.stack([each.once(LEVEL_OF_TIME) for each in noise])
        if self.design.stratified:
            u = (torch.arange(self.passes, device=u.device).unsqueeze(-1) + u) / self.passes
        free = torch.ones_like(x_0, dtype=torch.bool) if free is None else free
        draws = (self.times.draw(process, each, free.sum(-1)) for each in u)
        t, weight = (torch.stack(part) for part in zip(*draws, strict=True))
        alpha = process.alpha(t)
        touched = self._sweep(noise, alpha, free) if self.design.coupling == "sweep" else self._independent(noise, alpha, free)
        x_t = [
            replace_tokens(process, x_0, time, where, each(KIND), each(TOKEN))
            for time, where, each in zip(t, touched, noise, strict=True)
        ]
        return t, weight, torch.stack(x_t)

    def _independent(self, noise: list[CounterNoise], alpha: Float[Tensor, "m B"], free: Bool[Tensor, "B L"]) -> list[Tensor]:
        """Every token by its own number, which antithetic passes mirror."""
        u = [each(POSITION) for each in noise]
        if self.design.coupling == "antithetic":
            u = [u[number] if number % 2 == 0 else 1 - u[number - 1] for number in range(len(u))]
        return [(each >= kept.unsqueeze(-1)) & free for each, kept in zip(u, alpha, strict=True)]

    def _sweep(self, noise: list[CounterNoise], alpha: Float[Tensor, "m B"], free: Bool[Tensor, "B L"]) -> list[Tensor]:
        """The number of replaced tokens first; then positions in one random order, each pass where the one before ended."""
        order = torch.where(free, noise[0](POSITION), torch.inf).argsort(-1).argsort(-1)
        shift, sizes = noise[0].once(COUNT), free.sum(-1)
        start, found = torch.zeros_like(sizes), []
        for number, kept in enumerate(alpha):
            # The golden ratio spreads the quantiles of the numbers evenly over passes, also over neighboring ones.
            quantile = (shift + number * (math.sqrt(5) - 1) / 2) % 1 if self.design.stratified else noise[number].once(COUNT)
            count = draw_number(kept, sizes, quantile)
            found.append(((order - start.unsqueeze(-1)) % sizes.unsqueeze(-1) < count.unsqueeze(-1)) & free)
            start = (start + count) % sizes
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
        design: How the passes of a group draw noise; None: `efficient(head, passes)`.
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
    if not supports_designs(head):
        raise UserError(f"a design of noise needs uniform, masking or hybrid noise, not {head.process}")
    design = efficient(head, passes) if design is None else design
    network, found = NelboTerms(model, head, options.t_min), []
    with evaluation_mode(model):
        for rows in torch.arange(len(x_0)).split(batch_size):
            tokens = x_0[rows].long()
            prior = Term("prior").prior(network, tokens, shared=True).sum(-1)
            drawn = [draw_group(network, design, tokens, rows, passes, seed, group, options) for group in range(groups)]
            found.append(prior + torch.stack(drawn).mean(1))
    last = design.terms(head, interval(head, options)[0])
    calls = passes + sum(1 if term.fixed else _last_count(design, passes) for term in last)
    return torch.cat(found, 1), float(calls)


def supports_designs(head: Head) -> bool:
    """Return whether noise can be drawn by a design: uniform, masking or hybrid noise in continuous time.

    Args:
        head: The head.
    """
    return head.process.rank_one is not None and not needs_rates(head)


def draw_group(
    network: NelboTerms,
    design: Design,
    x_0: Int[Tensor, "B L"],
    rows: Int[Tensor, "B"],
    passes: int,
    seed: int,
    group: int,
    options: Options,
    free: Bool[Tensor, "B L"] | None = None,
) -> Float[Tensor, "m B"]:
    """Estimate integral and reconstruction by one group of passes.

    Args:
        network: The network.
        design: How the passes draw noise.
        x_0: Clean tokens, [B, L].
        rows: Numbers of the sequences, [B].
        passes: The passes m.
        seed: The seed.
        group: The number of the group.
        options: t_min.
        free: True where a token is unknown, [B, L]. The others are given: they stay clean and cost nothing. None: all.

    Returns:
        Nats per sequence of every pass, [m, B]. Their mean is the estimate. All passes share the reconstruction.
    """
    head, (low, end) = network.head, interval(network.head, options)
    noise = Noise(head, design, Times(low, end, importance=design.importance), passes, derived_seed(seed, "integral"), group)
    found = []
    for t, weight, x_t in zip(*noise.draw(x_0, rows, free), strict=True):
        nats = score_entropy(head, network.network(x_t, t), x_0, x_t, t).double()
        found.append(weight * (nats if free is None else torch.where(free, nats, 0)).sum(-1))
    total, count = torch.stack(found), _last_count(design, passes)
    for term in design.terms(head, low):
        numbers = [0] if term.fixed else range(group * count, (group + 1) * count)
        total = total + torch.stack([draw_term(network, term, x_0, rows, seed, number, free) for number in numbers]).mean(0)
    return total


def _last_count(design: Design, passes: int) -> int:
    """The draws of the reconstruction term in a group."""
    return max(1, passes // design.last_every)
