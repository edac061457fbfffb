"""The posterior whose bridged score is nearest to a given score (Eq. 11), exactly.

For a rank-one process the optimum has the form u_y = [s_y - sigma]_+ / b off the current token k, b = alpha/m(k), mu_k = 1 -
sum(u): the paper's threshold (appendix D.4), theta = b (sigma - origin), kept in units of the score. With delta = m(y)/(alpha +
m(k)) for clean y and for the mask,

    origin = delta - delta sum_{y != k} (s_y - delta) - delta_mask (s_mask - delta_mask),
    curvature = 2 delta + (V-1) delta^2 + delta_mask^2      (uniform: delta = rho, curvature = h/c),

sigma is the root of   sum_y [s_y - sigma]_+ = min(b, (sigma - origin) / curvature),   b being the active branch (k = mask:
always active).

Left minus right is convex, decreasing and piecewise linear. Any set A of candidates, used without its positive parts, bounds
the root from below, and Newton's method climbs from there and stops, exactly, when the support stops changing: a few passes
over the vocabulary, no sort and no tolerance. A score is only ever compared with a nearby sigma, so its size costs no digits.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch._higher_order_ops import while_loop

from m2s.process import SiteCoefficients

CPU_BLOCK = 1 << 17  # scores worked on at once on a CPU, so that they stay in cache
PASSES = 100  # far above the handful that occur; a bound against a loop that rounding keeps alive


class Line(NamedTuple):
    """The numbers of a row that do not depend on its scores, each shaped like k; in float64 where the device has it."""

    known: Bool[Tensor, "*n"]  # mu = e_k whatever the score
    slope: Float[Tensor, "*n"]  # b
    delta: Float[Tensor, "*n"]
    delta_mask: Float[Tensor, "*n"]
    gain: Float[Tensor, "*n"]  # 1 / curvature; 1 at the mask, where only the active branch is left


def line(k: Int[Tensor, "*n"], site: SiteCoefficients, vocab: int, mask: int | None) -> Line:
    known = site.own == 0
    slope = site.alpha / torch.where(known, 1, site.own)
    delta, delta_mask = site.clean / site.stay, site.mask / site.stay
    curvature = 2 * delta + (vocab - 1) * delta**2
    if mask is not None:
        curvature = torch.where(k == mask, 1, curvature + delta_mask**2)
    return Line(known, slope, delta, delta_mask, 1 / curvature)


def nearest_posterior(
    rows: Float[Tensor, "N V"], k: Int[Tensor, "N"], site: SiteCoefficients, states: int, mask: int | None, log: bool
) -> Float[Tensor, "N S"]:
    """mu for every row, on a CPU in blocks that stay in cache."""
    k, site = k.long().unsqueeze(-1), SiteCoefficients(*(value.unsqueeze(-1) for value in site))

    def block(at: slice) -> Tensor:
        score = rows[at, :states]
        return _nearest(score.exp() if log else score, k[at], SiteCoefficients(*(value[at] for value in site)), mask)

    whole = rows.device.type != "cpu" or torch.compiler.is_compiling()
    size = len(rows) if whole else max(1, CPU_BLOCK // states)
    if size >= len(rows):
        return block(slice(None))
    mu = torch.empty(len(rows), states, dtype=rows.dtype, device=rows.device)
    for start in range(0, len(rows), size):
        mu[start : start + size] = block(slice(start, start + size))
    return mu


def put(values: Float[Tensor, "N V"], index: Int[Tensor, "N 1"], value: Tensor | float) -> Float[Tensor, "N V"]:
    """`value` at `index` of every row: in place, or, when compiled, by a selection that fuses with what comes next."""
    if torch.compiler.is_compiling():
        return torch.where(torch.arange(values.shape[-1], device=values.device) == index, value, values)
    return values.scatter_(-1, index, value)


def _nearest(
    score: Float[Tensor, "N S"], k: Int[Tensor, "N 1"], site: SiteCoefficients, mask: int | None
) -> Float[Tensor, "N S"]:
    """mu for a block of rows; the scalars of `site` are [N, 1], in float64 where the device has it."""
    vocab = score.shape[-1] if mask is None else mask
    known, slope, delta, delta_mask, gain = line(k, site, vocab, mask)
    candidates = put(score.clone(), k, 0.0)[:, :vocab]
    total = candidates.sum(-1, keepdim=True).to(slope.dtype)
    origin = delta - delta * (total - (vocab - 1) * delta)
    if mask is None:
        candidates = put(candidates, k, -torch.inf)
    else:
        masked = k == mask
        origin = torch.where(masked, -torch.inf, origin - delta_mask * (score[:, mask:].to(slope.dtype) - delta_mask))
        index = k.clamp(max=vocab - 1)
        candidates = put(candidates, index, torch.where(masked, candidates.gather(-1, index), -torch.inf))
    count = vocab - 1 if mask is None else vocab - 1 + masked.to(slope.dtype)
    near, beyond, active = threshold(candidates, slope, origin, gain, total, count)
    u = (candidates - near).sub_(beyond.to(score.dtype)).relu_().mul_((1 / slope).to(score.dtype))
    rest = torch.where(active, 0, (1 - u.sum(-1, keepdim=True)).clamp(min=0))
    if mask is None:
        return put(u, k, rest.to(u.dtype))
    rest = torch.where(known, 1, torch.where(masked, 0, rest))
    return put(torch.nn.functional.pad(u.masked_fill_(known, 0.0), (0, 1)), k, rest.to(u.dtype))


def threshold(
    candidates: Float[Tensor, "N V"], slope: Tensor, origin: Tensor, gain: Tensor, total: Tensor, count: Tensor | int
) -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N 1"], Tensor]:
    """The root sigma of sum [s - sigma]_+ = min(slope, (sigma - origin) gain) for every row, and whether it meets the first of
    the two.

    sigma is returned as near + beyond, `near` in the dtype of the score, so that (s - near) - beyond keeps all its digits.
    `total` and `count` sum up the candidates, entries of -inf left out. All scalars are [N, 1].
    """

    def bound(mass: Tensor, size: Tensor | int) -> Tensor:
        # the root of mass - size sigma = min(...)
        return torch.maximum((mass - slope) / size, (mass + origin * gain) / (size + gain))

    def step(near: Tensor) -> tuple[Tensor, Tensor]:
        # the root on this support is the greater of those on the two branches: what is left of zero is the greater of two lines
        mass = (candidates - near).relu_().sum(-1, keepdim=True)
        size = torch.ge(candidates, near, out=torch.empty_like(candidates)).sum(-1, keepdim=True)
        return torch.maximum((mass - slope) / size, (mass - (near - origin) * gain) / (size + gain)), size

    def climb(near: Tensor, beyond: Tensor, size: Tensor, before: Tensor, done: Tensor) -> tuple[Tensor, ...]:
        """One pass. A row whose support no longer changes, or by rounding is what it was two passes ago and would go in a
        circle, is left alone, so that no other row can change its last digit."""
        near = torch.where(done, near, (near + beyond).to(near.dtype))
        beyond_here, size_here = step(near)
        seen = (size_here == size) | (size_here == before)
        # a compiled loop hands on no input as it is
        return near, torch.where(done, beyond, beyond_here), size_here, size.clone(), done | seen

    top = candidates.amax(-1, keepdim=True).to(slope.dtype)
    near = torch.maximum(bound(total, count), bound(top, 1)).to(candidates.dtype)
    state: tuple[Tensor, ...] = (
        near,
        torch.zeros_like(top),
        torch.full_like(near, -1.0),
        torch.full_like(near, -1.0),
        torch.zeros_like(near, dtype=torch.bool),
    )
    if torch.compiler.is_compiling():

        def moving(passes: Tensor, *state: Tensor) -> Tensor:
            return ~state[-1].all() & (passes < PASSES)

        def count_up(passes: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
            return passes + 1, *climb(*state)

        _, near, beyond, *_ = while_loop(moving, count_up, (torch.zeros((), dtype=torch.long, device=near.device), *state))
    else:
        for _ in range(PASSES):
            state = climb(*state)
            if state[-1].all():
                break
        near, beyond, *_ = state
    return near, beyond, (near + beyond - origin) * gain > slope
