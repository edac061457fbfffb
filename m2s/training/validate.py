"""The NELBO on held-out data during training, with the same examples and the same noise each time."""

import math
from typing import Any

import torch

from m2s.heads.output import hide_padding
from m2s.losses import elbo
from m2s.rng import derived_seed
from m2s.training.trainer import Trainer

# The largest numbers of examples and of logits in a call. Times are stratified over the examples of a call. On a CPU fewer
# logits are as fast, and the memory may be that of a laptop.
ROWS, LOGITS = 256, {"cuda": 2**30, "cpu": 2**26}


def validation_rows(device: torch.device, logits: int) -> int:
    """Return the number of examples of a call of the network in validation.

    Args:
        device: The device.
        logits: The number of logits of an example.
    """
    return max(1, min(ROWS, LOGITS.get(device.type, LOGITS["cpu"]) // logits))


def validate(trainer: Trainer) -> dict[str, float]:
    """Evaluate the NELBO on held-out data, over all processes.

    Positions count by their weight, padding not at all. With b_i the weighted NELBO of example i and w_i the weight of its
    positions, the estimate is R = sum b_i / sum w_i, and its standard error is sqrt(n/(n-1) sum (b_i - R w_i)^2) / sum w_i.

    Args:
        trainer: The trainer. Every process must call this.

    Returns:
        Bits per position of the NELBO and of its terms, its standard error over examples, and the perplexity per position.
    """
    run, source, world, model = trainer.config.run, trainer.source, trainer.world, trainer.model
    count = min(run.validation_samples, source.held_out)
    rows = validation_rows(world.device, source.length * trainer.head.process.states)
    starts = list(range(0, count, rows))
    total = torch.zeros(8, dtype=torch.float64, device=world.device)
    training = model.training
    model.eval()
    for turn in range(-(-len(starts) // world.size)):
        number = turn * world.size + world.rank
        counted = number < len(starts)  # a sharded network must be called by all processes or by none
        start = starts[number if counted else 0]
        # Evenly spread, so that a part of an ordered set represents all of it.
        indices = torch.arange(start, min(start + rows, count)) * source.held_out // count
        batch = source.validation(indices).to(world.device)
        label = batch.label if trainer.config.network.labels else None
        generator = torch.Generator(world.device).manual_seed(derived_seed(run.seed, "validation", start))

        padded = None if batch.weight is None else batch.weight == 0

        def network(
            x_t: torch.Tensor, t: torch.Tensor, label: torch.Tensor | None = label, padded: torch.Tensor | None = padded
        ) -> Any:
            with trainer.autocast():
                return model(hide_padding(model, x_t, padded), t, label)

        x_0, passes = batch.x_0.long(), run.validation_passes
        nelbo = elbo(network, trainer.head, x_0, passes, run.t_min, trainer.nelbo_loss, generator, batch.weight)
        weight = torch.full_like(nelbo.nats, source.length) if batch.weight is None else batch.weight.double().sum(-1)
        terms = [weight, nelbo.nats, nelbo.integral, nelbo.prior, nelbo.reconstruction]
        terms += [nelbo.nats**2, nelbo.nats * weight, weight**2]
        if counted:
            total += torch.stack([term.sum() for term in terms])
    model.train(training)
    weights, *sums = world.sum(total).tolist()
    nats, integral, prior, reconstruction, square, cross, weight_square = (value / weights for value in sums)
    deviation = max(square - 2 * nats * cross + nats**2 * weight_square, 0.0) * count / max(count - 1, 1)
    bits = 1 / math.log(2)
    return {
        "validation_bits": nats * bits,
        "validation_error": math.sqrt(deviation / weights) * bits,
        "validation_perplexity": math.exp(min(nats, 700.0)),
        "validation_integral": integral * bits,
        "validation_prior": prior * bits,
        "validation_reconstruction": reconstruction * bits,
    }
