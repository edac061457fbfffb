"""Self-correction (GIDD; von Ruette et al. 2025): after sampling, replace tokens that the network considers unlikely."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import gather_at, safe_log
from m2s.heads import Head
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.base import Move, Plan, Sampler
from m2s.samplers.bayes import Bayes
from m2s.samplers.capabilities import Need, Preserves, has_capability
from m2s.samplers.first_hitting import first_sites
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class SelfCorrecting(Sampler):
    """After the predictor's last step, call the network `corrections` times at a small time.

    Each call draws z at every site from nu^(1/temperature). It replaces the token k at the `sites` sites where z != k has the
    greatest probability.

    Unlike the authors, this replaces a token only where nu_z > nu_k. No step then lowers the likelihood of a site that it
    changes, and a sample without an improvement is unchanged. The authors monitor the fraction of tokens that are the network's
    first choice, and use it as a stopping criterion.
    """

    name = "self_correcting"
    needs = (Need.POSTERIOR, Need.RANK_ONE)
    preserves_marginal = Preserves.NOTHING
    excludes_t_one = True  # also if the predictor's is False
    predictor: Sampler = field(default_factory=Bayes)
    """The sampler that is corrected."""
    corrections: int = 128
    """Calls of the network after the last step."""
    temperature: float = 0.1
    """Temperature of the draws."""
    time: float = 0.01
    """The time at which the network is called."""
    sites: int = 1
    """Sites that one call may change."""

    def __post_init__(self) -> None:
        validation.instance("predictor", self.predictor, Sampler, "a sampler such as m2s.samplers.Bayes()")
        validation.positive_int("corrections", self.corrections)
        validation.positive_int("sites", self.sites)
        validation.positive_number("temperature", self.temperature)
        validation.in_interval("time", self.time, "(0, 1)")

    def check_supported(self, head: Head) -> None:
        super().check_supported(head)
        if has_capability(head, Need.PURE_MASK):
            raise TypeError(
                f"sampler {self.name!r} replaces tokens, but under {head.process} every unmasked token is clean: it needs "
                "m2s.Hybrid or m2s.Uniform; use sampler='remasking'"
            )
        self.predictor.check_supported(head)

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        t, s, reveal = self.predictor.plan(steps, grid, free, head, noise)
        more = t.new_full((self.corrections, len(free)), self.time)
        counts = None if reveal is None else torch.cat([reveal, torch.zeros_like(more, dtype=reveal.dtype)])
        return Plan(torch.cat([t, more]), torch.cat([s, more]), counts)

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        if bool((move.s < move.t).any()):
            return self.predictor.step(prediction, move, noise)
        token, confidence = prediction.map(self._replacement, noise("token"))
        wrong = confidence > 0 if prediction.free is None else (confidence > 0) & prediction.free
        count = torch.full((len(token),), self.sites, device=token.device)
        return torch.where(first_sites(-confidence, wrong, count, noise("site")), token, prediction.x_t.long())

    def _replacement(self, part: Prediction, u: Tensor) -> tuple[Tensor, Tensor]:
        """A draw from the sharpened nu, and its probability; 0 where the draw is not more likely than the current token."""
        nu = part.leave_one_out()
        sharpened = torch.softmax(safe_log(nu) / self.temperature, -1)
        token = draw_categorical(sharpened, u)
        better = gather_at(nu, token) > gather_at(nu, part.x_t)
        return token, torch.where(better, gather_at(sharpened, token), 0).squeeze(-1)
