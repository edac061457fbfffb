"""Definition of the score entropy of an unconstrained log-score (Eq. 8), for a rank-one process.

With P_t(y|z) = alpha [y = z] + m(y), k = x_t and n(k) the forward rate into k,

    loss = n(k) sum_{y != k} h(s_y, r_y),   r_y = P_t(y|x_0) / P_t(k|x_0),
    h(s, r) = s - r - r log(s / r),   h(s, 0) = s.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.process import SiteCoefficients


def unconstrained_score_entropy(
    log_score: Float[Tensor, "N S"],
    x_0: Int[Tensor, "N"],
    x_t: Int[Tensor, "N"],
    site: SiteCoefficients,
    mask: int | None,
) -> Float[Tensor, "N"]:
    """Compute the loss of every row from the definition, with gradients by autograd.

    Args:
        log_score: Log-scores over all states.
        x_0: Clean tokens.
        x_t: Current tokens.
        site: Scalars alpha, m(k), P(k|k), m(clean), m(mask) and n(k) of every row.
        mask: The mask token, the last state, or None.

    Returns:
        The loss in nats; 0 where P_t(x_t|x_0) = 0 or n(k) = 0.
    """
    alpha, m_k, _, m_clean, m_mask, rate = (value.unsqueeze(-1) for value in site)
    states = torch.arange(log_score.shape[-1])
    p_y = torch.where(states == (-1 if mask is None else mask), m_mask, m_clean) + alpha * (states == x_0[:, None])
    p_k = m_k + alpha * (x_t == x_0)[:, None]
    counted = (p_k > 0) & (rate > 0)
    s, r = log_score.exp(), p_y / torch.where(p_k > 0, p_k, 1)
    log_r = torch.log(torch.where(r > 0, r, 1))
    h = torch.where(r > 0, s - r - r * (log_score - log_r), s)
    return torch.where(counted & (states != x_t[:, None]), rate * h, 0).sum(-1)
