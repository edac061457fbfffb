"""The posterior whose bridged score is nearest to a given score (Eq. 11)."""

from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import validate_inputs
from m2s.dtypes import at_least_float32, promote_to, to_float64
from m2s.ops.project import nearest_posterior
from m2s.process import Process, RankOne, SiteCoefficients
from m2s.realizability.quadratic import project_tabulated


def project(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Float[Tensor, "*site S"]:
    """argmin over posteriors mu of |B_{t,k} mu - s|^2: a realizable score's own posterior, any other's nearest.

    Rank-one processes at any vocabulary; tabulated ones by a batched QP up to 256 states. The distance counts the candidates
    that have a forward rate into k. A score in half precision (float16, bfloat16) is widened, and its posterior is float32: in
    half precision the repaired score would be none again. Any other dtype is kept.
    """
    validate_inputs("score", score, x_t, t, process, open_ends=True)
    validation.score("score", score, x_t)
    score = at_least_float32(score)
    if not isinstance(process, RankOne):
        return project_tabulated(score, x_t, promote_to(t, score), process)
    return _by_threshold(score, x_t, t, process, log=False)


def project_log(
    log_score: Float[Tensor, "*site V"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: RankOne
) -> Float[Tensor, "*site S"]:
    """The same of a score given by its logarithm, in rows that may be wider than the process."""
    validation.times("t", t, open_ends=True)
    return _by_threshold(log_score, x_t, t, process, log=True)


def _by_threshold(values: Tensor, x_t: Tensor, t: Tensor, process: RankOne, log: bool) -> Tensor:
    site = SiteCoefficients(*(value.reshape(-1) for value in process.at(x_t, to_float64(t))))
    rows, k = values.reshape(-1, values.shape[-1]), x_t.reshape(-1)
    return nearest_posterior(rows, k, site, process.states, process.mask, log).reshape(*x_t.shape, process.states)
