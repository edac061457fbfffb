"""Changes of training that experiments/candidates.py compares: objectives, initial weights and repeated examples.

What can be expected of each candidate, before a measurement:

repeat-2, repeat-4: each sequence of the batch r times, once in each of r equal parts of the quantiles of t. Split the variance
    of the gradient of one (x_0, t, x_t) into s_x (of its mean given x_0), s_t (of its mean given t) and the rest s. Stratified
    times remove s_t. With N calls of the network the variance is (s_x + s)/N without repeats. With them it is (r s_x + s')/N,
    where s' <= s, because times are also stratified within a sequence. So repeats help only if s - s' > (r - 1) s_x: where the
    times of one sequence matter more than which sequence it is. They save data, not calls of the network.

time-free, time-free-averaged: a Rao-Blackwellized form of the same objective. Given x_0 and x_t, the time is still random. With
    D of L tokens changed, p(t | x_0, x_t) is proportional to q(t) a_t^(L - D) (1 - a_t)^D, where q is the density of t
    and a_t the probability that a token is unchanged. If the network does not see the time, one call serves all these times:

        E[w(t) loss_t(x_0, x_t)] = E[ E[w(t') loss_t'(x_0, x_t) | x_0, x_t] ],   t' ~ p(. | x_0, x_t)

    The inner mean is taken over stratified draws t'. It removes the variance of w(t) loss_t given (x_0, x_t) only. The
    relative spread of t' is about 1/sqrt(D), so little is removed for D much larger than 1, and less for longer sequences. A
    network without time cannot know the noise level exactly, which may cost more: hence two rows. Under masks the same
    idea is RADD's weight (L + 1)/n (`m2s.losses.any_order`).

    The same is not possible for the noise of one site. The exact mean over x_t^i with all other sites fixed needs one call of
    the network for each value of x_t^i, since its output at i depends on x_t^i. With the output at the drawn value in place
    of the others, the minimizer is the posterior given all of x_t and not the leave-one-out distribution: another objective.

bias-control: a control variate whose mean is exactly zero. With the constant output log pi, pi the unigram distribution, the
    expected gradient of the loss for these logits is 0, because pi is the best constant. So the gradient of
    loss(log pi + bias) for the bias can be subtracted from that of the loss. Near the plateau the two are nearly equal, and the
    noise of the bias's gradient vanishes. For any other weight the factor d logits/d weight depends on x_t, the
    mean is not zero, and its value is what the network must learn. So only the bias gains.

loss-clip, no-clip: the loss of an example is scaled to at most log K nats per token, that of the uniform distribution, and the
    norm of the gradient is not clipped. In `owt-fast` the norm is far above its limit of 1 in every step. So clipping is a
    normalization there, and without it steps with large gradients have more influence. Clipping a loss is biased: hard
    examples and late times get less weight. `no-clip` separates the two changes.

unigram-bias: the last layer's bias starts at log pi. With the exact offset this is the best network without context at every t,
    so that a run starts at the level of the plateau. It can save the tokens of the descent to it. For scores (`sedd`) the
    best constant depends on t and x_t and is no bias.

tied, embedding-0.02: one matrix for embedding and last layer, with the smaller standard deviation 0.02. At the start the
    residual stream is the embedding of x_t, so that a tied layer predicts the current token. The leave-one-out distribution
    must not contain that evidence, and successors of a chain are not similar to it. So it should not help here.
    `embedding-0.02` separates the scale.

beta2-0.9, beta2-0.99: of AdamW, for embeddings, biases, modulation and last layer. Muon has the other matrices and no beta2.
    The warmup has 50 steps, so that averages over 10, 20 or 100 steps differ mostly at the start.

batch-8, batch-schedule, lr-6e-3: twice as many steps of half the size; in the schedule only for the first 102,400 tokens. The
    length of a step does not depend on that of the gradient, so the way per token doubles, and so does the noise. Early
    gradients agree, so that small batches are cheap early and cost later. `lr-6e-3` has the same way per token with the large
    batches.

qk-norm, uniform-t, importance-0.3: options of m2s that were measured once on text.

Self-conditioning is not measured (experiments/PLAN.md).

Repeats and control variates change the variance of the gradient and not its mean. So that variance is also measured directly,
at two networks each with and without time: one that leaves the plateau and one at the end of a run.
"""

import abc
import functools
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))  # for the import below, also where this file is loaded by its path
import plateau

from m2s.heads import Head
from m2s.losses.objective import TrainingObjective
from m2s.losses.weighted_sum import apply_weight, weighted_sum
from m2s.process import RankOne
from m2s.process.chain import time_interval
from m2s.training.trainer import LocalBatch

LOSS_LIMIT = math.log(plateau.VOCAB)  # nats per token, weighted by the density of t
DRAWS, GRID = 4, 1024  # times drawn from p(t | x_0, x_t), and the number of times among which they are drawn


