"""Training converges: every head overfits a few sequences, every method learns a distribution of two positions."""

import itertools
import math

import numpy as np
import pytest
import torch

import m2s
from m2s.losses import prior_nats
from m2s.methods import METHODS
from m2s.training import train
from m2s.training.build import nelbo_loss
from m2s.training.config import resolve
from small_runs import InMemorySource, small

# mdlm and m2s-hybrid equal md4 and gidd, and duo ends as udlm. tauldr-absorb equals md4. The weights of gidd-clipped depend on
# x_0, so its minimum is another distribution. The schedule of d3pm-gaussian is for many levels: three are not mixed at its end.
LEFT_OUT = ("mdlm", "m2s-hybrid", "udlm", "gidd-clipped", "d3pm-gaussian", "tauldr-absorb")
NAMES = [name for name in METHODS if name not in LEFT_OUT]
# Many small attention heads: with two, networks of scores and rates often attend to no more than one token.
SETTINGS = {"importance": 0.1, "network__width": 32, "network__heads": 8, "network__dropout": 0.0}
SETTINGS |= {"optimizer__lr": 5e-3, "optimizer__clip": 10.0, "optimizer__ema": 0.97, "optimizer__beta2": 0.99}
SETTINGS |= {"micro_batch": None, "log_every": 1000, "validate_every": 0, "validation_samples": 1, "save_every": 1000}
# Hundreds of steps of each method: their shapes are checked in two steps, in test_cli.py.
many_steps = pytest.mark.usefixtures("without_shape_hook")


def entropy(counts: torch.Tensor) -> float:
    """The entropy in bits."""
    probabilities = counts[counts > 0] / counts.sum()
    return float(-(probabilities * probabilities.log2()).sum())


@torch.no_grad()
def exact_nelbo(model, head, rows: torch.Tensor, loss, t_min: float, nodes: int = 32) -> float:
    """The NELBO in bits, averaged over `rows`, without random numbers: every x_t, and Gauss-Legendre in logit t."""
    process = head.process
    x_0, counts = rows.unique(dim=0, return_counts=True)
    length = x_0.shape[1]
    x_t = torch.cartesian_prod(*[torch.arange(process.states)] * length)
    end = process.last_time(t_min)
    low, high = (math.log(t / (1 - t)) for t in (t_min, min(end, 1 - 1e-7)))
    node, weight = np.polynomial.legendre.leggauss(nodes)
    times = 1 / (1 + np.exp(-(low + (high - low) * (node + 1) / 2)))
    weight = weight * (high - low) / 2 * times * (1 - times)

    def at(time: float, rows: torch.Tensor) -> torch.Tensor:
        return torch.full((len(rows),), time, dtype=torch.float64)

    def mean(time: float, value) -> torch.Tensor:
        """sum over x_t of P(x_t|x_0) value(x_0, x_t), for each x_0."""
        output = model(x_t, at(time, x_t).clamp(t_min, 1 - t_min).float())
        probabilities = process.rows(x_0, at(time, x_0))[:, torch.arange(length), x_t].prod(-1)
        start, end = probabilities.nonzero(as_tuple=True)
        values = value(head, output[end], x_0[start], x_t[end], at(time, end)).double().sum(-1)
        return torch.zeros(len(x_0), dtype=torch.float64).index_add(0, start, probabilities[start, end] * values)

    def last(head, output, x_0, x_t, t):
        return -head.last_step(output, x_t, t).gather(-1, x_0.unsqueeze(-1)).squeeze(-1)

    nats = sum(w * mean(t, loss) for t, w in zip(times, weight, strict=True)) + mean(t_min, last)
    nats += prior_nats(head, lambda x_t, t: model(x_t, t.clamp(max=1 - t_min).float()), x_0, end).sum(-1)
    return float((nats * counts).sum() / counts.sum()) / math.log(2)


def trained_nelbo(out, source: InMemorySource, method: str, t_min: float, **changes: object) -> float:
    config = small(out, method=method, t_min=t_min, **SETTINGS, **changes)
    train(config, source)
    model, head = m2s.load(out)
    return exact_nelbo(model, head, source.rows, nelbo_loss(resolve(config).head), t_min)


def two_sites() -> tuple[InMemorySource, float]:
    """Pairs of three tokens with probabilities in 64ths, and the entropy of that distribution in bits."""
    counts = [12, 1, 5, 2, 18, 3, 9, 4, 10]
    pairs = list(itertools.product(range(3), repeat=2))
    rows = torch.tensor([pair for pair, count in zip(pairs, counts, strict=True) for _ in range(count)])
    return InMemorySource(rows, 3), entropy(torch.tensor(counts))


@pytest.mark.parametrize("process", [m2s.Uniform(3, m2s.Linear()), m2s.Absorbing(3, m2s.LogLinear())], ids=str)
def test_the_nelbo_of_the_exact_score_is_the_entropy(process):
    """A check of `exact_nelbo`, with the exact log p_t(x^{i->y}) / p_t(x) as the network."""
    source, truth = two_sites()

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        rows = process.rows(source.rows, t[:1].double().expand(len(source.rows)))
        joint = torch.einsum("na,nb->ab", rows[:, 0], rows[:, 1])
        score = torch.stack([joint[:, x_t[:, 1]].T, joint[x_t[:, 0]]], 1)
        return torch.log(score / score.gather(-1, x_t.unsqueeze(-1))).nan_to_num()

    found = exact_nelbo(model, m2s.LogScore(process), source.rows, m2s.score_entropy, 3e-3)
    assert truth - 1e-5 < found < 1.003 * truth


@many_steps
@pytest.mark.parametrize("method", ["m2s", "m2s-offset", "sedd", "sedd-absorb", "neural-ctmc", "ar"])
def test_every_head_overfits_sixteen_sequences(tmp_path, method):
    """They have four bits. Independent positions would have more than 4.7. The test below has the methods with the same
    heads."""
    rows = torch.tensor(list(itertools.product(range(3), repeat=3)))
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:16]]
    assert sum(entropy(torch.bincount(column)) for column in rows.T) > 4.7
    found = trained_nelbo(tmp_path / "run", InMemorySource(rows, 3), method, 1e-2, steps=300, batch=256, network__depth=2)
    assert 4 - 1e-3 < found < 1.1 * 4


@many_steps
@pytest.mark.parametrize("method", NAMES)
def test_every_method_learns_a_distribution_of_two_positions_to_within_two_percent_of_its_entropy(tmp_path, method):
    source, truth = two_sites()
    batch = 128 if method in ("m2s", "sedd", "neural-ctmc", "tauldr") else 64
    found = trained_nelbo(tmp_path / "run", source, method, 3e-3, steps=400, batch=batch)
    assert truth - 1e-3 < found < 1.02 * truth
