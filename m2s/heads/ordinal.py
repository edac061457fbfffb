"""A posterior over ordered levels from two numbers: a logistic density cut into bins (D3PM, appendix A.8; PixelCNN++)."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from m2s.heads.heads import Head, Posterior
from m2s.ops.last_layer import Output
from m2s.process import Process

SCALE, REACH = -2.0, 7.0  # log of the scale where the output is 0, and how far from there it can get


class Ordinal(Head):
    """The first two columns of the output are the mean m and, as r, the scale s of a logistic law on [-1, 1], where level z of
    K lies at 2z/(K-1) - 1; the law of z is what falls into its bin, the first and the last of which take the tails.

        log s = -2 + 7 tanh(r/7),    Pr(z) = F((e_{z+1} - m)/s) - F((e_z - m)/s),    F(u) = 1/(1 + e^-u),

    e_z = (2z-1)/(K-1) - 1, but e_0 = -inf and e_K = inf. It is the posterior (`offset="none"`) or the law that has not seen the
    site's own token (`"exact"`), as for `Posterior`. The other columns mean nothing.
    """

    has_posterior = True

    def __init__(self, process: Process, offset: Literal["none", "exact"] = "exact") -> None:
        super().__init__(process)
        self.offset, self.plain = offset, Posterior(process, offset)

    def __repr__(self) -> str:
        return f"Ordinal({self.process}, offset={self.offset!r})"

    def log_law(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """log Pr(z), -inf at the mask, by F(b) - F(a) = F(b) F(-a) (1 - e^{a-b}): nothing is found by subtraction."""
        values, vocab = self._logits(output, x_t, t), self.process.vocab
        mean, log_scale = values[..., 0, None], SCALE + REACH * torch.tanh(values[..., 1, None] / REACH)
        edges = (2 * torch.arange(1, vocab, dtype=values.dtype, device=values.device) - 1) / (vocab - 1) - 1
        u = (edges - mean) * torch.exp(-log_scale)
        inside = torch.log(-torch.expm1(-2 / (vocab - 1) * torch.exp(-log_scale))).expand(*values.shape[:-1], vocab - 2)
        distribution = pad(logsigmoid(u), (0, 1)) + pad(logsigmoid(-u), (1, 0)) + pad(inside, (1, 1))
        return pad(distribution, (0, self.process.states - vocab), value=-torch.inf)

    def posterior_logits(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site K"]:
        return self.plain.posterior_logits(self.log_law(output, x_t, t), x_t, t)

    def log_network_distribution(
        self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*site K"]:
        return self.plain.log_network_distribution(self.log_law(output, x_t, t), x_t, t)

    def posterior(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return self.plain.posterior(self.log_law(output, x_t, t), x_t, t)

    def last_step(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return self.plain.last_step(self.log_law(output, x_t, t), x_t, t)

    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return self.plain.log_score(self.log_law(output, x_t, t), x_t, t)
