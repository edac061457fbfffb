"""The projection of a score: the posterior whose bridge is nearest to it (Eq. 11)."""

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
    """Return the posterior whose bridge is nearest to a score (Eq. 11): argmin_mu |B_{t,k} mu - s|^2.

    A realizable score gives back its posterior (Proposition 4.5). The distance counts the candidates that have a forward rate
    into k. Rank-one processes of any vocabulary are solved by a threshold (appendix D.4), tabulated ones of up to 256 tokens by
    a batched quadratic program.

    Args:
        score: Scores, [*site, S]; `head.log_score(output, x_t, t).exp()` for a network's output. The entry at x_t is ignored.
        x_t: Current tokens k, [*site].
        t: Times in (0, 1), [*b].
        process: A forward process with rates.

    Returns:
        The posterior, [*site, S], in the dtype of the score, or in float32 for a score in float16 or bfloat16. (A posterior
        that is rounded to half precision has a score that is not realizable.)

    Raises:
        ValueError: The score has negative entries, as log-scores have, or a tabulated process has more than 256 tokens.

    Example:
        >>> score = head.log_score(model(x_t, t), x_t, t).exp()
        >>> mu = m2s.project(score, x_t, t, head.process)
        >>> repaired = m2s.score_from_posterior(mu, x_t, t, head.process)
    """
    validate_inputs("score", score, x_t, t, process, open_ends=True)
    validation.score("score", score, x_t)
    score = at_least_float32(score)
    if process.rank_one is None:
        return project_tabulated(score, x_t, promote_to(t, score), process)
    return _threshold_projection(score, x_t, t, process.rank_one, log=False)


def project_log(
    log_score: Float[Tensor, "*site V"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: RankOne
) -> Float[Tensor, "*site S"]:
    """Return the projection of a score given by its logarithm, so that no score overflows.

    Args:
        log_score: Log-scores, [*site, V]. Columns past `process.states` are padding.
        x_t: Current tokens, [*site].
        t: Times in (0, 1), [*b].
        process: A rank-one process.

    Returns:
        The posterior, [*site, S].
    """
    validation.times("t", t, open_ends=True)
    return _threshold_projection(log_score, x_t, t, process, log=True)


def _threshold_projection(values: Tensor, x_t: Tensor, t: Tensor, process: RankOne, log: bool) -> Tensor:
    """Project scores, or log-scores if `log`, under a rank-one process."""
    site = SiteCoefficients(*(value.reshape(-1) for value in process.at(x_t, to_float64(t))))
    rows, k = values.reshape(-1, values.shape[-1]), x_t.reshape(-1)
    return nearest_posterior(rows, k, site, process.states, process.mask, log).reshape(*x_t.shape, process.states)
