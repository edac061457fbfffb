"""Definition of the score entropy of a posterior network (Theorem 4.2, Eq. 8), for a rank-one process.

A rank-one process has P_t(y|z) = alpha [y = z] + m(y). The network predicts the posterior mu over the clean token, the bridge
(Theorem 4.1) turns mu into a score, and the loss compares the score with the true ratio:

    s_y = sum_z mu_z P_t(y|z) / P_t(k|z),      r_y = P_t(y|x_0) / P_t(k|x_0),
    loss = n(k) sum_{y != k} h(s_y, r_y),      h(s, r) = s - r - r log(s / r),   h(s, 0) = s,

where k = x_t and n(k) is the forward rate into k. `cpu.py` and `triton.py` compute the same without cancellation.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.process import SiteCoefficients


def posterior_score_entropy(
    logits: Float[Tensor, "N V"],
    offset: Float[Tensor, "N"],
    x_0: Int[Tensor, "N"],
    x_t: Int[Tensor, "N"],
    site: SiteCoefficients,
    mask: int | None,
    vocab: int,
) -> Float[Tensor, "N"]:
    """Compute the loss of every row from the definition, with gradients by autograd.

    Args:
        logits: Posterior logits; the first `vocab` columns count.
        offset: Number added to the logit of x_t.
        x_0: Clean tokens.
        x_t: Current tokens.
        site: Scalars alpha, m(k), P(k|k), m(clean), m(mask) and n(k) of every row.
        mask: The mask token, equal to `vocab`, or None.
        vocab: Number of clean tokens.

    Returns:
        The loss in nats; 0 where m(k) = 0 or n(k) = 0.
    """
    alpha, m_k, _, m_clean, m_mask, rate = (value.unsqueeze(-1) for value in site)
    states = torch.arange(vocab if mask is None else vocab + 1)
    at_k, at_x = states == x_t[:, None], states == x_0[:, None]
    counted = (rate > 0) & (m_k > 0)
    m = torch.where(states == vocab, m_mask, m_clean)
    p_k = torch.where(counted, m_k, 1) + alpha * at_k[:, :vocab]  # P(k|z) over clean z
    mu = torch.softmax(logits[:, :vocab] + torch.where(at_k[:, :vocab], offset[:, None], 0), -1)
    flow = mu / p_k
    s = m * flow.sum(-1, keepdim=True) + alpha * torch.nn.functional.pad(flow, (0, len(states) - vocab))
    r = (m + alpha * at_x) / (torch.where(counted, m_k, 1) + alpha * (x_t == x_0)[:, None])
    safe_s, safe_r = torch.where(r > 0, s, 1), torch.where(r > 0, r, 1)
    h = torch.where(r > 0, s - r - r * torch.log(safe_s / safe_r), s)
    return torch.where(counted & ~at_k, rate * h, 0).sum(-1)
