"""Heads: what a network's output means, and the exact conversions between posterior, leave-one-out, score and rate."""

from m2s.conversions.bridge import (
    bridge_matrix,
    exit_and_jump,
    leave_one_out_from_posterior,
    posterior_from_leave_one_out,
    rate_from_score,
    score_from_leave_one_out,
    score_from_posterior,
    score_from_rate,
)
from m2s.conversions.inverse import affine_inverse, box
from m2s.heads.base import Head
from m2s.heads.factorized_rate import FactorizedRate
from m2s.heads.log_score import LogScore
from m2s.heads.next_token import NextToken, Shifted
from m2s.heads.ordinal import Ordinal
from m2s.heads.posterior import Posterior
from m2s.ops.last_layer import Output, Unprojected

__all__ = [
    "FactorizedRate",
    "Head",
    "LogScore",
    "NextToken",
    "Ordinal",
    "Output",
    "Posterior",
    "Shifted",
    "Unprojected",
    "affine_inverse",
    "box",
    "bridge_matrix",
    "exit_and_jump",
    "leave_one_out_from_posterior",
    "posterior_from_leave_one_out",
    "rate_from_score",
    "score_from_leave_one_out",
    "score_from_posterior",
    "score_from_rate",
]
