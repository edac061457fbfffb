"""Definition of the projection: the posterior whose score is nearest to a given score (Eq. 11, appendix D.4).

For a rank-one process the minimizer of |B mu - s|^2 over the simplex is mu_y = [s_y - sigma]_+ / b at y != k, b = alpha / m(k),
and mu_k = 1 - sum of the others. sigma is the root of

    sum_{y != k} [s_y - sigma]_+ = min(b, (sigma - origin) / curvature),

    origin = delta - delta sum_{y != k} (s_y - delta) - delta_mask (s_mask - delta_mask),
    curvature = 2 delta + (V - 1) delta^2 + delta_mask^2,        delta = m(y) / P(k|k),

where the sums run over clean y. For k = mask only the branch b is left. The left side with a fixed set of candidates, without
positive parts, gives a root that is too small unless the set is the support. So sigma is the greatest root over the j largest
scores, j = 0, 1, 2, ...
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.process import SiteCoefficients


def nearest_posterior(
    score: Float[Tensor, "N S"], k: Int[Tensor, "N"], site: SiteCoefficients, mask: int | None
) -> Float[Tensor, "N S"]:
    """Project rows of scores by sorting.

    Args:
        score: Scores over all states; the entry at k is ignored.
        k: Current tokens.
        site: Scalars of the process at every row.
        mask: The mask token, the last state, or None.

    Returns:
        mu over all states; 0 at the mask unless the mask is known to be k (m(k) = 0).
    """
    vocab = score.shape[-1] if mask is None else mask
    alpha, m_k, p_kk, m_clean, m_mask, _ = (value.unsqueeze(-1) for value in site)
    at_k, known = torch.arange(score.shape[-1], device=score.device) == k[:, None], m_k == 0
    masked = k[:, None] == (-1 if mask is None else mask)
    b, delta, delta_mask = alpha / m_k.where(~known, 1), m_clean / p_kk, m_mask / p_kk
    clean = score[:, :vocab]
    total = torch.where(at_k[:, :vocab], 0, clean).sum(-1, keepdim=True)
    origin = delta - delta * (total - (vocab - 1) * delta)
    if mask is not None:
        origin = torch.where(masked, -torch.inf, origin - delta_mask * (score[:, mask:] - delta_mask))
    gain = 1 / torch.where(masked, 1, 2 * delta + (vocab - 1) * delta**2 + delta_mask**2)
    mass = torch.where(at_k[:, :vocab], -torch.inf, clean).sort(-1, descending=True).values.cumsum(-1)
    size = torch.arange(1, vocab + 1, device=score.device)
    roots = torch.maximum((mass - b) / size, (mass + origin * gain) / (size + gain))
    sigma = torch.maximum(roots.amax(-1, keepdim=True), origin)
    mu = torch.where(at_k[:, :vocab], 0, (clean - sigma).relu() / b)
    mu = torch.nn.functional.pad(torch.where(known, 0, mu), (0, score.shape[-1] - vocab))
    return torch.where(at_k & ~(masked & ~known), (1 - mu.sum(-1, keepdim=True)).clamp(min=0), mu)
