"""The head of Neural CTMC: exit rate and jump distribution."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.conversions.bridge import gather_at, scatter_at
from m2s.dtypes import to_float64
from m2s.heads.unconstrained import UnconstrainedScore
from m2s.ops.last_layer import Output


class FactorizedRate(UnconstrainedScore):
    """Neural CTMC: the total exit rate and the jump distribution are predicted separately.

    At a site with current token k, the output's entries off k are the logits of the jump distribution J over the candidates
    that have a forward rate into k. The entry at k is the log of the exit rate, in units of the forward rates into k:

        exit = e^{output_k} sum_y Q_t(y -> k),    reverse rate k -> y = exit J_y,    s_y = exit J_y / Q_t(y -> k).

    Args:
        process: A forward process with rates.

    Example:
        >>> head = m2s.FactorizedRate(m2s.Uniform(50_257, m2s.Linear()))
    """

    def log_score(self, output: Output, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return log s_y of every candidate y, [*site, S], from exit rate and jump distribution; 0 at x_t."""
        values = self._logits(output, x_t, t)
        rates = self.process.rates_into(x_t, to_float64(t))
        total = rates.sum(-1, keepdim=True)
        counted = torch.where(total > 0, rates > 0, True)  # where no rate leads into k the score carries no weight
        log_jump = torch.log_softmax(scatter_at(values.where(counted, -torch.inf), x_t, -torch.inf), -1)
        if self.process.rank_one is not None:
            # All rates into k are equal, so that total / rate is their number, also where the rates are infinite.
            total_over_rate = torch.full_like(rates, self.process.states - 1)
        else:
            total_over_rate = torch.where(rates > 0, total / rates.where(rates > 0, 1), 1)
        return scatter_at(gather_at(values, x_t) + log_jump + torch.log(total_over_rate).to(values.dtype), x_t, 0.0)
