"""One leap: a Poisson number of jumps at every site, at rates that are frozen over it."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.heads import Head, rate_from_score
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.base import Sampler, needs_rates
from m2s.samplers.prediction import Prediction

MOST = 1024  # jumps of one site in one leap; the chance of more is counted as that many
TAIL = 1e-18  # less is as good as nothing
Rates = Callable[[Prediction], Float[Tensor, "*site S"]]


def reverse_rates(part: Prediction) -> Float[Tensor, "*site S"]:
    """Q_t(y -> k) s_y, 0 at k."""
    return rate_from_score(part.score(), part.x_t, part.t, part.process)


def needs_levels(sampler: Sampler, ordinal: bool, head: Head) -> None:
    needs_rates(sampler, head)
    if ordinal and head.process.mask is not None:
        raise TypeError(
            f"sampler {sampler.name!r} adds up displacements, and a mask has no place in an order, but the process is "
            f"{head.process}: use sampler='tau_leaping'"
        )


def poisson_jumps(
    prediction: Prediction, rates: Rates, span: Float[Tensor, "B"], ordinal: bool, noise: CounterNoise
) -> tuple[Int[Tensor, "B L"], Int[Tensor, "B L"]]:
    """Where a leap of length `span` at these rates leads, and how many jumps it had (up to 2 of those that do not add up).

    `ordinal`: displacements y - k add up and are cut off at the ends; otherwise a site moves if it has exactly one.
    """

    def number(part: Prediction, span: Tensor, u: Tensor) -> tuple[Tensor]:
        mean = validation.align("span", span, part.x_t) * rates(part).sum(-1, dtype=part.t.dtype)
        return (poisson(mean, u, MOST if ordinal else 2),)

    def one(part: Prediction, jumps: Tensor, u: Tensor) -> tuple[Tensor]:
        return (torch.where(jumps == 1, draw_categorical(rates(part), u), part.x_t.long()),)

    def several(part: Prediction, jumps: Tensor, *u: Tensor) -> tuple[Tensor]:
        below, k = rates(part).cumsum(-1, dtype=to_float64(part.t).dtype), part.x_t.long()
        total = below[..., -1:]
        least = torch.nextafter(total, torch.zeros_like(total))  # u total may round up to the total
        x = k.clone()
        for count, uniform in enumerate(u):
            y = torch.searchsorted(below, torch.minimum(uniform.unsqueeze(-1).to(total.dtype) * total, least), right=True)
            x += torch.where(count < jumps, y.squeeze(-1) - k, 0)
        return (x.clamp(0, part.process.vocab - 1),)

    (jumps,) = prediction.map(number, span, noise("route"))
    if not ordinal:
        return prediction.map(one, jumps, noise("token"))[0], jumps
    return prediction.map(several, jumps, *(noise(count) for count in range(int(jumps.max()))))[0], jumps


def poisson(mean: Float[Tensor, "*n"], u: Float[Tensor, "*n"], most: int) -> Int[Tensor, "*n"]:
    """A Poisson number from one uniform, by its distribution function: how many n < `most` have P(N <= n) <= u."""
    term = torch.exp(-mean)
    below, count = term.clone(), torch.zeros_like(u, dtype=torch.long)
    for n in range(1, most + 1):
        more = (u >= below) & ((term > TAIL) | (n <= mean))  # the sum may end a rounding below a u near 1
        if not more.any():
            break
        count += more
        term = term * mean / n
        below = below + term
    return count
