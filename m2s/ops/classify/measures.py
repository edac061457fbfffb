"""The result of the classification of score vectors."""

from typing import NamedTuple

from torch import Tensor


class ScoreMeasures(NamedTuple):
    """Measures of score vectors, one number per row.

    Args:
        outside: Coordinates outside the box, without tolerance.
        beyond: Coordinates outside the box by more than the tolerance.
        lowest: Least entry of the signed posterior.
        signed_mass: Minus the sum of its negative entries.
        off_plane: Distance of the score from the hyperplane of posterior scores, relative to its norm; 0 for a uniform process.
        negative_weights: Candidates with a negative weight in the analytic step to `s` (0 without `s`).
        negative_mass: Minus the sum of the negative weights.
    """

    outside: Tensor
    beyond: Tensor
    lowest: Tensor
    signed_mass: Tensor
    off_plane: Tensor
    negative_weights: Tensor
    negative_mass: Tensor
