"""The objective as a module: corrupt, call the network, score. What DDP and FSDP wrap."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from m2s import validation
from m2s.heads import Head
from m2s.heads.output import call_model, check_model
from m2s.losses.score_entropy import score_entropy
from m2s.ops.last_layer import Output

Loss = Callable[[Head, Output, Tensor, Tensor, Tensor], Tensor]
Model = Callable[..., Output]


def stratified_times(
    count: int,
    low: float,
    high: float,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Float[Tensor, "count"]:
    """`count` times in [low, high), one in each of `count` equal intervals, in random order (float64)."""
    validation.positive_int("count", count)
    if not 0 <= low < high <= 1:
        raise ValueError(f"the interval [{low}, {high}) of times must lie in [0, 1] and not be empty")
    u = torch.rand(count, generator=generator, dtype=torch.float64, device=device)
    order = torch.randperm(count, generator=generator, device=device)
    return low + (high - low) * ((order + u) / count).clamp(max=1 - 1e-12)


def apply_weight(terms: Float[Tensor, "B *site"], weight: Float[Tensor, "B *site"] | None) -> Float[Tensor, "B *site"]:
    """The terms of each site times its weight, and 0 where that is 0 whatever the term; None weighs all as one."""
    if weight is None:
        return terms
    validation.same_shape("weight", weight, "x_0", terms)
    return torch.where(weight == 0, 0, weight * terms)


class Objective(nn.Module):
    """forward(x_0, t) -> nats per site [B, L]: x_t ~ P_t(.|x_0), the network at (x_t, t), the loss of its output.

    The network sees times in torch's default dtype and never outside [t_min, 1 - t_min]; the process does. `weight` [B, L]
    multiplies the loss of each site (zero for padding). A `condition` [B, ...] is the network's third argument: hiding it now
    and then, as guidance needs, is the network's business. `loss` is any function of (head, output, x_0, x_t, t).
    """

    def __init__(
        self,
        model: Model,
        head: Head,
        loss: Loss = score_entropy,
        t_min: float = 1e-3,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
        if not 0 < t_min < 0.5:
            raise ValueError(f"t_min is {t_min}, but it must lie in (0, 0.5)")
        check_model(model, head.process)
        self.model, self.head, self.loss, self.t_min, self.generator = model, head, loss, t_min, generator

    def forward(
        self,
        x_0: Int[Tensor, "B *site"],
        t: Float[Tensor, "B"],
        weight: Float[Tensor, "B *site"] | None = None,
        condition: Tensor | None = None,
    ) -> Float[Tensor, "B *site"]:
        process = self.head.process
        if condition is not None:
            validation.one_per_example("condition", condition, "x_0", x_0)
        x_t = process.corrupt(x_0, t, self.generator)
        seen = t.clamp(self.t_min, 1 - self.t_min).to(torch.get_default_dtype())
        output = call_model(self.model, process, x_t, seen, condition)
        return apply_weight(self.loss(self.head, output, x_0, x_t, t), weight)
