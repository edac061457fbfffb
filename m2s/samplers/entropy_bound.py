"""Entropy-bounded acceptance (Ben-Hamu et al. 2025): keep the draws at the most certain sites, and corrupt all others again."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from m2s import validation
from m2s.errors import UserError
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.base import Move, Sampler
from m2s.samplers.capabilities import Need, Preserves
from m2s.samplers.first_hitting import by_rank
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class EntropyBound(Sampler):
    """Draw z ~ mu at every site and accept the m sites of smallest entropy H(mu); all others become noise.

        m is the largest number with   H_1 + ... + H_m - max(H_1, ..., H_m) <= bound

    ("Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking", arXiv:2505.24857.) The left side is at
    least the mutual information of the accepted tokens, so that drawing them independently is nearly right. At least one site
    is accepted. Noise is a draw from the reference distribution: a uniform token, as in DiffusionGemma, or the mask, which
    leaves masked sites masked. Under masks an unmasked site has entropy 0 and stays.

    The entropy is that of the distribution from which z is drawn, after temperature, top-k and top-p, since the bound concerns
    the draw. Ties are broken at random.

    This does not simulate the reverse process: accepted sites are clean at s > 0, and all others pure noise.

    Raises:
        UserError: The bound is negative or not a number.
    """

    name = "entropy_bound"
    needs: ClassVar[tuple[Need, ...]] = (Need.POSTERIOR,)
    preserves_marginal = Preserves.NOTHING
    bound: float = 0.1
    """Upper bound on the sum of the entropies of the accepted sites without the largest one, in nats."""

    def __post_init__(self) -> None:
        if not validation.is_number(self.bound) or self.bound < 0:
            raise UserError(option="bound", value=self.bound, expected="a number of at least 0")

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        token, entropy = prediction.map(_token_and_entropy, noise("token"))
        free = torch.ones_like(prediction.x_t, dtype=torch.bool) if prediction.free is None else prediction.free
        u = noise("jump")
        noisy = draw_categorical(prediction.process.reference().to(u), u)
        return torch.where(accepted_sites(entropy, free, self.bound, noise("site")), token, noisy)


def accepted_sites(
    entropy: Float[Tensor, "B L"], among: Bool[Tensor, "B L"], bound: float, ties: Float[Tensor, "B L"]
) -> Bool[Tensor, "B L"]:
    """Choose the sites of smallest entropy whose sum without the greatest is at most a bound.

    Args:
        entropy: The entropy of the draw at each site, in nats.
        among: The sites that can be accepted.
        bound: The bound.
        ties: Uniforms that decide between sites of equal entropy.

    Returns:
        True at the accepted sites.
    """
    order = by_rank(entropy.masked_fill(~among, torch.inf), ties)
    ranked = entropy.gather(-1, order)
    before = torch.nn.functional.pad(ranked.cumsum(-1)[:, :-1], (1, 0))  # the sum without the greatest, which is the last
    return among & torch.zeros_like(among).scatter(-1, order, before <= bound)


def _token_and_entropy(part: Prediction, u: Tensor) -> tuple[Tensor, Tensor]:
    """A draw from mu, and the entropy of mu in nats."""
    mu = part.posterior()
    return draw_categorical(mu, u), torch.special.entr(mu).sum(-1, dtype=part.t.dtype)