class FromOutput(TrainingObjective, abc.ABC):
    """An objective whose value and terms are computed from the output of the network, by `evaluate`."""

    def forward(
        self, x_0: Tensor, x_t: Tensor, t: Tensor, weight: Tensor, label: Tensor | None = None, max_masked: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the value and the terms, as `TrainingObjective.forward` does."""
        value, terms = self.evaluate(self.model(x_t, self.network_time(t), label), x_0, x_t, t, weight)
        return value, terms.detach()

    @abc.abstractmethod
    def evaluate(self, output: Tensor, x_0: Tensor, x_t: Tensor, t: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value and the terms.

        Args:
            output: The output of the network, [B, L, K].
            x_0: Clean tokens, [B, L].
            x_t: Noisy tokens, [B, L].
            t: A time for each example, [B].
            weight: The weight of each position, [B, L].
        """


class ClippedObjective(FromOutput):
    """The objective with the loss of each example scaled to at most `LOSS_LIMIT`; its terms are those before the clip."""

    def evaluate(self, output: Tensor, x_0: Tensor, x_t: Tensor, t: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        terms = apply_weight(self.loss(self.head, output, x_0, x_t, t), weight)
        return clip_examples(terms.sum(-1), LOSS_LIMIT * x_0.shape[1] / len(x_0)).sum(), terms


def clip_examples(losses: Tensor, limit: float) -> Tensor:
    """Scale each loss to at most a limit. The factor has no gradient, so the gradient is scaled too.

    Args:
        losses: The loss of each example, [B].
        limit: The limit.
    """
    return losses * (limit / losses.detach().clamp(min=limit))


class BiasControl(TrainingObjective):
    """The objective minus the gradient that the bias of the last layer has where the network predicts the unigram distribution.

    Args:
        given: The arguments of `TrainingObjective`. The head has the exact offset.
        unigram: The logarithms of the unigram distribution, [K].
    """

    def __init__(self, *given: Any, unigram: Tensor) -> None:
        super().__init__(*given)
        self.unigram = unigram

    def forward(self, x_0: Tensor, x_t: Tensor, t: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        """Return the value and the terms of `TrainingObjective.forward`; only the gradient of the bias differs."""
        value, terms = super().forward(x_0, x_t, t, weight, *others)
        bias = last_bias(self.model)
        logits = nn.functional.pad(self.unigram, (0, len(bias) - len(self.unigram))) + (bias - bias.detach())
        control, _ = weighted_sum(self.loss, self.head, logits.expand(*x_t.shape, -1), x_0, x_t, t, weight)
        return value - (control - control.detach()), terms


class AveragedTimes(FromOutput):
    """The objective with the loss averaged over times drawn given (x_0, x_t), for a network that does not see the time.

    Args:
        given: The arguments of `TrainingObjective`. The process of the head is rank-one.
        importance: c of the density of t.
    """

    def __init__(self, *given: Any, importance: float) -> None:
        super().__init__(*given)
        self.importance = importance

    def evaluate(self, output: Tensor, x_0: Tensor, x_t: Tensor, t: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        uniform = (torch.arange(DRAWS) + torch.rand(len(x_0), DRAWS, dtype=torch.float64)) / DRAWS
        times, weights = grid_times(self.head, self.t_min, self.importance)
        index = posterior_indices(self.head.process.rank_one, times, x_0.ne(x_t).sum(-1), x_0.shape[1], uniform)
        factor = weight / (weights[0] / (times[0] + self.importance) * (t + self.importance)).unsqueeze(-1)
        parts = [
            apply_weight(self.loss(self.head, output, x_0, x_t, times[one]), factor * weights[one].unsqueeze(-1) / DRAWS)
            for one in index.unbind(-1)
        ]
        terms = torch.stack(parts).sum(0)
        return terms.sum(), terms


@functools.lru_cache
def grid_times(head: Head, t_min: float, importance: float) -> tuple[Tensor, Tensor]:
    """Return `GRID` times at equal quantiles of the density 1/(t + c), and their weights 1/q(t), both in float64.

    Args:
        head: The head.
        t_min: The least time.
        importance: c.
    """
    low, high = time_interval(head.process, t_min)
    log_range = math.log((high + importance) / (low + importance))
    quantile = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    times = (low + importance) * torch.exp(log_range * quantile) - importance
    return times, (times + importance) * log_range


def posterior_indices(process: RankOne | None, times: Tensor, changed: Tensor, length: int, uniform: Tensor) -> Tensor:
    """Draw from p(t | x_0, x_t) by its inverse distribution function, among times that are equally likely beforehand.

    Args:
        process: The process.
        times: The times, [G].
        changed: The number of positions of each example with x_t != x_0, [B].
        length: The number of positions L.
        uniform: Uniform numbers, [B, S].

    Returns:
        Indices of `times`, [B, S].
    """
    assert process is not None
    same = process.alpha(times) + process.mixing(times).clean
    count = changed.unsqueeze(-1)
    cumulative = torch.softmax((length - count) * same.log() + count * torch.log1p(-same), -1).cumsum(-1)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:]).clamp(max=len(times) - 1)


def last_bias(model: nn.Module) -> Tensor:
    """Return the bias of the last layer of a transformer."""
    layer = model.head
    assert isinstance(layer, nn.Linear)
    return layer.bias


@torch.no_grad()
def start_at_unigram(model: nn.Module, unigram: Tensor) -> None:
    """Set the bias of the last layer to the logarithms of the unigram distribution.

    Args:
        model: The network.
        unigram: The logarithms, [K].
    """
    last_bias(model)[: len(unigram)] = unigram


def tie(model: nn.Module, unigram: Tensor) -> None:
    """Give the last layer the matrix of the embedding.

    Args:
        model: The network.
        unigram: Not used.
    """
    assert isinstance(model.head, nn.Linear) and isinstance(model.embedding, nn.Embedding)
    model.head.weight = model.embedding.weight


def repeat_examples(batch: LocalBatch, repeats: int) -> LocalBatch:
    """Replace a batch of n examples by its first n/r, each r times, once in each of r equal parts of the ordered times.

    Args:
        batch: A batch with stratified times and no label.
        repeats: r, a divisor of n.
    """
    parts = batch.t.argsort().unflatten(0, (repeats, -1)).sort(-1).values  # by example, whose strata are in random order
    order = parts.t().flatten()
    x_0 = batch.batch.x_0[: parts.shape[1]].repeat_interleave(repeats, 0)
    return LocalBatch(batch.rows, type(batch.batch)(x_0, None, None), batch.t[order], batch.weight[order])
