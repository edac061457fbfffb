"""What a network says about a site, and the exact maps between the ways of saying it."""

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
from m2s.heads.heads import FactorizedRate, Head, LogScore, Posterior
from m2s.heads.next_token import NextToken, Shifted
from m2s.heads.ordinal import Ordinal
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
