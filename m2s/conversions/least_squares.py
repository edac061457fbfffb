"""Least squares over the plane sum(mu) = 1, for bridges whose columns differ by hundreds of orders of magnitude."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def plane_least_squares(
    matrix: Float[Tensor, "*n R K"], target: Float[Tensor, "*n R"], allowed: Bool[Tensor, "*n K"]
) -> Float[Tensor, "*n K"]:
    """Return argmin |matrix mu - target|^2 over sum(mu) = 1 with mu = 0 outside `allowed`. Entries may be negative.

    Args:
        matrix: The matrices, [*n, R, K].
        target: The right-hand sides, [*n, R].
        allowed: The unknowns that may be nonzero, [*n, K].

    Returns:
        mu, [*n, K]. If there are several minimizers, it is the one with the least norm in scaled coordinates.
    """
    anchor, pivot, directions, length = _directions(matrix, allowed)
    right = target.unsqueeze(-1) - pivot
    # LAPACK fails on NaN and infinity. They give NaN here.
    finite = right.isfinite().all(-2, keepdim=True) & directions.isfinite().all((-2, -1), keepdim=True)
    right, directions = torch.where(finite, right, 0), torch.where(finite, directions, 0)
    if right.device.type == "cpu":  # gelsd keeps digits that the pseudo-inverse loses; other devices only have the latter
        solution = torch.linalg.lstsq(directions, right, driver="gelsd").solution
    else:
        solution = torch.linalg.pinv(directions) @ right
    mu = torch.where(finite.squeeze(-1), solution.squeeze(-1), torch.nan) / length
    mu = torch.where(allowed, mu, 0).scatter(-1, anchor, 0.0)
    return mu.scatter(-1, anchor, 1 - mu.sum(-1, keepdim=True))


def is_determined(
    matrix: Float[Tensor, "*n R K"], target: Float[Tensor, "*n R"], allowed: Bool[Tensor, "*n K"]
) -> Bool[Tensor, "*n"]:
    """Return where the rank condition (Eq. 10) holds numerically: the score determines mu to 1e-7 in float64.

    Args:
        matrix: The matrices, [*n, R, K].
        target: The right-hand sides, [*n, R].
        allowed: The unknowns that may be nonzero, [*n, K].

    Returns:
        Boolean, [*n].
    """
    _, _, directions, length = _directions(matrix, allowed)
    values = torch.linalg.svdvals(directions)
    # Columns of unknowns that are not allowed are zero and come last: the singular value of the last unknown counts.
    unknowns = allowed.sum(-1, keepdim=True) - 1
    least = values.gather(-1, (unknowns - 1).clamp(0, values.shape[-1] - 1)).squeeze(-1)
    least = torch.where(unknowns.squeeze(-1) > values.shape[-1], 0, least)
    shortest = length.where(allowed, torch.inf).amin(-1)
    enough = least * shortest > 1e-9 * torch.linalg.vector_norm(target, dim=-1)
    return enough | (unknowns.squeeze(-1) == 0)


def _directions(matrix: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parametrize the plane sum(mu) = 1 as mu = e_a + sum_z mu_z (e_z - e_a).

    Returns the index a, the column of e_a, the columns of the directions e_z - e_a at unit length, and their lengths. The
    columns of a bridge divide by transition probabilities and differ by hundreds of orders of magnitude, so that the lengths
    must be taken out.
    """
    anchor = allowed.to(torch.uint8).argmax(-1, keepdim=True)  # the first allowed token; torch has no argmax of Booleans
    pivot = matrix.gather(-1, anchor.unsqueeze(-2).expand(*matrix.shape[:-1], 1))
    directions = torch.where(allowed.unsqueeze(-2), matrix - pivot, 0)
    length = torch.linalg.vector_norm(directions, dim=-2)
    length = torch.where(length > 0, length, 1)
    return anchor, pivot, directions / length.unsqueeze(-2), length
