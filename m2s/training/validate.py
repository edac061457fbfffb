"""The bound on held-out data during training, the same samples and the same noise each time, over all processes."""

import math
from typing import Any

import torch

from m2s.losses import elbo
from m2s.rng import derived_seed
from m2s.training.trainer import Trainer

ROWS, LOGITS = 256, 2**30  # greatest numbers of samples and of logits in a call: times are stratified over its samples


def validate(learner: Trainer) -> dict[str, float]:
    """Bits per site of the bound and of its terms, its standard error over samples, and the perplexity per site.

    Sites count by their weight, padding not at all: with b_i the weighted bound of sample i and w_i the weight of its sites,
    R = sum b_i / sum w_i, and its error is sqrt(n/(n-1) sum (b_i - R w_i)^2) / sum w_i.
    """
    run, source, world, model = learner.config.run, learner.source, learner.world, learner.model
    count = min(run.validation_samples, source.held_out)
    rows = max(1, min(ROWS, LOGITS // (source.length * learner.head.process.states)))
    starts = list(range(0, count, rows))
    total = torch.zeros(8, dtype=torch.float64, device=world.device)
    training = model.training
    model.eval()
    for turn in range(-(-len(starts) // world.size)):
        number = turn * world.size + world.rank
        counted = number < len(starts)  # sharded networks are called by all processes or by none
        start = starts[number if counted else 0]
        # evenly spread, so that a part of an ordered set stands for all of it
        indices = torch.arange(start, min(start + rows, count)) * source.held_out // count
        batch = source.validation(indices).to(world.device)
        label = batch.label if learner.config.network.labels else None
        generator = torch.Generator(world.device).manual_seed(derived_seed(run.seed, "validation", start))

        def network(x_t: torch.Tensor, t: torch.Tensor, label: torch.Tensor | None = label) -> Any:
            with learner.autocast():
                return model(x_t, t, label)

        x_0, passes = batch.x_0.long(), run.validation_passes
        bound = elbo(network, learner.head, x_0, passes, run.t_min, learner.bound, generator, batch.weight)
        weight = torch.full_like(bound.nats, source.length) if batch.weight is None else batch.weight.double().sum(-1)
        terms = [weight, bound.nats, bound.integral, bound.prior, bound.reconstruction]
        terms += [bound.nats**2, bound.nats * weight, weight**2]
        if counted:
            total += torch.stack([term.sum() for term in terms])
    model.train(training)
    weights, *sums = world.sum(total).tolist()
    nats, integral, prior, reconstruction, square, cross, own = (value / weights for value in sums)
    deviation = max(square - 2 * nats * cross + nats**2 * own, 0.0) * count / max(count - 1, 1)
    bits = 1 / math.log(2)
    return {
        "validation_bits": nats * bits,
        "validation_error": math.sqrt(deviation / weights) * bits,
        "validation_perplexity": math.exp(min(nats, 700.0)),
        "validation_integral": integral * bits,
        "validation_prior": prior * bits,
        "validation_reconstruction": reconstruction * bits,
    }
