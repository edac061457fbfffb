"""What a network sees besides its tokens: the time, or the noise level of that time, and the class label."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu

from m2s import validation
from m2s.process import Schedule

TIME_SCALE = 1000.0  # t in [0, 1] is stretched by this before its sinusoids, whose highest frequency is one


def sinusoids(
    value: Float[Tensor, "B"], width: int, slowest: float = 10_000.0, sin_first: bool = False
) -> Float[Tensor, "B {width}"]:
    """Sinusoidal features of a scalar, half of them cosines and half sines, half = width/2.

    Args:
        value: One scalar per sample [B], in float32 or float64.
        width: The number of features, even.
        slowest: The ratio of the highest frequency, which is one, to the lowest.
        sin_first: False: cos, then sin, of value slowest^{-i/half}, i = 0..half-1 (SEDD). True: sin, then cos, of
            value slowest^{-i/(half-1)} (MD4, after VDM).

    Returns:
        The features [B, width], in the dtype of `value`.
    """
    half = width // 2
    steps = half - 1 if sin_first else half
    frequency = torch.exp(torch.arange(half, dtype=value.dtype, device=value.device) * (-math.log(slowest) / steps))
    angle = value.unsqueeze(-1) * frequency
    return torch.cat([angle.sin(), angle.cos()] if sin_first else [angle.cos(), angle.sin()], -1)


class Condition(nn.Module):
    """One vector per example: an MLP of sinusoids of the time plus an embedding of the class; None if the network has neither.

    The sinusoids are those of TIME_SCALE t or, where `clock` is a schedule, of its total noise sigma(t), as in SEDD. Index
    `classes` of the embedding means "no label". It is used where no condition is given, and in training with
    probability `label_dropout`, so that one network learns both distributions that guidance combines.

    Args:
        width: Features of the result.
        frequencies: The number of sinusoidal features of the time.
        hidden: Hidden features of the MLP.
        time: Whether the network sees the time.
        classes: The number of classes; None: no class conditioning.
        label_dropout: Probability of hiding a label in training.
        clock: A schedule whose sigma(t) is the input in place of t (SEDD).
        sin_first: Order and frequencies of the sinusoids, as in `sinusoids`.
        silu_each: Return silu(time) + silu(class), as in UDLM; the caller then applies no SiLU to the sum.
        constant_time: The sinusoids are those of 0 at every time.
    """

    def __init__(
        self,
        width: int,
        frequencies: int,
        hidden: int,
        time: bool = True,
        classes: int | None = None,
        label_dropout: float = 0.0,
        clock: Schedule | None = None,
        sin_first: bool = False,
        silu_each: bool = False,
        constant_time: bool = False,
    ) -> None:
        super().__init__()
        self.frequencies, self.classes, self.label_dropout, self.clock = frequencies, classes, label_dropout, clock
        self.sin_first, self.silu_each, self.constant_time = sin_first, silu_each, constant_time
        self.time = nn.Sequential(nn.Linear(frequencies, hidden), nn.SiLU(), nn.Linear(hidden, width)) if time else None
        self.label = None if classes is None else nn.Embedding(classes + 1, width)
        if self.label is not None:
            nn.init.normal_(self.label.weight, std=0.02)

    def forward(
        self, x_t: Int[Tensor, "B L"], t: Float[Tensor, "B"] | None, condition: Int[Tensor, "B"] | None
    ) -> Float[Tensor, "B C"] | None:
        """Return the conditioning vectors, or None if the network sees neither time nor class.

        Args:
            x_t: Tokens, [B, L]. Only their number B and their device are used.
            t: Times in [0, 1], [B]; ignored by a network that does not depend on the time, where None is allowed.
            condition: Class labels, [B], from 0 to `classes`, where `classes` means "no label"; None: no labels.

        Returns:
            Vectors, [B, width].

        Raises:
            TypeError: `t` is None, but the network sees the time.
            ValueError: `condition` is given, but there are no classes; or there is not one value per example.
        """
        parts: list[Tensor] = []
        with torch.autocast(x_t.device.type, enabled=False):  # bfloat16 cannot tell t = 0.500 from t = 0.501
            if self.time is not None:
                parts.append(self.time(self._sinusoids(x_t, t)))
            if self.label is not None:
                parts.append(self.label(self._labels(x_t, condition)))
            elif condition is not None:
                raise ValueError("condition is given, but this network has no classes: set `classes` in its configuration")
            if self.silu_each:
                parts = [silu(part) for part in parts]
        return sum(parts[1:], parts[0]) if parts else None

    def _sinusoids(self, x_t: Tensor, t: Tensor | None) -> Tensor:
        """Return the sinusoidal features of the times [B, frequencies]."""
        assert self.time is not None
        weights = next(self.time.parameters()).dtype
        wide = torch.float64 if weights == torch.float64 else torch.float32  # of the angles
        if self.constant_time:
            zero = torch.zeros(len(x_t), dtype=wide, device=x_t.device)
            return sinusoids(zero, self.frequencies, sin_first=self.sin_first).to(weights)
        if t is None:
            raise TypeError("t is None, but this network depends on time: give a tensor of times in [0, 1], one per sample")
        validation.times("t", t)
        _one_each("t", t, x_t)
        t = t.double() if wide == torch.float64 else t
        value = t.to(wide) * TIME_SCALE if self.clock is None else self.clock.sigma(t).to(wide)
        return sinusoids(value, self.frequencies, sin_first=self.sin_first).to(weights)

    def _labels(self, x_t: Tensor, condition: Tensor | None) -> Tensor:
        """Return the labels [B], with "no label" where they are missing or dropped."""
        assert self.classes is not None
        if condition is None:
            return torch.full((len(x_t),), self.classes, device=x_t.device)
        validation.tokens("condition", condition, self.classes + 1, f"labels (and {self.classes}, no label)")
        _one_each("condition", condition, x_t)
        labels = condition.long()
        if self.training and self.label_dropout:
            dropped = torch.rand(labels.shape, device=labels.device) < self.label_dropout
            labels = torch.where(dropped, self.classes, labels)
        return labels


def _one_each(name: str, value: Tensor, x_t: Tensor) -> None:
    """Check that there is one value per example."""
    if value.shape != x_t.shape[:1]:
        raise ValueError(f"{name} has shape {list(value.shape)}, but x_t holds {len(x_t)} samples: expected [{len(x_t)}]")
