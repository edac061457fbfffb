"""Definition of the score entropy of an exit rate and a jump distribution, for a rank-one process.

A row of outputs o has the log of the exit rate at k = x_t, and the logits of the jump distribution J at the other states. All
candidates have the same forward rate into k, so that the score is

    s_y = e^{o_k} (S - 1) J_y,   J = softmax of o over y != k,   S the number of states.

The loss is that of `m2s.ops.score_entropy.naive`.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.score_entropy.naive import unconstrained_score_entropy
from m2s.process import SiteCoefficients


def factorized_score_entropy(
    logits: Float[Tensor, "N S"],
    x_0: Int[Tensor, "N"],
    x_t: Int[Tensor, "N"],
    site: SiteCoefficients,
    mask: int | None,
) -> Float[Tensor, "N"]:
    """Compute the loss of every row from the definition, with gradients by autograd.

    Args:
        logits: Outputs over all states.
        x_0: Clean tokens.
        x_t: Current tokens.
        site: Scalars alpha, m(k), P(k|k), m(clean), m(mask) and n(k) of every row.
        mask: The mask token, the last state, or None.

    Returns:
        The loss in nats; 0 where P_t(x_t|x_0) = 0 or n(k) = 0.
    """
    states = logits.shape[-1]
    at_k = torch.arange(states) == x_t[:, None]
    log_exit = logits.gather(-1, x_t[:, None])
    log_jump = torch.log_softmax(logits.masked_fill(at_k, -torch.inf), -1)
    log_score = log_exit + math.log(states - 1) + log_jump.masked_fill(at_k, 0)
    return unconstrained_score_entropy(log_score, x_0, x_t, site, mask)
