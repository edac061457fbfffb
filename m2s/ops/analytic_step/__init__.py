"""A step of SEDD's analytic sampler for rows of log-scores, or of posteriors: the next token and the dropped negative mass."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.analytic_step import naive
from m2s.ops.backend import uses_triton
from m2s.process import RankOne

__all__ = ["draw_next_token", "is_fused"]


def is_fused(rows: Tensor) -> bool:
    """Return whether these rows are drawn from by the Triton kernel.

    Args:
        rows: Log-scores or posteriors.

    Returns:
        True for the kernel, False for plain torch.
    """
    return rows.dtype == torch.float32 and uses_triton(rows)


def draw_next_token(
    rows: Float[Tensor, "N V"],
    x_t: Int[Tensor, "N"],
    s: Float[Tensor, "N"],
    t: Float[Tensor, "N"],
    u: Float[Tensor, "N"],
    process: RankOne,
    posterior: bool = False,
    shift: Float[Tensor, "N"] | None = None,
) -> tuple[Int[Tensor, "N"], Float[Tensor, "N"]]:
    """Draw the next token of every row from the positive part of the analytic weights (`m2s.analytic_weights`).

    Args:
        rows: Log-scores, the entry at x_t is ignored; or posteriors. Columns from `process.states` on are ignored.
        x_t: Current tokens k.
        s: Times at the end of the step, at most t.
        t: Times, below 1 where alpha_1 = 0.
        u: One uniform number in [0, 1) per row.
        process: A rank-one process.
        posterior: Whether the rows are posteriors. The weights of their scores are those of the Bayes step.
        shift: Number subtracted from the log-scores of each row; None: 0.

    Returns:
        The next tokens, and the total of the negative weights, without its sign.
    """
    if is_fused(rows):
        from m2s.ops.analytic_step.triton import draw_next_token as kernel  # imports the optional package triton

        return kernel(rows, x_t, s, t, u, process, posterior, shift)
    return naive.draw_next_token(rows, x_t, s, t, u, process, posterior, shift)
