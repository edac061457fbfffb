"""The exact distribution that a reverse process generates in an enumerable world."""

import itertools
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.conversions.bridge import apply_transition
from m2s.conversions.reverse_step import bayes_probabilities
from m2s.evaluation.likelihood.base import Estimator, Reverse, discrete_steps, interval
from m2s.evaluation.likelihood.levels import OPEN
from m2s.evaluation.likelihood.masks import time_of_mask_share
from m2s.evaluation.likelihood.world import World

MAX_ENTRIES = 2_000_000  # of the generators in memory
INTERVALS = 20  # of the coarsest solution, for 14 units of logit(t)
REFINEMENTS = (1, 2, 4)  # of the three solutions that are extrapolated: each interval is divided exactly


@torch.no_grad()
def exact_nll(world: World, estimator: Estimator) -> tuple[Float[Tensor, "X"], float]:
    """Return -log p(x) of every clean sequence under the reverse process that an estimator refers to.

    Args:
        world: The world.
        estimator: The estimator.

    Returns:
        Nats, [X], and an upper estimate of the error of the numerical solution, in nats.
    """
    if estimator.reverse == "steps" or world.head.process.chain is not None:
        return -torch.log(_stepped(world, discrete_steps(world.head, world.options))), 0.0
    if estimator.reverse == "any-order":
        return -torch.log(_any_order(world)), 0.0
    coarse, middle, fine = (torch.log(_continuous(world, count, estimator.reverse)) for count in REFINEMENTS)
    # Richardson: the error of the midpoint rule is a series in the square of the width.
    second, third = middle + (middle - coarse) / 3, fine + (fine - middle) / 3
    found = third + (third - second) / 15
    return -found, float((found - third).abs().max())


def _start(world: World) -> Float[Tensor, "N"]:
    """The distribution of x_1, with which sampling starts, over all noisy sequences."""
    process, t = world.head.process, torch.ones((), dtype=torch.float64)
    if not process.has_clean_tokens_at_end:
        return process.reference()[world.noisy].prod(-1)
    masks = torch.full((1, world.length), process.states - 1)
    head_time = t.clamp(max=1 - world.options.t_min) if world.head.excludes_t_one else t
    output = world.network.network(masks, t.expand(1))
    mu = world.head.last_step(output.double(), masks, head_time.expand(1)).exp()  # type: ignore[union-attr]
    sites = apply_transition(mu, process.transition_matrix(t.expand(1)))[0]
    return sites[torch.arange(world.length), world.noisy].prod(-1)


def _neighbors(world: World) -> Int[Tensor, "N L S"]:
    """The place in `noisy` of x with position i replaced by y."""
    states = world.head.process.states
    power = states ** torch.arange(world.length - 1, -1, -1)
    without = torch.arange(len(world.noisy))[:, None] - world.noisy * power
    return without[..., None] + power[:, None] * torch.arange(states)


def _generators(world: World, times: Float[Tensor, "M"], into: Int[Tensor, "N L S"], kind: Reverse) -> Float[Tensor, "M N N"]:
    """The generators of the reverse process, [time, from, to]: rates Q_t(y -> k) s_y; for shares of masks mu_y / share."""
    count = len(world.noisy)
    x_t, process, level = world.noisy.repeat(len(times), 1), world.head.process, times.repeat_interleave(count)
    if kind == "shares":
        at = time_of_mask_share(process, times)
        logits = world.head.posterior_logits(world.output(at).flatten(0, 1), x_t, at.repeat_interleave(count))
        mu = torch.nn.functional.pad(torch.softmax(logits, -1), (0, 1))
        rates = torch.where(process.is_mask(x_t).unsqueeze(-1), mu / level[:, None, None], 0.0)
    else:
        forward = process.rates_into(x_t, level)
        log_score = world.head.log_score(world.output(times).flatten(0, 1), x_t, level)
        rates = torch.where(forward > 0, forward * log_score.exp(), 0.0)
    matrix = torch.zeros(len(x_t), count, dtype=torch.float64)
    matrix.scatter_add_(1, into.flatten(1).repeat(len(times), 1), rates.flatten(1))
    matrix = matrix.unflatten(0, (len(times), count)).diagonal_scatter(torch.zeros(len(times), count), dim1=1, dim2=2)
    return matrix - torch.diag_embed(matrix.sum(2))


