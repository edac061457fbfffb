"""Predictor-corrector: any sampler, and after each of its steps Gibbs moves at a few sites."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.heads import Head, LogScore, score_from_posterior
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.base import SAMPLERS, Move, Plan, Sampler
from m2s.samplers.capabilities import Preserves, default_sampler
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class PredictorCorrector(Sampler):
    """A predictor, and after each of its steps to s > 0, `corrections` Gibbs moves at s. Each move is one call of the network.

    A Gibbs move draws a site from s_y / sum(s) with s_k = 1, which is Pr(X_s^i = y | X_s^{-i}). One site at a time
    (`sites=1`, chosen uniformly) leaves p_s unchanged. Several at once are faster and not exact. A posterior head has no score
    of other clean tokens at an unmasked site under a mask, so such a site stays.
    """

    name = "predictor_corrector"
    preserves_marginal = Preserves.ONE_SITE
    excludes_t_one = True  # also if the predictor's is False
    predictor: Sampler | None = None
    """By default that of `default_sampler`: bayes; for an unconstrained score analytic or tau_leaping."""
    corrections: int = 1
    """Gibbs moves after each step."""
    sites: int = 1
    """Sites that one Gibbs move draws again."""

    def __post_init__(self) -> None:
        if self.predictor is not None:
            validation.instance("predictor", self.predictor, Sampler, "a sampler such as m2s.samplers.Bayes()")
        validation.positive_int("corrections", self.corrections)
        validation.positive_int("sites", self.sites)

    def check_supported(self, head: Head) -> None:
        super().check_supported(head)
        self._predictor(head).check_supported(head)

    def _predictor(self, head: Head) -> Sampler:
        """The predictor for a head."""
        if self.predictor is not None:
            return self.predictor
        predictor = SAMPLERS[default_sampler(head)]()
        assert isinstance(predictor, Sampler)
        return predictor

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        """Return the times of the predictor, and the time s after each of its steps `corrections` more times.

        Raises:
            TypeError: The predictor reveals sites one after another.
        """
        predictor = self._predictor(head)
        t, s, reveal = predictor.plan(steps, grid, free, head, noise)
        if reveal is not None:
            raise TypeError(f"sampler {predictor.name!r} reveals sites one after another and takes no corrector")
        rows: list[tuple[Tensor, Tensor]] = []
        for start, end in zip(t, s, strict=True):
            rows += [(start, end)] + [(end, end)] * (self.corrections if bool((end > 0).all()) else 0)
        return Plan(torch.stack([start for start, _ in rows]), torch.stack([end for _, end in rows]))

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        if bool((move.s < move.t).any()):
            # Guidance of rates makes an unconstrained score of every head.
            head = prediction.head if prediction.has_posterior else LogScore(prediction.process)
            return self._predictor(head).step(prediction, move, noise)
        return gibbs(prediction, self.sites, noise, self.order(prediction, noise))

    def order(self, prediction: Prediction, noise: CounterNoise) -> Float[Tensor, "B L"]:
        """Return the ranking by which a correction chooses its sites, smallest first, [B, L]: here a uniform one.

        Args:
            prediction: The prediction at the time of the correction.
            noise: The uniforms of this step.
        """
        return noise("order")


def gibbs(
    prediction: Prediction, sites: int, noise: CounterNoise, order: Float[Tensor, "B L"] | None = None
) -> Int[Tensor, "B L"]:
    """Draw some sites from their distribution given all others at time t.

    Args:
        prediction: The prediction at time t, with sites [B, L].
        sites: How many sites of each sample, among those that are not clamped.
        noise: Uniforms "token", and "order" where no ranking is given.
        order: A ranking of the sites: the first are chosen. By default they are chosen uniformly.

    Returns:
        The new state, [B, L].
    """
    x = prediction.x_t.long()
    order = noise("order") if order is None else order
    order = order if prediction.free is None else order.masked_fill(~prediction.free, torch.inf)
    # The same number of sites whatever is clamped, so that shapes do not depend on it: clamped ones are restored below.
    chosen = order.argsort(dim=-1, stable=True)[:, :sites]
    at = (chosen + torch.arange(len(x), device=x.device).unsqueeze(-1) * x.shape[1]).reshape(-1)
    part = prediction[at]
    score, k = part.score(), part.x_t.long()
    # No loss is taken at a token that is certainly clean, so an unconstrained score is arbitrary there: use the process.
    clean = torch.nn.functional.one_hot(k, part.process.states).to(score)
    score = torch.where(part.is_certainly_clean().unsqueeze(-1), score_from_posterior(clean, k, part.t, part.process), score)
    new = draw_categorical(score, noise("token").reshape(-1)[at])
    moved = x.reshape(-1).scatter(0, at, new).reshape(x.shape)
    return moved if prediction.free is None else torch.where(prediction.free, moved, x)
