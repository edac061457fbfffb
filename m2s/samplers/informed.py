"""Informed correctors (Zhao et al. 2024): Gibbs moves at the sites whose tokens the network considers least likely."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import gather_at, safe_log, scatter_at
from m2s.heads import Head
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.capabilities import Need, Preserves, has_capability
from m2s.samplers.prediction import Prediction
from m2s.samplers.predictor_corrector import PredictorCorrector

SELECTIONS = ("margin", "current_probability", "greatest_probability")


@dataclass(frozen=True)
class Informed(PredictorCorrector):
    """A predictor, and after each of its steps to s > 0, `corrections` Gibbs moves at the sites of least confidence.

    With p_y = Pr(X_s^i = y | X_s^{-i}) = s_y / sum(s), for uniform noise alpha_s nu_y + (1 - alpha_s)/K, the confidence of a
    site with token k is

        margin: log p_k - max_{y != k} log p_y      current_probability: log p_k      greatest_probability: max_y log p_y

    Sites are drawn without replacement in proportion to exp(-confidence / selection_temperature), and each is drawn again from
    p ("Informed Correctors for Discrete Diffusion Models", arXiv:2407.21243; for uniform noise arXiv:2605.22765). Confidence is
    computed before temperature, top-k and top-p.

    A Gibbs move at a site that was chosen uniformly leaves p_s unchanged (`predictor_corrector`). This one does not, even with
    one site at a time: whether a site is chosen depends on its own token, through the confidence of all sites.
    """

    name = "informed"
    preserves_marginal = Preserves.NOTHING
    selection: Literal["margin", "current_probability", "greatest_probability"] = "margin"
    """The confidence by which sites are chosen."""
    selection_temperature: float = 1.0
    """Temperature of the choice: small values choose the least confident sites, large ones any."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.choice("selection", self.selection, SELECTIONS)
        validation.positive_number("selection_temperature", self.selection_temperature)

    def check_supported(self, head: Head) -> None:
        super().check_supported(head)
        if has_capability(head, Need.PURE_MASK):
            raise TypeError(
                f"sampler {self.name!r} needs the probability of the current token, but under {head.process} the network does "
                "not predict that of an unmasked one; use sampler='predictor_corrector'"
            )

    def order(self, prediction: Prediction, noise: CounterNoise) -> Float[Tensor, "B L"]:
        (confidence,) = prediction.without_sharpening().map(self._confidence)
        u = noise("order").clamp(min=torch.finfo(torch.float32).tiny)  # 0 would rank a site like one that is clamped
        # The greatest of -confidence/temperature plus Gumbel noise: a draw without replacement.
        return confidence / self.selection_temperature + torch.log(-torch.log(u))

    def _confidence(self, part: Prediction) -> tuple[Tensor]:
        """The confidence of every site, [*site]."""
        log_score = safe_log(part.score())
        total = torch.logsumexp(log_score, -1)
        if self.selection == "greatest_probability":
            return (log_score.amax(-1) - total,)
        current = gather_at(log_score, part.x_t).squeeze(-1)
        if self.selection == "current_probability":
            return (current - total,)
        return (current - scatter_at(log_score, part.x_t, -torch.inf).amax(-1),)
