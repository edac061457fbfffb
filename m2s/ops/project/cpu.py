"""The projection in torch by Newton's method: a few passes over the vocabulary, no sort and no tolerance.

`naive.py` has the definition. sigma is the root of

    sum_{y != k} [s_y - sigma]_+ = min(b, (sigma - origin) / curvature).

Left minus right is convex, decreasing and piecewise linear. Any set of candidates, used without positive parts, gives a lower
bound of the root. Newton's method climbs from there and stops, exactly, when the support stops changing. sigma stands for the
paper's threshold theta = b (sigma - origin), in units of the score: a score is only ever compared with a nearby sigma, so its
magnitude costs no digits. The first branch of the minimum, b, is the "active" one, where mu_k = 0.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch._higher_order_ops import while_loop

from m2s.process import SiteCoefficients

CPU_BLOCK = 1 << 17  # scores per block on a CPU, so that they stay in cache
LARGEST_LOG = {
    torch.float32: 74.0,
    torch.float64: 695.0,
}  # greater log-scores count as this: a million scores have a finite sum
PASSES = 100  # an iteration limit, because rounding can make the support alternate; 3 or 4 passes occur


class _Coefficients(NamedTuple):
    """The numbers of a row that do not depend on its scores, shaped like k; float64 where the device has it."""

    known: Bool[Tensor, "*n"]  # mu = e_k whatever the score
    slope: Float[Tensor, "*n"]  # b
    delta: Float[Tensor, "*n"]
    delta_mask: Float[Tensor, "*n"]
    gain: Float[Tensor, "*n"]  # 1 / curvature; 1 at the mask, where only the active branch is left


def _coefficients(k: Int[Tensor, "*n"], site: SiteCoefficients, vocab: int, mask: int | None) -> _Coefficients:
    """b, delta and curvature of every row."""
    known = site.m_k == 0
    slope = site.alpha / torch.where(known, 1, site.m_k)
    delta, delta_mask = site.clean / site.stay, site.mask / site.stay
    curvature = 2 * delta + (vocab - 1) * delta**2
    if mask is not None:
        curvature = torch.where(k == mask, 1, curvature + delta_mask**2)
    return _Coefficients(known, slope, delta, delta_mask, 1 / curvature)


def nearest_posterior(
    rows: Float[Tensor, "N V"], k: Int[Tensor, "N"], site: SiteCoefficients, states: int, mask: int | None, log: bool
) -> Float[Tensor, "N S"]:
    """Project every row; on a CPU in blocks of rows that stay in cache.

    Args:
        rows: Scores, or log-scores; columns from `states` on are ignored.
        k: Current tokens.
        site: Scalars of the process at every row, `[N]` each.
        states: Number of states, the mask included.
        mask: The mask token, or None.
        log: Whether the rows are log-scores.

    Returns:
        mu over all states, in the dtype of the rows.
    """
    k, site = k.long().unsqueeze(-1), SiteCoefficients(*(value.unsqueeze(-1) for value in site))

    def block(at: slice) -> Tensor:
        """mu of the rows `at`."""
        score = rows[at, :states]
        return _nearest(_exp(score) if log else score, k[at], SiteCoefficients(*(value[at] for value in site)), mask)

    all_at_once = rows.device.type != "cpu" or torch.compiler.is_compiling()
    size = len(rows) if all_at_once else max(1, CPU_BLOCK // states)
    if size >= len(rows):
        return block(slice(None))
    mu = torch.empty(len(rows), states, dtype=rows.dtype, device=rows.device)
    for start in range(0, len(rows), size):
        mu[start : start + size] = block(slice(start, start + size))
    return mu


def _exp(log_score: Float[Tensor, "N S"]) -> Float[Tensor, "N S"]:
    """The scores, at most e^LARGEST_LOG. Infinity and NaN have no projection, and stay."""
    return torch.where(log_score < torch.inf, log_score.clamp(max=LARGEST_LOG[log_score.dtype]), log_score).exp()


def _put(values: Float[Tensor, "N V"], index: Int[Tensor, "N 1"], value: Tensor | float) -> Float[Tensor, "N V"]:
    """`value` at `index` of every row: in place, or under torch.compile by a selection that fuses with what follows."""
    if torch.compiler.is_compiling():
        return torch.where(torch.arange(values.shape[-1], device=values.device) == index, value, values)
    return values.scatter_(-1, index, value)


def _nearest(
    score: Float[Tensor, "N S"], k: Int[Tensor, "N 1"], site: SiteCoefficients, mask: int | None
) -> Float[Tensor, "N S"]:
    """mu for a block of rows; the scalars of `site` are [N, 1], in float64 where the device has it."""
    vocab = score.shape[-1] if mask is None else mask
    known, slope, delta, delta_mask, gain = _coefficients(k, site, vocab, mask)
    candidates = _put(score.clone(), k, 0.0)[:, :vocab]
    total = candidates.sum(-1, keepdim=True).to(slope.dtype)
    origin = delta - delta * (total - (vocab - 1) * delta)
    if mask is None:
        candidates = _put(candidates, k, -torch.inf)
    else:
        masked = k == mask
        origin = torch.where(masked, -torch.inf, origin - delta_mask * (score[:, mask:].to(slope.dtype) - delta_mask))
        index = k.clamp(max=vocab - 1)
        candidates = _put(candidates, index, torch.where(masked, candidates.gather(-1, index), -torch.inf))
    count = vocab - 1 if mask is None else vocab - 1 + masked.to(slope.dtype)
    near, beyond, active = _threshold(candidates, slope, origin, gain, total, count)
    u = (candidates - near).sub_(beyond.to(score.dtype)).relu_().mul_((1 / slope).to(score.dtype))
    rest = torch.where(active, 0, (1 - u.sum(-1, keepdim=True)).clamp(min=0))
    if mask is None:
        return _put(u, k, rest.to(u.dtype))
    rest = torch.where(known, 1, torch.where(masked, 0, rest))
    return _put(torch.nn.functional.pad(u.masked_fill_(known, 0.0), (0, 1)), k, rest.to(u.dtype))


def _threshold(
    candidates: Float[Tensor, "N V"], slope: Tensor, origin: Tensor, gain: Tensor, total: Tensor, count: Tensor | int
) -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N 1"], Tensor]:
    """The root sigma of sum [s - sigma]_+ = min(slope, (sigma - origin) gain) for every row.

    Returns sigma as near + beyond, `near` in the dtype of the score, so that (s - near) - beyond keeps all its digits, and
    whether the root lies on the active branch. `total` and `count` are sum and number of the candidates, entries of -inf left
    out. All scalars are [N, 1].
    """

    def bound(mass: Tensor, size: Tensor | int) -> Tensor:
        """The root for a set of candidates without positive parts: mass - size sigma = min(...)."""
        return torch.maximum((mass - slope) / size, (mass + origin * gain) / (size + gain))

    def step(near: Tensor) -> tuple[Tensor, Tensor]:
        """One Newton step from `near`, and the size of the support. The root is the greater of those of the two branches."""
        mass = (candidates - near).relu_().sum(-1, keepdim=True)
        size = torch.ge(candidates, near, out=torch.empty_like(candidates)).sum(-1, keepdim=True)
        return torch.maximum((mass - slope) / size, (mass - (near - origin) * gain) / (size + gain)), size

    def climb(near: Tensor, beyond: Tensor, size: Tensor, before: Tensor, done: Tensor) -> tuple[Tensor, ...]:
        """One pass over all rows.

        A row is done when its support no longer changes, or when rounding makes it alternate between two supports. It is not
        touched any more, so that no other row can change its last digit.
        """
        near = torch.where(done, near, (near + beyond).to(near.dtype))
        beyond_here, size_here = step(near)
        seen = (size_here == size) | (size_here == before)
        # clone: the while_loop of torch.compile may not return an input as it is
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