def _last(world: World, t: float, uniform: bool) -> Float[Tensor, "N X"]:
    """The probability of each clean sequence in the last step, from each noisy one."""
    process = world.head.process
    if uniform:
        kept = torch.nn.functional.one_hot(world.noisy, process.states)[..., : process.vocab].double()
        rows = torch.where(process.is_mask(world.noisy).unsqueeze(-1), 1 / process.vocab, kept)
    else:
        times = torch.full((len(world.noisy),), t, dtype=torch.float64)
        rows = world.head.last_step(world.output(times[:1])[0], world.noisy, times).exp()
    return rows[:, torch.arange(world.length), world.clean].prod(-1)


def _continuous(world: World, refinement: int, kind: Reverse) -> Float[Tensor, "X"]:
    """The reverse process in continuous time: the exponential midpoint rule in logit(t), then the last step.

    It ends at t_min with the last step of the head. "uniform-last" and "shares" end at 0; the former draws a uniform token for
    a mask that is left. "shares" runs over the share of masks in place of time.
    """
    low, high = interval(world.head, world.options)
    low, high = (low if kind == "continuous" else OPEN), (1 - OPEN if kind == "shares" else min(high, 1 - OPEN))
    clamp, into, p = world.options.t_min, _neighbors(world), _start(world)
    if kind == "shares":
        p = world.head.process.reference()[world.noisy].prod(-1)
    ends = [high, *(t for t in (1 - clamp, clamp) if low < t < high), low]
    for start, end in itertools.pairwise(ends):
        first, last = (math.log(t) - math.log1p(-t) for t in (start, end))
        count = refinement * max(2, math.ceil(INTERVALS * (first - last) / 14))
        width = (first - last) / count
        t = torch.sigmoid(first - (torch.arange(count, dtype=torch.float64) + 0.5) * width)
        for part in t.split(max(1, MAX_ENTRIES // len(p) ** 2)):
            scale = width * part * (1 - part)
            for matrix in torch.matrix_exp(scale[:, None, None] * _generators(world, part, into, kind)):
                p = p @ matrix
    return p @ _last(world, low, uniform=kind != "continuous")


def _stepped(world: World, steps: int) -> Float[Tensor, "X"]:
    """The reverse process with T Bayes steps, the last of which draws from the posterior."""
    process, p, count = world.head.process, _start(world), len(world.noisy)
    outputs = world.output(torch.arange(1, steps + 1, dtype=torch.float64) / steps)
    for number in range(steps, 1, -1):
        t = torch.full((count,), number / steps, dtype=torch.float64)
        mu = world.head.posterior(outputs[number - 1], world.noisy, t)
        sites = bayes_probabilities(mu, world.noisy, t - 1 / steps, t, process)
        matrix = sites[:, torch.arange(world.length), world.noisy].prod(-1)
        # A state that is never reached has no posterior: under masks, a clean token where alpha is 0.
        p = p @ torch.where((p > 0).unsqueeze(-1), matrix, 0.0)
    return p @ _last(world, 1 / steps, uniform=False)


def _any_order(world: World) -> Float[Tensor, "X"]:
    """One mask at a time in a random order; the network sees the time at which that share of positions is masked."""
    process, length = world.head.process, world.length
    powers = process.states ** torch.arange(length - 1, -1, -1)
    log_mu = {}
    for number in range(1, length + 1):
        t = time_of_mask_share(process, torch.tensor([number / length], dtype=torch.float64))
        values = world.head.posterior_logits(world.output(t)[0], world.noisy, t.expand(len(world.noisy)))
        log_mu[number] = torch.log_softmax(values, -1)
    found = {0: torch.ones(len(world.clean), dtype=torch.float64)}  # by the set of masked positions, as bits
    for masks in range(1, 2**length):
        positions = [i for i in range(length) if masks >> i & 1]
        masked = torch.tensor([i in positions for i in range(length)])
        at = (torch.where(masked, process.states - 1, world.clean) * powers).sum(-1)
        each = [log_mu[len(positions)][at, i, world.clean[:, i]].exp() * found[masks & ~(1 << i)] for i in positions]
        found[masks] = torch.stack(each).mean(0)
    return found[2**length - 1]
