"""The training objective as a module: corrupt, call the network, compute the loss."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from m2s import validation
from m2s.heads import Head
from m2s.heads.output import call_model, check_batch, check_model, hide_padding
from m2s.losses.registry import Loss
from m2s.losses.score_entropy import score_entropy
from m2s.losses.weighted_sum import apply_weight, fused_rows, weighted_sum
from m2s.ops import linear_loss, uses_triton
from m2s.ops.last_layer import Output, Unprojected
from m2s.process.chain import snap_times, time_interval

Model = Callable[..., Output]
"""A network: model(x_t, t) or model(x_t, t, condition)."""

__all__ = ["Loss", "Model", "Objective", "TrainingObjective", "apply_weight", "stratified_times"]


def stratified_times(
    count: int,
    low: float,
    high: float,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Float[Tensor, "count"]:
    """Draw times with one in each of `count` equal intervals of [low, high), in random order.

    Args:
        count: The number of times.
        low: The smallest time.
        high: The end of the interval.
        generator: The random numbers; None: torch's default generator.
        device: The device of the result.

    Returns:
        The times in float64, [count].

    Raises:
        ValueError: The interval is empty or not inside [0, 1].

    Example:
        >>> t = m2s.stratified_times(64, 1e-3, 1 - 1e-3)        # one time for each example of a batch
        >>> x_t = process.corrupt(torch.randint(256, (64, 16)), t)
    """
    validation.positive_int("count", count)
    validation.generator("generator", generator)
    for name, value in (("low", low), ("high", high)):
        validation.in_interval(name, value, "[0, 1]")
    if not low < high:
        raise ValueError(f"the interval [{low}, {high}) of times must lie in [0, 1] and not be empty")
    u = torch.rand(count, generator=generator, dtype=torch.float64, device=device)
    order = torch.randperm(count, generator=generator, device=device)
    return low + (high - low) * ((order + u) / count).clamp(max=1 - 1e-12)


class NetworkLoss(nn.Module):
    """A network, the meaning of its output and a loss. Subclasses define `forward`.

    Args:
        model: The network, called as model(x_t, t) or model(x_t, t, condition).
        head: The meaning of its output.
        loss: A function of (head, output, x_0, x_t, t) that returns nats per position.
        t_min: The network sees no times nearer to 0 and 1 than this.
        generator: The random numbers of the corruption; None: torch's default generator.

    Raises:
        ValueError: `t_min` is not in (0, 0.5), or the network has no embedding for the mask.
        TypeError: `head` is not a head, or `model` is not a network.
    """

    def __init__(
        self, model: Model, head: Head, loss: Loss, t_min: float = 1e-3, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
        validation.in_interval("t_min", t_min, "(0, 0.5)")
        check_model(model, head.process)
        self.model, self.head, self.loss, self.t_min, self.generator = model, head, loss, t_min, generator

    def network_time(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Return the times that the network sees, [B]: clamped, and in torch's default dtype.

        Args:
            t: Times, [B].
        """
        return t.clamp(self.t_min, 1 - self.t_min).to(torch.get_default_dtype())


