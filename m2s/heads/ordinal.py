"""A distribution over ordered levels from two numbers: a discretized logistic (D3PM, appendix A.8; PixelCNN++)."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from m2s.heads.base import Head
from m2s.heads.posterior import Posterior
from m2s.ops.last_layer import Output
from m2s.process import Process

LOG_SCALE_AT_ZERO, LOG_SCALE_RANGE = -2.0, 7.0  # log of the scale where the output is 0, and how far it can move from there


class Ordinal(Head):
    """The output's first two columns are the mean m and the scale parameter r of a logistic distribution on [-1, 1].

    Level z of K lies at 2z/(K-1) - 1. Its probability is the mass of its bin; the first and the last bin contain the tails.

        log s = -2 + 7 tanh(r/7),    Pr(z) = F((e_{z+1} - m)/s) - F((e_z - m)/s),    F(u) = 1/(1 + e^-u)

    The edges are e_z = (2z-1)/(K-1) - 1, with e_0 = -inf and e_K = inf. The other columns of the output are ignored.

    Args:
        process: The forward process.
        offset: "none": the logistic is the posterior mu. "exact": it is the leave-one-out distribution nu. As for
            `m2s.Posterior`.

    Example:
        >>> head = m2s.Ordinal(m2s.RateMatrix.gaussian(256, m2s.GeometricRate(3.0)))
    """

    has_posterior = True

    def __init__(self, process: Process, offset: Literal["none", "exact"] = "exact") -> None:
        super().__init__(process)
        self.offset, self._categorical = offset, Posterior(process, offset)

    def __repr__(self) -> str:
        return f"Ordinal({self.process}, offset={self.offset!r})"

    def log_probabilities(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return log Pr(z), [*site, S]; -inf at the mask.

        By F(b) - F(a) = F(b) F(-a) (1 - e^{a-b}), so that nothing cancels in the tails.

        Args:
            output: The network's output at (x_t, t), [*site, V].
            x_t: Current tokens, [*site].
            t: Times, [*b].
        """
        values, vocab = self._logits(output, x_t, t), self.process.vocab
        mean, r = values[..., 0, None], values[..., 1, None]
        log_scale = LOG_SCALE_AT_ZERO + LOG_SCALE_RANGE * torch.tanh(r / LOG_SCALE_RANGE)
        edges = (2 * torch.arange(1, vocab, dtype=values.dtype, device=values.device) - 1) / (vocab - 1) - 1
        u = (edges - mean) * torch.exp(-log_scale)
        inside = torch.log(-torch.expm1(-2 / (vocab - 1) * torch.exp(-log_scale))).expand(*values.shape[:-1], vocab - 2)
        log_probabilities = pad(logsigmoid(u), (0, 1)) + pad(logsigmoid(-u), (1, 0)) + pad(inside, (1, 1))
        return pad(log_probabilities, (0, self.process.states - vocab), value=-torch.inf)

    # A categorical head whose logits are log Pr(z) has the same posterior, score and last step.

    def posterior_logits(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site K"]:
        return self._categorical.posterior_logits(self.log_probabilities(output, x_t, t), x_t, t)

    def log_network_distribution(
        self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*site K"]:
        return self._categorical.log_network_distribution(self.log_probabilities(output, x_t, t), x_t, t)

    def posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return self._categorical.posterior(self.log_probabilities(output, x_t, t), x_t, t)

    def last_step(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return self._categorical.last_step(self.log_probabilities(output, x_t, t), x_t, t)

    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return self._categorical.log_score(self.log_probabilities(output, x_t, t), x_t, t)
