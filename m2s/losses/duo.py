"""The curriculum of DUO (Sahoo et al. 2025): uniform noise as the argmax of Gaussian noise, with softened input at first.

    w = a e_{x_0} + sqrt(1 - a^2) e,   e normal:   Pr(argmax w = .) = P_t(.|x_0) of uniform noise where T(a) = alpha_t

Instead of the embedding of x_t = argmax w, the network gets the mean embedding under softmax(w / tau), and tau decreases.
"""

import contextlib
import math
from collections.abc import Iterator
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from m2s import validation
from m2s.dtypes import to_float64
from m2s.errors import UnsupportedError
from m2s.heads import Head, Posterior
from m2s.losses.objective import Loss, NetworkLoss, apply_weight
from m2s.losses.score_entropy import score_entropy
from m2s.process import Uniform

QUADRATURE_LIMIT, QUADRATURE_STEP = 12.0, 1 / 32  # nodes of the quadrature over a normal density: its error is below rounding
MIN_RATIO, MAX_RATIO = 1e-9, 30.0  # range of the signal-to-noise ratio in the table: alpha is about 0 and about 1 at its ends


def gaussian_to_uniform(ratio: Float[Tensor, "*b"], vocab: int) -> tuple[Float[Tensor, "*b"], Float[Tensor, "*b"]]:
    """Compute the operator T: alpha and 1 - alpha of the uniform noise that is the argmax of Gaussian noise, in float64.

    alpha = K/(K-1) (int phi(v) F(v + r)^(K-1) dv - 1/K), with phi and F the density and distribution function of a standard
    normal variable and r = a / sqrt(1 - a^2). Both results are sums of positive terms, so neither loses digits by subtraction
    from 1.

    Args:
        ratio: r, the ratio of signal to noise [*b], not negative.
        vocab: The number of tokens K.

    Returns:
        alpha and 1 - alpha, each [*b].
    """
    validation.positive_int("vocab", vocab, low=2)
    validation.not_negative("ratio", ratio)
    node, weight = _normal(ratio.device)
    here = (vocab - 1) * torch.special.log_ndtr(node + ratio.double().unsqueeze(-1))
    none = (vocab - 1) * torch.special.log_ndtr(node)  # 1/K is the same integral at r = 0
    weight = weight * (vocab / (vocab - 1))
    return (weight * -here.exp() * torch.expm1(none - here)).sum(-1), (weight * -torch.expm1(here)).sum(-1)


