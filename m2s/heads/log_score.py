"""The head of SEDD: the output is the log-score."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import scatter_at
from m2s.dtypes import to_float64
from m2s.errors import UnsupportedError, UserError
from m2s.heads.unconstrained import UnconstrainedScore
from m2s.ops.last_layer import Output
from m2s.process import Absorbing, Process


class LogScore(UnconstrainedScore):
    """SEDD: the output is log s itself, any real number for any candidate.

    Args:
        process: The forward process.
        scale: "none": log s = output. "sigma": log s = output - log(expm1 sigma_t) - log K, as in SEDD's release, for masking
            noise only. There expm1(sigma) = (1 - alpha)/alpha, and the exact score is log mu_y - log(expm1 sigma), so that the
            output is log(K mu_y).

    Raises:
        ValueError: There is no such scale.
        TypeError: The scale is "sigma" and the process is not `m2s.Absorbing`.

    Example:
        >>> head = m2s.LogScore(m2s.Absorbing(50_257, m2s.LogLinear()), scale="sigma")
        >>> score = head.log_score(model(x_t, t), x_t, t).exp()
    """

    def __init__(self, process: Process, scale: Literal["none", "sigma"] = "none") -> None:
        super().__init__(process)
        if scale not in ("none", "sigma"):
            raise UserError(option="scale", value=scale, expected="'none' or 'sigma'")
        if scale == "sigma" and not (process.rank_one is not None and process.rank_one.is_pure_mask):
            raise UnsupportedError("scale 'sigma'", process, process=Absorbing)
        self.scale = scale

    def __repr__(self) -> str:
        return super().__repr__() if self.scale == "none" else f"LogScore({self.process}, scale={self.scale!r})"

    def shift(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site"]:
        """Return what is subtracted from the output at every site: log(expm1 sigma_t) + log K, or 0 without a scale.

        Args:
            x_t: Current tokens, [*site].
            t: Times, [*b].

        Returns:
            The shift, [*site], in float64 where the device has it.
        """
        time = validation.align("t", to_float64(t), x_t).expand(x_t.shape)
        process = self.process.rank_one
        if self.scale == "none" or process is None:
            return torch.zeros_like(time)
        return torch.log(process.mixing(time).mask / process.alpha(time)) + math.log(process.vocab)

    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return log s_y of every candidate y, [*site, S]: the output less `shift`, and 0 at x_t.

        The score that `m2s.classify` and `m2s.project` take is its exponential.
        """
        values = self._logits(output, x_t, t)
        if self.scale == "sigma":
            values = values - self.shift(x_t, t).to(values.dtype).unsqueeze(-1)
        return scatter_at(values, x_t, 0.0)
