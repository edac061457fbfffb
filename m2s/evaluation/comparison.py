"""Compare models by their samples at several numbers of steps, and measure what the projection of a score changes.

The projection has two effects on samples, which the dropped mass, `mean_scores` and `HalfProjected` separate:

* It removes negative weights. SEDD's analytic step drops them, and so draws from another distribution. Short steps have few.
* It raises scores that are too low for a posterior, and lowers others in exchange. The sum of the scores, which is the rate at
  which a token changes, can become wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Float64, Int, Integer
from torch import Tensor

from m2s.conversions.bridge import scatter_at
from m2s.evaluation.pixels import jackknife
from m2s.heads import Head
from m2s.heads.unconstrained import UnconstrainedScore
from m2s.ops.last_layer import Output
from m2s.realizability import Projected
from m2s.rng import derived_seed

TIMES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


class HalfProjected(UnconstrainedScore):
    """The scores after one half of a projection: those that it raises, or those that it lowers. The others stay as they are.

    It separates the effects of a projection on samples. These scores need not have a posterior.

    Args:
        head: The head whose scores are projected, such as `m2s.LogScore(process)`.
        raises: Whether scores are only raised; otherwise they are only lowered.
    """

    excludes_t_one = True

    def __init__(self, head: Head, raises: bool) -> None:
        super().__init__(head.process)
        self.head, self.projected, self.raises = head, Projected(head), raises

    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return log s_y of every candidate y, [*site, S]: the greater or the lesser of the score and its projection."""
        before, after = (head.log_score(output, x_t, t) for head in (self.head, self.projected))
        return torch.maximum(before, after) if self.raises else torch.minimum(before, after)


@torch.no_grad()
def mean_scores(
    model: Callable[..., Tensor], heads: Mapping[str, Head], x_0: Integer[Tensor, "n L"], seed: int = 0
) -> list[dict[str, float]]:
    """Compute the mean score of a model on noisy data.

    Where every sequence has a positive probability under p_t, as under uniform noise, exact scores have the mean 1:

        E_{x ~ p_t} sum_{y != x_i} p_t(x with y at i) / p_t(x) = S - 1     for each of S states.

    A mean below 1 says that tokens change too rarely.

    Args:
        model: The network, model(x_t, t).
        heads: Heads for its output, by name.
        x_0: Clean sequences, [n, L].
        seed: The seed of the noise.

    Returns:
        For each of `TIMES`: "t", and the mean over sequences, positions and tokens other than x_t for each name.
    """
    found = []
    for number, time in enumerate(TIMES):
        t = torch.full((len(x_0),), time)
        process = next(iter(heads.values())).process
        x_t = process.corrupt(x_0, t, generator=torch.Generator().manual_seed(derived_seed(seed, number)))
        output = model(x_t, t)
        means = {}
        for name, head in heads.items():
            score = scatter_at(head.log_score(output, x_t, t).double(), x_t, -torch.inf).exp()
            means[name] = float(score.sum(-1).mean()) / (process.states - 1)
        found.append({"t": time, **means})
    return found


def with_errors(distances: Float64[Tensor, "arm groups_plus_1"], names: Sequence[str]) -> dict[str, Any]:
    """Return distances and their paired differences with standard errors and 95% normal intervals.

    Args:
        distances: The distances of each arm, [arm, 1 + groups], from `m2s.evaluation.pixels.pixel_distances`.
        names: The names of the arms.

    Returns:
        "distances" by name, and "differences" for each pair of names, as "first - second".
    """
    rows = dict(zip(names, distances, strict=True))
    pairs = {f"{b} - {a}": rows[b] - rows[a] for i, a in enumerate(names) for b in names[i + 1 :]}
    return {
        "distances": {name: _interval(row) for name, row in rows.items()},
        "differences": {name: _interval(row) for name, row in pairs.items()},
    }


def _interval(values: Float64[Tensor, "groups_plus_1"]) -> dict[str, float]:
    """Return a value, its standard error by the jackknife, and the 95% normal interval."""
    value, error = float(values[0]), jackknife(values)
    return {"value": value, "error": error, "low": value - 1.96 * error, "high": value + 1.96 * error}