@cache
def _normal(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return quadrature nodes and the standard normal density at them times their spacing."""
    ends = (-QUADRATURE_LIMIT, QUADRATURE_LIMIT + QUADRATURE_STEP)
    node = torch.arange(*ends, QUADRATURE_STEP, dtype=torch.float64, device=device)
    return node, torch.exp(-(node**2) / 2) * (QUADRATURE_STEP / math.sqrt(2 * math.pi))


def signal_to_noise(alpha: Float[Tensor, "*b"], beta: Float[Tensor, "*b"], vocab: int) -> Float[Tensor, "*b"]:
    """Invert `gaussian_to_uniform`: find the ratio r at which T gives alpha = 1 - beta.

    A table of log r over log(alpha / beta) gives the initial value; three Newton steps refine it to float64 precision.

    Args:
        alpha: The survival probability [*b].
        beta: 1 - alpha [*b], given separately so that it keeps its digits near t = 0.
        vocab: The number of tokens K.

    Returns:
        r [*b], float64.
    """
    wanted = torch.log(alpha.double()) - torch.log(beta.double())
    ratios, odds = _table(vocab, wanted.device)
    above = torch.searchsorted(odds, wanted).clamp(1, len(odds) - 1)
    share = (wanted - odds[above - 1]) / (odds[above] - odds[above - 1])
    log_ratio = ratios[above - 1] + share.clamp(0, 1) * (ratios[above] - ratios[above - 1])
    node, weight = _normal(wanted.device)
    for _ in range(3):
        ratio = log_ratio.exp()
        alpha_r, beta_r = gaussian_to_uniform(ratio, vocab)
        at = node + ratio.unsqueeze(-1)
        density = (vocab - 2) * torch.special.log_ndtr(at) - at**2 / 2
        slope = vocab * (weight * density.exp()).sum(-1) / math.sqrt(2 * math.pi)  # dT/dr
        log_ratio = log_ratio - (torch.log(alpha_r) - torch.log(beta_r) - wanted) * alpha_r * beta_r / (ratio * slope)
    return log_ratio.exp()


@cache
def _table(vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return log r on a grid, and log(alpha / beta) there."""
    log_ratio = torch.linspace(math.log(MIN_RATIO), math.log(MAX_RATIO), 2048, dtype=torch.float64, device=device)
    alpha, beta = gaussian_to_uniform(log_ratio.exp(), vocab)
    return log_ratio, torch.log(alpha) - torch.log(beta)


def gaussian_latent(
    process: Uniform, x_0: Int[Tensor, "B L"], t: Float[Tensor, "B"], noise: Float[Tensor, "B L K"]
) -> Float[Tensor, "B L K"]:
    """Compute w = (r e_{x_0} + e) / sqrt(1 + r^2), whose argmax is distributed as P_t(.|x_0).

    Args:
        process: The uniform process; its schedule and t determine r.
        x_0: Clean tokens [B, L].
        t: Times [B], in (0, 1).
        noise: Standard normal numbers e [B, L, K].

    Returns:
        w [B, L, K].
    """
    validation.tokens("x_0", x_0, process.vocab)
    validation.times("t", t, open_ends=True)
    time = to_float64(t)
    ratio = validation.align(
        "t", signal_to_noise(process.schedule.alpha(time), process.schedule.beta(time), process.vocab), x_0
    )
    signal = ratio.to(noise.dtype).expand(x_0.shape).unsqueeze(-1)
    return noise.scatter_add(-1, x_0.long().unsqueeze(-1), signal) / torch.sqrt(1 + signal**2)


def temperature(step: int, start: int, end: int, first: float = 0.1, last: float = 0.01) -> float:
    """Return the softmax temperature tau of a training step.

    It is `first` up to step `start`, then decreases to `last` with log tau linear in the step, and is 0 from step `end` on
    (plain loss).

    Args:
        step: The training step, counted from 0.
        start: The step at which tau begins to decrease.
        end: The first step without softening.
        first: tau at the beginning.
        last: tau just before `end`.

    Returns:
        tau.

    Raises:
        ValueError: Not 0 < last <= first, or not 0 <= start <= end.
    """
    if not (0 < last <= first and 0 <= start <= end):
        raise ValueError(f"tau falls from {first} to {last} between {start} and {end}, but 0 < last <= first and start <= end")
    if step >= end:
        return 0.0
    return first * (last / first) ** (max(0, step - start) / max(1, end - start))


def check_duo(model: nn.Module, head: Head) -> None:
    """Check that a network and a head can be trained with the curriculum.

    Args:
        model: The network; it needs an `embedding` (torch.nn.Embedding).
        head: A posterior head over `m2s.Uniform`.

    Raises:
        TypeError: One of the two does not fit; the message says which.
    """
    if not (isinstance(head, Head) and head.has_posterior and isinstance(head.process, Uniform)):
        raise UnsupportedError("DUO's curriculum", head, Posterior, Uniform)
    if not isinstance(getattr(model, "embedding", None), nn.Embedding):
        raise TypeError(
            f"DUO's curriculum needs a network with an `embedding` (nn.Embedding), which {type(model).__name__} does not have; "
            "m2s.models.UNet has one if its input is 'embedding'"
        )


class Relaxed(NetworkLoss):
    """`m2s.Objective` with softened input: forward(x_0, t, tau) -> nats per position [B, L].

    The loss is that of x_t, the argmax. The rows of the network's `embedding` are averaged by softmax(w / tau).
    At tau = 0 it is `m2s.Objective`, whose mean is UDLM's NELBO. For tau > 0 it is not an NELBO: it is for the first part of
    training.

    Args:
        model: The network, with an `embedding` as `m2s.models.DiT` has.
        head: A posterior head over `m2s.Uniform`.
        loss: A loss of (head, output, x_0, x_t, t).
        t_min: The network sees times in [t_min, 1 - t_min].
        generator: Source of the normal numbers; None: torch's default generator.

    Raises:
        TypeError: The network or the head does not support the curriculum.
        ValueError: `t_min` is not in (0, 0.5).
    """

    def __init__(
        self,
        model: nn.Module,
        head: Head,
        loss: Loss = score_entropy,
        t_min: float = 1e-3,
        generator: torch.Generator | None = None,
    ) -> None:
        check_duo(model, head)
        super().__init__(model, head, loss, t_min, generator)

    def forward(
        self, x_0: Int[Tensor, "B L"], t: Float[Tensor, "B"], tau: float, weight: Float[Tensor, "B L"] | None = None
    ) -> Float[Tensor, "B L"]:
        """Compute the loss of every position at x_t = argmax(w), where the network sees softmax(w / tau).

        Args:
            x_0: Clean tokens, [B, L].
            t: A time for each example, [B].
            tau: Temperature of the softmax; 0: the network sees x_t.
            weight: The weight of each position, [B, L]; 0 for padding. None: all have weight 1.

        Returns:
            The weighted loss in nats per position, [B, L].

        Raises:
            ValueError: `tau` is negative or not finite.
        """
        if not (math.isfinite(tau) and tau >= 0):
            raise ValueError(f"tau is {tau}, but it must be a number >= 0")
        assert isinstance(self.head.process, Uniform) and isinstance(self.model, nn.Module)
        assert isinstance(self.model.embedding, nn.Embedding)
        shape = (*x_0.shape, self.head.process.vocab)
        noise = torch.randn(shape, generator=self.generator, dtype=torch.get_default_dtype(), device=x_0.device)
        w = gaussian_latent(self.head.process, x_0, t, noise)
        x_t = w.argmax(-1)
        with soft_embedding(self.model.embedding, torch.softmax(w / tau, -1)) if tau else contextlib.nullcontext():
            output = self.model(x_t, self.network_time(t))
        return apply_weight(self.loss(self.head, output, x_0, x_t, t), weight)


@contextlib.contextmanager
def soft_embedding(embedding: nn.Embedding, distribution: Float[Tensor, "B L K"]) -> Iterator[None]:
    """Inside the context, `embedding` returns its mean under `distribution`, whatever tokens it is called with.

    Args:
        embedding: The embedding layer, which gets a forward hook.
        distribution: Probabilities of the first K rows [B, L, K].
    """

    def mean(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return (
            (distribution.to(embedding.weight.dtype) @ embedding.weight[: distribution.shape[-1]])
            .to(out.dtype)
            .reshape(out.shape)
        )

    handle = embedding.register_forward_hook(mean)
    try:
        yield
    finally:
        handle.remove()
