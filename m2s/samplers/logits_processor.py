"""Temperature, top-k, top-p and classifier-free guidance, as operations on logits."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.conversions.bridge import safe_log
from m2s.dtypes import float64_dtype


@dataclass(frozen=True)
class LogitsProcessor:
    """Options that change a prediction before it is used: sharpening and guidance.

    Sharpening applies temperature, then top-k, then top-p. Guidance g combines the prediction with the condition (c) and the
    one without (u). For g = 1 it is the prediction with the condition.

    Args:
        temperature: Logits are divided by it.
        top_k: Keep the `top_k` most likely tokens; None keeps all.
        top_p: Keep the smallest set of tokens with at least this probability; 1 keeps all.
        on: Which distribution is sharpened, "posterior" (mu) or "leave_one_out" (nu).
        guidance: The strength g of guidance.
        guide: What guidance combines:
            "posterior": mu ∝ mu_c^g mu_u^(1-g);
            "rates": reverse rates, R = R_c^g R_u^(1-g);
            "step": distributions of one step, p(x_s) ∝ p_c(x_s)^g p_u(x_s)^(1-g) (D-CFG of UDLM).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    on: Literal["posterior", "leave_one_out"] = "posterior"
    guidance: float = 1.0
    guide: Literal["posterior", "rates", "step"] = "posterior"

    @property
    def sharpens(self) -> bool:
        """Whether temperature, top-k or top-p changes anything."""
        return self.temperature != 1 or self.top_k is not None or self.top_p < 1

    def __call__(self, logits: Float[Tensor, "*site K"]) -> Float[Tensor, "*site K"]:
        """Apply temperature, top-k and top-p, in that order.

        Args:
            logits: Unnormalized log-probabilities of the clean tokens, [*site, K].

        Returns:
            Logits of the same shape, -inf for the tokens that are cut off. Tokens that tie with the k-th are kept.
        """
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.where(logits >= logits.topk(self.top_k, -1).values[..., -1:], -torch.inf)
        if self.top_p < 1:
            ordered, order = torch.softmax(logits, -1, dtype=float64_dtype(logits)).sort(dim=-1, descending=True, stable=True)
            kept = ordered.cumsum(-1) - ordered < self.top_p  # the token that crosses top_p is kept too
            logits = logits.where(torch.zeros_like(kept).scatter(-1, order, kept), -torch.inf)
        return logits


def guided_logits(conditional: Float[Tensor, "*n"], unconditional: Float[Tensor, "*n"], guidance: float) -> Float[Tensor, "*n"]:
    """Return g log p_c + (1 - g) log p_u.

    A token that either prediction rules out (-inf) stays ruled out, except at g = 0, where the condition has no weight.

    Args:
        conditional: log p_c, the prediction with the condition.
        unconditional: log p_u, the prediction without it, of the same shape.
        guidance: The strength g.

    Returns:
        Unnormalized logits of the same shape.
    """
    if guidance == 0:
        return unconditional
    ruled_out = (conditional == -torch.inf) | (unconditional == -torch.inf)
    mixed = guidance * conditional + (1 - guidance) * unconditional
    return mixed.masked_fill(ruled_out, -torch.inf)


def guided_step(
    conditional: Float[Tensor, "*site S"], unconditional: Float[Tensor, "*site S"], guidance: float
) -> Float[Tensor, "*site S"]:
    """Return p_c^g p_u^(1-g), normalized, of two distributions of the next token.

    Args:
        conditional: Non-negative weights of the next token with the condition, [*site, S].
        unconditional: The same without the condition.
        guidance: The strength g.

    Returns:
        Weights of the next token, [*site, S]. Where no token has weight in both, those with the condition.
    """
    mixed = guided_logits(safe_log(conditional), safe_log(unconditional), guidance)
    nothing = (mixed == -torch.inf).all(-1, keepdim=True)
    return torch.where(nothing, conditional, torch.softmax(mixed.masked_fill(nothing, 0), -1))
