"""MAUVE (Pillutla et al. 2021): the area below the divergence frontier of two sets of texts, from 0 to 1.

The texts are embedded by a judge and quantized together by k-means, so that each set is a histogram: P for held-out text and Q
for samples. The frontier has the points (exp(-c KL(Q|R)), exp(-c KL(P|R))) for the mixtures R = w P + (1 - w) Q, 0 < w < 1,
with c = 5. MAUVE is the area below it, which is 1 where P = Q.

Like the package mauve-text: the hidden state of the last token; embeddings of length 1; the principal components that explain
90 % of the variance; n/10 clusters; the best of 5 runs of k-means; 25 mixture weights. Unlike it: the judge is not GPT-2 large;
k-means starts from other random points, and MAUVE is the mean over several seeds.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from m2s.evaluation.text.clusters import kmeans, principal_components
from m2s.evaluation.text.metric import Column, MeasuredText, TextContext, TextMetric
from m2s.rng import derived_seed

SCALE = 5.0  # c in the paper
WEIGHTS = np.linspace(1e-6, 1 - 1e-6, 25)
EXPLAINED = 0.9
SEEDS = 5


@dataclass(frozen=True)
class Mauve:
    """MAUVE of two sets of embeddings.

    Args:
        value: The mean over seeds of k-means.
        seeds: The value of each seed.
        clusters: The number of clusters.
        components: The number of principal components.
    """

    value: float
    seeds: tuple[float, ...]
    clusters: int
    components: int


def mauve_score(
    samples: Float[np.ndarray, "n H"],
    reference: Float[np.ndarray, "m H"],
    seed: int = 0,
    seeds: int = SEEDS,
    device: torch.device | str = "cpu",
) -> Mauve:
    """Compute MAUVE from embeddings.

    Args:
        samples: The embeddings of samples, [n, H].
        reference: The embeddings of held-out text, [m, H].
        seed: The seed of k-means.
        seeds: The number of runs of k-means with different seeds.
        device: Where it is computed, in float64.

    Returns:
        The mean over seeds, and the value of each.
    """
    both = torch.from_numpy(np.concatenate([reference, samples]).astype(np.float64)).to(device)
    points = principal_components(torch.nn.functional.normalize(both), EXPLAINED)
    clusters = max(2, round(min(len(samples), len(reference)) / 10))
    found = []
    for number in range(seeds):
        labels = kmeans(points, clusters, derived_seed(seed, "mauve", number))
        p, q = (_histogram(part, clusters) for part in labels.split([len(reference), len(samples)]))
        found.append(frontier_area(p, q))
    return Mauve(float(np.mean(found)), tuple(found), clusters, points.shape[1])


def _histogram(labels: Tensor, clusters: int) -> Float[np.ndarray, "k"]:
    """Return the fraction of the points in each cluster."""
    counts = labels.bincount(minlength=clusters).cpu().numpy()
    return counts / counts.sum()


def divergence_frontier(
    p: Float[np.ndarray, "k"], q: Float[np.ndarray, "k"], scale: float = SCALE
) -> Float[np.ndarray, "points 2"]:
    """Compute the points (exp(-c KL(q|r)), exp(-c KL(p|r))) for r = w p + (1 - w) q.

    Args:
        p: The probabilities of held-out text, [k].
        q: The probabilities of samples, [k].
        scale: The constant c.

    Returns:
        One point for each weight w, between the limits (1, 0) for w = 0 and (0, 1) for w = 1.
    """
    mixtures = [w * p + (1 - w) * q for w in WEIGHTS]
    inner = [[np.exp(-scale * kl(q, r)), np.exp(-scale * kl(p, r))] for r in mixtures]
    return np.array([[1.0, 0.0], *inner, [0.0, 1.0]])


def kl(p: Float[np.ndarray, "k"], r: Float[np.ndarray, "k"]) -> float:
    """Return sum p log(p / r) over the entries where p is positive, in nats.

    Args:
        p: Probabilities, [k].
        r: Probabilities, [k], positive where p is.
    """
    positive = p > 0
    # Rounding may give a number below 0 where p and r are nearly equal.
    return max(0.0, float((p[positive] * np.log(p[positive] / r[positive])).sum()))


def frontier_area(p: Float[np.ndarray, "k"], q: Float[np.ndarray, "k"], scale: float = SCALE) -> float:
    """Compute the area between the divergence frontier and the axes, by the trapezoidal rule.

    Args:
        p: The probabilities of held-out text, [k].
        q: The probabilities of samples, [k].
        scale: The constant c.

    Returns:
        The area. It is the same with p and q exchanged.
    """
    x, y = divergence_frontier(p, q, scale).T
    return float(-np.trapezoid(y, x))  # x falls along the frontier


def _measure(text: MeasuredText, context: TextContext) -> dict[str, Any]:
    """Compute MAUVE with the range over seeds of k-means."""
    found = mauve_score(text.judged.last, context.reference.judged.last, context.seed, device=context.device)
    return {
        "mauve": {"value": found.value, "low": min(found.seeds), "high": max(found.seeds)},
        "seeds": list(found.seeds),
        "clusters": found.clusters,
        "components": found.components,
    }


MAUVE = TextMetric(
    _measure,
    (Column("mauve", "highest", "MAUVE against held-out text: mean over 5 seeds of k-means, least and greatest"),),
    frozenset({"judge"}),
)
