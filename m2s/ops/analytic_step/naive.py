"""The analytic step in plain torch.

    w_y = (s P_{t|s}^{-1})_y P_{t|s}(k|y),    P_{t|s} = A I + 1 q^T:    w_y = (s_y - q(y) sum(s)) / A  P_{t|s}(k|y)

The next token is drawn from the positive part of w by inverse CDF, in the order of the vocabulary, with one uniform number.
"""

from torch import Tensor

from m2s.conversions.bridge import score_from_posterior
from m2s.conversions.reverse_step import analytic_weights
from m2s.dtypes import to_float64
from m2s.ops.categorical import draw_categorical
from m2s.process import RankOne


def draw_next_token(
    rows: Tensor, x_t: Tensor, s: Tensor, t: Tensor, u: Tensor, process: RankOne, posterior: bool, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw the next token of every row, in float64 where the device has it.

    Args:
        rows: Log-scores or posteriors `[N, V]`.
        x_t: Current tokens `[N]`.
        s: Times at the end of the step `[N]`.
        t: Times `[N]`.
        u: Uniform numbers `[N]`.
        process: A rank-one process.
        posterior: Whether the rows are posteriors.
        shift: Number subtracted from the log-scores of each row `[N]`, or None.

    Returns:
        The next tokens and the total of the negative weights, `[N]` each.
    """
    values = to_float64(rows[:, : process.states])
    if posterior:
        score = score_from_posterior(values, x_t, t, process)
    else:
        score = (values if shift is None else values - shift.unsqueeze(-1)).exp()
    return draw_from(analytic_weights(score, x_t, s, t, process), u)


def draw_from(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from the positive part of signed weights.

    Args:
        weights: Weights `[*site, S]`.
        u: Uniform numbers `[*site]`.

    Returns:
        The tokens and the total of the negative weights, `[*site]` each.
    """
    return draw_categorical(weights.clamp(min=0), u), -weights.clamp(max=0).sum(-1, dtype=u.dtype)
