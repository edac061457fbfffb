"""The bound on held-out data during training, the same samples and the same noise each time, over all processes."""

import math
from typing import Any

import torch

from m2s.objective import elbo
from m2s.train.noise import derived_seed
from m2s.train.update import Learner

ROWS, LOGITS = 256, 2**30  # greatest numbers of samples and of logits in a call: times are stratified over its samples


def validate(learner: Learner) -> dict[str, float]:
    """Bits per site of the bound and of its terms, its standard error over samples, and the perplexity per site."""
    run, source, world, model = learner.config.run, learner.source, learner.world, learner.model
    count = min(run.validation_samples, source.held_out)
    rows = max(1, min(ROWS, LOGITS // (source.length * learner.head.process.states)))
    starts = list(range(0, count, rows))
    total = torch.zeros(5, dtype=torch.float64, device=world.device)
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

        bound = elbo(network, learner.head, batch.x_0.long(), run.validation_passes, run.t_min, learner.loss, generator)
        terms = [bound.nats, bound.integral, bound.prior, bound.reconstruction, bound.nats**2]
        if counted:
            total += torch.stack([term.sum() for term in terms])
    model.train(training)
    nats, integral, prior, reconstruction, square = (world.sum(total) / count).tolist()
    bits = 1 / (source.length * math.log(2))
    error = math.sqrt(max(square - nats**2, 0.0) / max(count - 1, 1))
    return {
        "validation_bits": nats * bits,
        "validation_error": error * bits,
        "validation_perplexity": math.exp(min(nats / source.length, 700.0)),
        "validation_integral": integral * bits,
        "validation_prior": prior * bits,
        "validation_reconstruction": reconstruction * bits,
    }
