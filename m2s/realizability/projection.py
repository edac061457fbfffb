"""The posterior whose bridged score is nearest to a given score (Eq. 9), exactly.

For a rank-one process the problem in u = mu off k reduces to min_{u >= 0, sum u <= 1} |u|^2 + curvature (sum u)^2 - 2 pull.u
(`m2s.belief.inverse.reduce`), solved by u = [pull - tau]_+ with

    sum(u) = tau / curvature   if that keeps sum(u) <= 1,     sum(u) = 1 with tau >= curvature   otherwise.

The mass on the left is convex, decreasing and piecewise linear in tau, so Newton's method lands at or left of the root from anywhere, then climbs
to it and stops, exactly, when the support stops changing: a few passes over the vocabulary, no sort and no tolerance.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.belief.inverse import Reduced, assemble, reduce
from m2s.belief.maps import _door, _wider
from m2s.process import Process, RankOne
from m2s.realizability.quadratic import project_tabulated

CPU_BLOCK = 1 << 16
PASSES = 100  # far above the handful that occur; a bound against a loop that rounding keeps alive


def threshold(pull: Float[Tensor, "N V"], curvature: Float[Tensor, "N 1"], free: Tensor) -> Float[Tensor, "N 1"]:
    """tau of u = [pull - tau]_+ for every row. Rows that are not `free` have sum(u) = 1 whatever tau."""
    lowest = -torch.inf
    start = torch.where(free, curvature, lowest)
    active_start = torch.relu(pull - start.where(free, 0)).sum(-1, keepdim=True) > 1
    active = ~free | active_start
    # the target mass is slope * tau + level
    slope, level = torch.where(active, 0, 1 / curvature), torch.where(active, 1.0, 0.0).to(pull.dtype)
    tau, count = start, torch.full_like(start, -1.0)
    for _ in range(PASSES):
        above = pull > tau
        size = above.sum(-1, keepdim=True, dtype=pull.dtype)
        mass = torch.where(above, pull, 0).sum(-1, keepdim=True)
        if torch.equal(size, count):
            break
        count = size
        tau = (mass - level) / (size + slope)
    return torch.where(free, tau.clamp(min=0), tau)


def project(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """argmin over posteriors mu of |B_{t,k} mu - s|^2: a realizable score's own posterior, any other's nearest.

    Rank-one processes at any vocabulary; tabulated ones by a batched QP up to 256 states. The distance counts the candidates that have a
    forward rate into k.
    """
    _door("score", score, x_t, t, process)
    t = _wider(t, score)
    if not isinstance(process, RankOne):
        return project_tabulated(score, x_t, t, process)
    reduced = reduce(score, x_t, t, process)
    return assemble(nearest(reduced), reduced, x_t, process)


def nearest(reduced: Reduced) -> Float[Tensor, "*site V"]:
    """u = [pull - tau]_+, a block of rows at a time; the current token's own entry stays 0 where it takes the remainder."""
    shape = reduced.pull.shape
    pull = reduced.pull.reshape(-1, shape[-1])
    curvature, free = reduced.curvature.reshape(-1, 1), reduced.free.reshape(-1, 1)
    u = torch.empty_like(pull)
    whole = pull.device.type != "cpu" or torch.compiler.is_compiling()
    rows = len(pull) if whole else max(1, CPU_BLOCK // shape[-1])
    for start in range(0, len(pull), rows):
        at = slice(start, start + rows)
        tau = threshold(pull[at], curvature[at], free[at])
        torch.sub(pull[at], tau, out=u[at]).relu_()
    return u.reshape(shape)
