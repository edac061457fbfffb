"""One tau-leap: a Poisson number of jumps at every site, at rates that are constant over the step."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.heads import Head, rate_from_score
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.prediction import Prediction

MAX_JUMPS = 1024  # at one site in one step; larger counts are cut off there
NEGLIGIBLE = 1e-18  # probability of a count below which the tail of the Poisson distribution is ignored
Rates = Callable[[Prediction], Float[Tensor, "*site S"]]


def reverse_rates(part: Prediction) -> Float[Tensor, "*site S"]:
    """Return the reverse rates Q_t(y -> k) s_y.

    Args:
        part: A prediction.

    Returns:
        Rates, [*site, S]; 0 at k.
    """
    return rate_from_score(part.score(), part.x_t, part.t, part.process)


def check_order(sampler: str, ordinal: bool, head: Head) -> None:
    """Check that tokens have an order where a sampler adds up displacements.

    Args:
        sampler: The name of the sampler, for the message.
        ordinal: Whether the sampler adds up displacements.
        head: The head.

    Raises:
        TypeError: The process has a mask.
    """
    if ordinal and head.process.mask is not None:
        raise TypeError(
            f"sampler {sampler!r} adds up displacements between ordered tokens, and a mask has no place in an order, but the "
            f"process is {head.process}; use sampler='tau_leaping'"
        )


def poisson_jumps(
    prediction: Prediction, rates: Rates, step_length: Float[Tensor, "B"], ordinal: bool, noise: CounterNoise
) -> tuple[Int[Tensor, "B L"], Int[Tensor, "B L"]]:
    """Simulate jumps at constant rates for some time.

    Args:
        prediction: The prediction at the start, with sites [B, L].
        rates: Returns the rates k -> y of a part of the prediction, [*site, S].
        step_length: How long, [B].
        ordinal: Displacements y - k of several jumps add up, clipped to the vocabulary. Otherwise a site moves if it has
            exactly one jump.
        noise: Uniforms: "route" for the number of jumps; "token" for the target, or 0, 1, ... for those of ordinal jumps.

    Returns:
        The tokens after the jumps, and the numbers of jumps (at most 2 is counted unless `ordinal`), both [B, L].
    """

    def count(part: Prediction, step_length: Tensor, u: Tensor) -> tuple[Tensor]:
        mean = validation.align("step_length", step_length, part.x_t) * rates(part).sum(-1, dtype=part.t.dtype)
        return (poisson(mean, u, MAX_JUMPS if ordinal else 2),)

    def single_jump(part: Prediction, jumps: Tensor, u: Tensor) -> tuple[Tensor]:
        return (torch.where(jumps == 1, draw_categorical(rates(part), u), part.x_t.long()),)

    def all_jumps(part: Prediction, jumps: Tensor, *u: Tensor) -> tuple[Tensor]:
        below, k = rates(part).cumsum(-1, dtype=to_float64(part.t).dtype), part.x_t.long()
        total = below[..., -1:]
        largest = torch.nextafter(total, torch.zeros_like(total))  # u * total may round up to the total
        x = k.clone()
        for number, uniform in enumerate(u):
            y = torch.searchsorted(below, torch.minimum(uniform.unsqueeze(-1).to(total.dtype) * total, largest), right=True)
            x += torch.where(number < jumps, y.squeeze(-1) - k, 0)
        return (x.clamp(0, part.process.vocab - 1),)

    (jumps,) = prediction.map(count, step_length, noise("route"))
    if not ordinal:
        return prediction.map(single_jump, jumps, noise("token"))[0], jumps
    return prediction.map(all_jumps, jumps, *(noise(number) for number in range(int(jumps.max()))))[0], jumps


def poisson(mean: Float[Tensor, "*n"], u: Float[Tensor, "*n"], max_count: int) -> Int[Tensor, "*n"]:
    """Draw Poisson numbers by inverting the distribution function.

    Args:
        mean: Means, [*n].
        u: Uniforms in [0, 1), [*n].
        max_count: Larger numbers are cut off here.

    Returns:
        The number of n < `max_count` with P(N <= n) <= u, [*n].
    """
    term = torch.exp(-mean)
    below, count = term.clone(), torch.zeros_like(u, dtype=torch.long)
    for n in range(1, max_count + 1):
        # Rounding may leave the sum of all terms below a u near 1: stop where the terms are negligible.
        more = (u >= below) & ((term > NEGLIGIBLE) | (n <= mean))
        if not more.any():
            break
        count += more
        term = term * mean / n
        below = below + term
    return count
