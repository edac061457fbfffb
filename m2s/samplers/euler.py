"""One Euler step of the reverse rates (Eq. 18, Algorithm 2)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.heads import rate_from_score
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.ops.reverse_step import EulerRoutes
from m2s.samplers.base import Move, Sampler
from m2s.samplers.capabilities import Need, Preserves
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class Euler(Sampler):
    """Leave k with probability min(E, 1), E = (t - s) sum_y Q_t(y -> k) s_y, for y in proportion to its rate.

    For a rank-one process with a posterior, the rate k -> y is n(k) [alpha mu_y / m(k) + m(y) c] with
    c = off/m(k) + mu_k/(alpha + m(k)), where off is the sum of mu over y != k. A jump therefore goes to z ~ mu without k with
    weight alpha off / m(k), and otherwise by the mixing distribution without k. `Diagnostics` counts how often E > 1.
    """

    name = "euler"
    needs = (Need.RATES,)
    preserves_marginal = Preserves.NOTHING
    excludes_t_one = True

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        step_length = validation.align("t", to_float64(move.t - move.s), prediction.x_t)
        if prediction.needs_one_draw:
            token, exit_mass = prediction.step(routes(prediction, step_length), noise)
        else:
            rate, target = prediction.map(_exit_rate_and_target, noise("token"))
            exit_mass = step_length * rate
            token = torch.where(noise("route") < exit_mass, target, prediction.x_t.long())
        prediction.notes["exit_above_one"] = exit_mass > 1 + 1e-9
        return token


def _exit_rate_and_target(part: Prediction, u: Tensor) -> tuple[Tensor, Tensor]:
    """The exit rate and where a jump leads, from K-vectors of rates."""
    rates = rate_from_score(part.score(), part.x_t, part.t, part.process)
    return rates.sum(-1, dtype=part.t.dtype), draw_categorical(rates, u)


def routes(prediction: Prediction, step_length: Float[Tensor, "B #L"]) -> EulerRoutes:
    """Return the coefficients of an Euler step of a rank-one process at every site.

    Args:
        prediction: The prediction at time t, with sites [B, L].
        step_length: The length t - s of the step, [B, 1].

    Returns:
        All coefficients that do not depend on the network's output.
    """
    process = prediction.process.rank_one
    assert process is not None
    site = process.at(prediction.x_t, prediction.t)
    reached = site.m_k > 0  # m_t(k) = 0 at a token that is certainly clean
    return EulerRoutes(
        token=torch.where(reached, site.alpha / site.m_k.where(reached, 1), 0),
        m_k=site.m_k.where(reached, torch.inf),
        stay=site.stay.where(site.stay > 0, 1),
        clean=site.clean,
        mask=site.mask,
        rate=site.rate.where(site.rate > 0, 0),
        step_length=step_length,
    )