class Objective(NetworkLoss):
    """The loss of a network on clean tokens: x_t ~ P_t(.|x_0), the network at (x_t, t), the loss of its output.

    The network sees times in torch's default dtype, clamped to [t_min, 1 - t_min]; the process sees the exact times.

    Example:
        >>> objective = m2s.Objective(model, m2s.Posterior(process))
        >>> loss = objective(x_0).mean()  # draws its own times; objective(x_0, t) takes yours

    Args:
        model: The network, called as model(x_t, t) or model(x_t, t, condition).
        head: The meaning of its output.
        loss: A function of (head, output, x_0, x_t, t) that returns nats per position.
        t_min: The network sees no times nearer to 0 and 1 than this.
        generator: The random numbers of the corruption; None: torch's default generator.

    Raises:
        ValueError: `t_min` is not in (0, 0.5), or the network has no embedding for the mask.
        TypeError: `head` is not a head, or `model` is not a network.
    """

    def __init__(
        self,
        model: Model,
        head: Head,
        loss: Loss = score_entropy,
        t_min: float = 1e-3,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(model, head, loss, t_min, generator)

    def forward(
        self,
        x_0: Int[Tensor, "B *site"],
        t: Float[Tensor, "B"] | None = None,
        weight: Float[Tensor, "B *site"] | None = None,
        condition: Tensor | None = None,
    ) -> Float[Tensor, "B *site"]:
        """Compute the loss of every position.

        Args:
            x_0: Clean tokens, [B, L].
            t: A time for each example, [B]. None: `times(len(x_0))`, stratified times that make the mean over examples of the
                sum over positions an estimate of the integral, up to the factor `end - start` of the interval.
            weight: The weight of each position, [B, L]; 0 for padding. None: all have weight 1. A network with a `padding_id`
                sees it at padding, so that nothing there reaches the loss.
            condition: The network's third argument, [B, ...], such as a class label. Dropping it at random, as guidance needs,
                is the network's task.

        Returns:
            The weighted loss in nats per position, [B, L].
        """
        process = self.head.process
        check_batch("x_0", x_0, self.model)
        if condition is not None:
            validation.one_per_example("condition", condition, "x_0", x_0)
        if t is None:
            t = self.times(len(x_0), x_0.device)
        x_t = process.corrupt(x_0, t, self.generator)
        seen = hide_padding(self.model, x_t, None if weight is None else weight == 0)
        output = call_model(self.model, process, seen, self.network_time(t), condition)
        terms = self.loss(self.head, output, x_0, x_t, t)
        validation.same_shape("the loss", terms, "x_0", x_0)
        return apply_weight(terms, weight)

    def times(self, count: int, device: torch.device | str | None = None) -> Float[Tensor, "count"]:
        """Draw stratified times between t_min and the end of time, as `m2s train` and `m2s.elbo` do.

        Args:
            count: The number B of examples.
            device: The device of the result.

        Returns:
            Times, [B], float64. For a finite chain they are ends of its steps.
        """
        start, end = time_interval(self.head.process, self.t_min)
        return snap_times(self.head.process, stratified_times(count, start, end, self.generator, device))


class TrainingObjective(NetworkLoss):
    """`Objective` with precomputed noisy tokens and weights. The trainer compiles it, and DDP and FSDP wrap it.

    It returns the weighted sum of the loss, so that a fused op can compute the gradient together with the value.

    Args:
        model: The network.
        head: The meaning of its output.
        loss: The training loss.
        t_min: The network sees no times nearer to 0 and 1 than this.
    """

    model: nn.Module

    def __init__(self, model: nn.Module, head: Head, loss: Loss, t_min: float) -> None:
        super().__init__(model, head, loss, t_min)
        self.compiled: Callable[..., tuple[Tensor, Tensor]] = self.score

    def forward(
        self,
        x_0: Int[Tensor, "B L"],
        x_t: Int[Tensor, "B L"],
        t: Float[Tensor, "B"],
        weight: Float[Tensor, "B L"],
        label: Int[Tensor, "B"] | None = None,
        max_masked: int | None = None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B L"]]:
        """Compute the weighted sum of the loss.

        Args:
            x_0: Clean tokens, [B, L].
            x_t: Noisy tokens, [B, L].
            t: A time for each example, [B].
            weight: The weight of each position, [B, L].
            label: The class of each example, [B].
            max_masked: As in `m2s.losses.weighted_sum`.

        Returns:
            The sum, and its terms [B, L], which carry no gradient.
        """
        output: Output = self.model(hide_padding(self.model, x_t, weight == 0), self.network_time(t), label)
        with torch.autocast(x_t.device.type, enabled=False):
            rows = fused_rows(self.loss, self.head, output, x_0, x_t, t, weight, max_masked)
            if rows is not None:
                value, terms = linear_loss.weighted_sum(*rows.arguments)
                return value, rows.at_positions(terms)
            parts = (output.hidden, output.weight, output.bias) if isinstance(output, Unprojected) else (output,)
            # Kernels are opaque to the compiler: only the loss of logits, or of a last layer without kernels, is compiled.
            kernels = isinstance(output, Unprojected) and uses_triton(output.hidden)
            return (self.score if kernels else self.compiled)(x_0, x_t, t, weight, max_masked, *parts)

    def score(
        self, x_0: Tensor, x_t: Tensor, t: Tensor, weight: Tensor, max_masked: int | None, *parts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the sum and its terms from logits, or from hidden states and the last layer's weight and bias.

        Args:
            x_0: Clean tokens, [B, L].
            x_t: Noisy tokens, [B, L].
            t: A time for each example, [B].
            weight: The weight of each position, [B, L].
            max_masked: As in `m2s.losses.weighted_sum`.
            *parts: Logits [B, L, V]; or hidden states [B, L, D], weight [V, D] and bias [V] of the last layer.

        Returns:
            The sum, and its terms [B, L], which carry no gradient.
        """
        output = parts[0] if len(parts) == 1 else Unprojected(*parts)
        return weighted_sum(self.loss, self.head, output, x_0, x_t, t, weight, max_masked)
